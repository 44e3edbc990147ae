"""The training of source models: one seeded, resumable loop that writes a checkpoint and its card.

Pictures are decoded once, into 8-bit tensors on the training device and augmented there. Everything that is drawn for
an epoch depends on the seed and the epoch alone, and the state is saved after each, so a run that was killed and
started again ends with the same weights on the same device.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wise_atta import errors, rng
from wise_atta.data import catalog, layouts, models
from wise_atta.data.datasets import Place
from wise_atta.data.models import Preparation, SourceModel


@dataclass(frozen=True)
class Recipe:
    """All that decides what a training run ends with, beside its data.

    Parameters
    ----------
    start
        The model to start from, by name: an architecture `@random` or published weights; its last layer is replaced
        where the data has another number of classes.
    epochs, batch, rate, decay, momentum, warmup, smoothing
        SGD with Nesterov momentum; the learning rate climbs to `rate` over the share `warmup` of all steps and falls to
        zero along a cosine; `decay` acts on matrices and kernels only; `smoothing` is that of the labels.
    crop, resize
        Of the pictures; None means what the starting model wants.
    flip, shift, cutout, cutmix
        Augmentation: mirror half of the pictures; crop at a random place up to `shift` pixels beyond the edge (mirrored
        there); grey out a square of side `cutout`; paste parts of one picture into another in this share of batches.
    held_out
        Share of every class that is kept for measuring when there is no test set of its own.
    half
        Store kernels and matrices in 16 bits. Errors on the card are those of the stored file.
    """

    start: str
    epochs: int
    batch: int = 128
    rate: float = 0.1
    decay: float = 5e-4
    momentum: float = 0.9
    warmup: float = 0.2
    smoothing: float = 0.1
    crop: int | None = None
    resize: int | None = None
    flip: bool = True
    shift: int = 0
    cutout: int = 0
    cutmix: float = 0.0
    held_out: float = 0.0
    half: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "rate"):
            if not getattr(self, name) > 0:
                raise errors.BadConfig(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("decay", "shift", "cutout"):
            if not getattr(self, name) >= 0:
                raise errors.BadConfig(f"{name} must not be below 0, but is {getattr(self, name)}")
        for name in ("warmup", "smoothing", "momentum", "held_out"):
            if not 0 <= getattr(self, name) < 1:
                raise errors.BadConfig(f"{name} must lie from 0 up to 1, but is {getattr(self, name)}")
        if not 0 <= self.cutmix <= 1:
            raise errors.BadConfig(f"cutmix is a share of batches, 0 to 1, but is {self.cutmix}")


RECIPES = {
    "cifar10": Recipe(start="wise_atta/resnet18@random", epochs=60, batch=256, rate=0.2, shift=4, cutout=10, half=True),
    "pacs": Recipe(
        start="efficientnet_lite0", epochs=8, batch=32, rate=0.005, decay=1e-4, crop=128, resize=144, held_out=0.2
    ),
    "digits": Recipe(start="wise_atta/digits_cnn@random", epochs=10, batch=32, flip=False, shift=2, held_out=0.5),
    "folder": Recipe(start="efficientnet_lite0", epochs=8, batch=32, rate=0.005, decay=1e-4, held_out=0.2),
}


@dataclass(frozen=True)
class Decoded:
    """A whole domain in memory: 8-bit pixels [n, channels, height, width] and the class of each."""

    name: str
    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def sha256(self) -> str:
        """Of the pixels, the labels and the names of the classes."""
        digest = hashlib.sha256(self.pixels.contiguous().numpy().data)
        digest.update(self.labels.numpy().tobytes() + "\n".join(self.classes).encode())
        return digest.hexdigest()

    def part(self, chosen: Tensor, name: str) -> Decoded:
        return Decoded(name, self.pixels[chosen], self.labels[chosen], self.classes)


@dataclass(frozen=True)
class Step:
    """How far a training run is; `loss` is the mean of the last finished epoch."""

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float | None

    @property
    def ends_epoch(self) -> bool:
        return self.step == self.steps


def train(
    what: str,
    *,
    data: str | Path | None = None,
    out: str | Path = "models",
    name: str | None = None,
    recipe: Recipe | None = None,
    tests: Sequence[str | Path] = (),
    weights: str | Path | None = None,
    device: str | torch.device | None = None,
    restart: bool = False,
    report: Callable[[Step], None] | None = None,
) -> dict[str, Any]:
    """Train a source model, write `NAME.safetensors` and its card `NAME.json` under `out`, and return the card.

    A run that was interrupted goes on where it stopped; one that is finished is not done again.

    Parameters
    ----------
    what
        `cifar10`, `pacs`, `digits`, or a folder or zip file of `class/picture`.
    data
        The folder that holds the named data sets; `WISE_ATTA_DATA` if not given.
    name
        Of the files; by default made of the data set and the architecture.
    recipe
        `RECIPES[what]` if not given.
    tests
        Further data sets to measure the error on.
    weights
        A folder with weights files to start from, see `models.load`.
    device
        CUDA if there is one, otherwise the CPU. On CUDA the forward runs in bfloat16.
    restart
        Throw away an earlier run under the same name.
    report
        Called after every step.

    Examples
    --------
    >>> import tempfile
    >>> quick = dataclasses.replace(RECIPES["digits"], epochs=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     card = train("digits", out=folder, recipe=quick, report=lambda step: None)
    >>> card["architecture"], list(card["errors"])
    ('wise_atta/digits_cnn', ['digits held out'])
    """
    recipe = recipe or RECIPES.get(what, RECIPES["folder"])
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = models.load(recipe.start, weights=weights)
    model = dataclasses.replace(
        model, crop=recipe.crop or model.crop, resize=recipe.resize or (model.resize if recipe.crop is None else None)
    )
    learned, measured = _data(what, data, tests, model, recipe)
    model = dataclasses.replace(
        model, module=models.with_classes(model.module, len(learned.classes), recipe.seed), classes=learned.classes
    )
    name = name or f"{learned.name.removesuffix('-train')}-{model.architecture.rpartition('/')[2]}".replace("/", "-")
    files = _Files(Path(out).expanduser(), name)
    promise = {
        "recipe": dataclasses.asdict(recipe),
        "start": {"name": model.name, "weights_hash": model.weights_hash},
        "data": {"name": learned.name, "sha256": learned.sha256, "pictures": len(learned)},
    }
    if restart:
        files.clear()
    finished = files.finished(promise)
    if finished is not None:
        return finished
    loss, seconds = _fit(model, learned, recipe, device, files, promise, report or _print)
    files.write_tensors(model.module, half=recipe.half)
    models.fill(model.module, models.read_tensors(files.tensors), name)
    stored = dataclasses.replace(model, name=f"file:{files.tensors}", weights_hash="")
    card = {
        "architecture": model.architecture,
        "classes": list(learned.classes),
        **dataclasses.asdict(model.preparation),
        "weights_hash": stored.weights_hash,
        "errors": {test.name: evaluate(stored, test, device=device)["error"] for test in measured},
        "tests": [{"name": test.name, "sha256": test.sha256, "pictures": len(test)} for test in measured],
        **promise,
        "loss": loss,
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {package: _version(package) for package in ("wise-atta", "numpy", "pillow", "timm")},
    }
    return files.finish(card)


def evaluate(
    model: SourceModel, data: Decoded, *, device: str | torch.device | None = None, batch: int = 64
) -> dict[str, Any]:
    """How often a model is wrong on one domain, with what that number depends on.

    Classes are matched by name. The data may have fewer than the model, which still chooses among all of its own; a
    model that does not name its classes is taken to have those of the data, in sorted order.

    >>> evaluate(models.load("wise_atta/digits_cnn@random"), digits())["pictures"]
    1797
    """
    order = model.classes or data.classes
    truth = _as_classes(order, data)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    module = copy.deepcopy(model.module).to(device).eval()
    wrong = 0
    with torch.inference_mode():
        for pixels, labels in zip(data.pixels.split(batch), truth.split(batch), strict=True):
            inputs = model.normalise(_centre(pixels, model.crop).to(device).float() / 255)
            logits = module(inputs)
            if logits.shape[1] != len(order):
                raise errors.DataError(
                    f"{model.name} has {logits.shape[1]} logits for the {len(order)} classes of {data.name}"
                )
            wrong += int((logits.argmax(1).cpu() != labels).sum())
    return {
        "model": model.name,
        "weights_hash": model.weights_hash,
        "data": data.name,
        "data_sha256": data.sha256,
        "pictures": len(data),
        "wrong": wrong,
        "error": wrong / len(data),
    }


# ---- pictures --------------------------------------------------------------------------------------------------------


def read(data: str | Path, preparation: Preparation, root: str | Path | None = None) -> Iterator[Decoded]:
    """Decode a data set, one domain (at one severity) after the other.

    `data` is a name for `open_dataset`, or a folder or archive of `class/picture` or `domain/class/picture`.
    """
    path = Path(data).expanduser()
    if path.exists():
        dataset = layouts.read_tree(path.stem, layouts.open_all([path]))
    else:
        dataset = catalog.open_dataset(str(data), root)
    if len(preparation.mean) != dataset.channels:
        raise errors.BadConfig(
            f"{dataset.name} has {dataset.channels} channels, the model takes {len(preparation.mean)}: choose another"
        )
    for place in dataset.all_places():
        name = dataset.name if len(dataset.domains) == 1 else f"{dataset.name}/{place.name}"
        labels = torch.from_numpy(place.pictures.labels)
        yield Decoded(name, _decoded(place, preparation), labels, dataset.classes)


def _decoded(place: Place, preparation: Preparation) -> Tensor:
    cut = {key: getattr(preparation, key) for key in ("resize", "crop", "interpolation")}
    # A data set may cut several squares from a picture; a model is measured on the one that it was made for.
    centred = dataclasses.replace(place, views=1)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        squares = list(pool.map(lambda index: centred.load(index, **cut), range(len(centred))))
    return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2)


@cache
def digits() -> Decoded:
    """scikit-learn's 1,797 digits, doubled to 16×16, in the middle of a black square of 32×32.

    At their own 8×8 the published corruptions are not defined, and filling 32×32 their strokes are so wide that most of
    those change nothing. The 17 grey values are spread over 8 bits.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise errors.MissingExtra("digits come with scikit-learn: pip install 'wise-atta[bench]'") from error
    bundle = load_digits()
    grey = torch.from_numpy(bundle.images * (255 / 16)).unsqueeze(1)
    doubled = nn.functional.interpolate(grey, scale_factor=2.0, mode="bilinear", align_corners=False)
    pixels = nn.functional.pad(doubled.round().to(torch.uint8), (8, 8, 8, 8))
    labels = bundle.target.astype(np.int64)
    return Decoded("digits", pixels, torch.from_numpy(labels), tuple(map(str, bundle.target_names)))


def split(data: Decoded, held_out: float, seed: int) -> tuple[Decoded, Decoded]:
    """Decoded to learn from and pictures to measure on, the same share of every class.

    >>> learned, kept = split(digits(), 0.5, seed=0)
    >>> len(learned), len(kept)
    (901, 896)
    """
    kept: list[Tensor] = []
    for label in range(len(data.classes)):
        members = (data.labels == label).nonzero()[:, 0]
        order = rng.numpy(seed, "held out", label).permutation(len(members))
        kept.append(members[torch.from_numpy(order[: int(len(members) * held_out)])])
    away = torch.zeros(len(data), dtype=torch.bool)
    away[torch.cat(kept)] = True
    return data.part((~away).nonzero()[:, 0], data.name), data.part(away.nonzero()[:, 0], f"{data.name} held out")


def _data(
    what: str, data: str | Path | None, tests: Sequence[str | Path], model: SourceModel, recipe: Recipe
) -> tuple[Decoded, list[Decoded]]:
    """What is learned from and what is measured on."""
    # Room for random crops: all that lies around the centre square is kept.
    wide = dataclasses.replace(model.preparation, crop=model.resize or model.crop)
    if what == "digits":
        learned, measured = digits(), []
    elif what == "cifar10":
        learned, *_ = read("cifar10-train", wide, data)
        measured = list(read("cifar10", model, data))
    elif what == "pacs":
        learned, *measured = read("pacs", wide, data)
    else:
        learned, *others = read(what, wide)
        measured = []
        if others:
            raise errors.BadConfig(f"{what} has several domains, such as {others[0].name}: name one of its folders")
    measured += [domain for test in tests for domain in read(test, model)]
    for test in measured:
        _as_classes(learned.classes, test)
    if recipe.held_out:
        learned, kept = split(learned, recipe.held_out, recipe.seed)
        measured = [kept, *measured]
    return learned, measured


def _as_classes(order: tuple[str, ...], data: Decoded) -> Tensor:
    """The labels of `data` as positions in `order`."""
    return torch.tensor(models.match(data.classes, order, data.name))[data.labels]


def _centre(pixels: Tensor, crop: int) -> Tensor:
    top, left = round((pixels.shape[2] - crop) / 2), round((pixels.shape[3] - crop) / 2)
    return pixels[:, :, top : top + crop, left : left + crop]


# ---- the loop --------------------------------------------------------------------------------------------------------


def _fit(
    model: SourceModel,
    data: Decoded,
    recipe: Recipe,
    device: torch.device,
    files: _Files,
    promise: dict[str, Any],
    report: Callable[[Step], None],
) -> tuple[list[float], float]:
    """Train `model.module` in place, from the last saved epoch on; the loss of every epoch and the seconds it took."""
    batch = min(recipe.batch, len(data))
    steps = len(data) // batch
    pixels, labels, normalise = data.pixels.to(device), data.labels.to(device), model.normaliser(device)
    module = model.module.to(device)
    if device.type == "cuda":
        module = module.to(memory_format=torch.channels_last)
    kernels = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    optimizer = torch.optim.SGD(
        [{"params": kernels, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}],
        lr=recipe.rate,
        momentum=recipe.momentum,
        nesterov=recipe.momentum > 0,
    )
    losses, seconds = files.resume(promise, module, optimizer, device)
    for epoch in range(len(losses), recipe.epochs):
        began = time.monotonic()
        total = torch.zeros((), device=device)
        with _deterministic(recipe.seed, epoch):
            module.train()
            draws = _Draws(recipe, epoch, len(data), batch, (pixels.shape[2], pixels.shape[3]), model.crop, device)
            for step in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = recipe.rate * _climb(epoch * steps + step, recipe.epochs * steps, recipe.warmup)
                chosen, crops = draws.crops(pixels, step)
                inputs, kept = draws.mixed(draws.holed(normalise(crops), step), step)
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = _loss(module(inputs), labels[chosen], kept, recipe.smoothing)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                total += loss.detach()
                if step + 1 < steps:
                    report(Step(epoch + 1, recipe.epochs, step + 1, steps, losses[-1] if losses else None))
        losses.append(float(total) / steps)
        seconds += time.monotonic() - began
        if not math.isfinite(losses[-1]):
            raise errors.NotFinite(f"the loss is {losses[-1]} in epoch {epoch + 1}: lower the rate of {recipe.rate}")
        files.save(promise, module, optimizer, losses, seconds)
        report(Step(epoch + 1, recipe.epochs, steps, steps, losses[-1]))
    module.to("cpu", memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
    return losses, seconds


class _Draws:
    """All that chance decides in one epoch, drawn on the CPU from the seed and the epoch alone."""

    def __init__(
        self, recipe: Recipe, epoch: int, n: int, batch: int, size: tuple[int, int], crop: int, device: torch.device
    ) -> None:
        chance = rng.numpy(recipe.seed, "training", epoch)
        self.recipe, self.batch, self.size, self.crop = recipe, batch, size, crop
        room = [side + 2 * recipe.shift - crop + 1 for side in size]
        drawn = {
            "order": chance.permutation(n),
            "corner": chance.integers(0, room, (n, 2)) - recipe.shift,
            "hole": chance.integers(0, crop, (n, 2)) - recipe.cutout // 2,
            "flip": chance.random(n) < 0.5 * recipe.flip,
        }
        self.order, self.corner, self.hole, self.flip = (torch.from_numpy(d).to(device) for d in drawn.values())
        self.along = torch.arange(crop, device=device)
        # One box a batch: its centre is uniform, and so is the share of the picture that it would cover uncut.
        steps = n // batch
        middle, half = chance.integers(0, crop, (steps, 2)), np.sqrt(chance.random((steps, 1))) * crop / 2
        mixes = chance.random((steps, 1)) < recipe.cutmix
        edges = np.concatenate([middle - half, middle + half], axis=1).round().clip(0, crop).astype(int)
        self.boxes: list[list[int]] = (edges * mixes).tolist()

    def crops(self, pixels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Which pictures the batch has, and a square of each with pixels in [0, 1]; mirrored where it leaves them."""
        now = slice(step * self.batch, (step + 1) * self.batch)
        sides = []
        for axis, side in enumerate(self.size):
            at = (self.corner[now, axis, None] + self.along).abs()
            sides.append((side - 1) - ((side - 1) - at).abs())
        rows, columns = sides
        columns = torch.where(self.flip[now, None], columns.flip(1), columns)
        chosen = self.order[now]
        squares = pixels[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return chosen, squares.permute(0, 3, 1, 2).float() / 255

    def holed(self, inputs: Tensor, step: int) -> Tensor:
        """Inputs with a square set to the mean colour, which is zero after normalisation."""
        if not self.recipe.cutout:
            return inputs
        now = slice(step * self.batch, (step + 1) * self.batch)
        from_edge = self.along - self.hole[now, :, None]
        inside = (from_edge >= 0) & (from_edge < self.recipe.cutout)
        return inputs.masked_fill((inside[:, 0, :, None] & inside[:, 1, None, :])[:, None], 0.0)

    def mixed(self, inputs: Tensor, step: int) -> tuple[Tensor, float]:
        """Inputs with a box from the neighbour in the batch pasted in, and the share that is still their own."""
        top, left, bottom, right = self.boxes[step]
        area = (bottom - top) * (right - left)
        if not area:
            return inputs, 1.0
        pasted = inputs.clone()
        pasted[:, :, top:bottom, left:right] = inputs.roll(1, 0)[:, :, top:bottom, left:right]
        return pasted, 1 - area / self.crop**2


def _loss(logits: Tensor, labels: Tensor, kept: float, smoothing: float) -> Tensor:
    loss = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    if kept == 1:
        return loss
    pasted = nn.functional.cross_entropy(logits, labels.roll(1, 0), label_smoothing=smoothing)
    return kept * loss + (1 - kept) * pasted


def _climb(step: int, steps: int, warmup: float) -> float:
    """The share of the peak learning rate: up along a line, down along a cosine.

    >>> [round(_climb(step, 10, 0.2), 2) for step in (0, 1, 2, 5, 9)]
    [0.5, 1.0, 1.0, 0.69, 0.04]
    """
    rising = warmup * steps
    if step < rising:
        return min(1.0, (step + 1) / rising)
    return 0.5 + 0.5 * math.cos(math.pi * (step - rising) / (steps - rising))


@contextlib.contextmanager
def _deterministic(seed: int, epoch: int) -> Iterator[None]:
    """Kernels that give the same bits twice, and dropout that depends on seed and epoch; undone afterwards."""
    # cuBLAS reads this when it first starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    strict = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, memory = torch.backends.cudnn.benchmark, torch.utils.deterministic
    fill = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(int(rng.numpy(seed, "dropout", epoch).integers(1 << 62)))
            yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark
        memory.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


# ---- files -----------------------------------------------------------------------------------------------------------


class _Files:
    """What a run leaves on disk: `NAME.resume` while it lasts, then `NAME.safetensors` and `NAME.json`.

    Each is written beside its place and moved there, so a killed run never leaves half a file under its name. The card
    comes last: where it is, the run is finished.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.tensors, self.card, self.state = (folder / f"{name}.{end}" for end in ("safetensors", "json", "resume"))

    def clear(self) -> None:
        for path in (self.card, self.tensors, self.state):
            path.unlink(missing_ok=True)

    def finished(self, promise: dict[str, Any]) -> dict[str, Any] | None:
        if not self.card.exists() or not self.tensors.exists():
            return None
        card: dict[str, Any] = json.loads(self.card.read_text(encoding="utf-8"))
        self._same(self.card, {key: card.get(key) for key in promise}, promise)
        return card

    def resume(
        self, promise: dict[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> tuple[list[float], float]:
        if not self.state.exists():
            return [], 0.0
        try:
            saved = torch.load(self.state, map_location=device, weights_only=True)
        except Exception as error:  # torch raises whatever its unpickler met
            raise errors.StateMismatch(f"{self.state} cannot be read ({error}): start again with --restart") from error
        self._same(self.state, saved["promise"], promise)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["losses"], saved["seconds"]

    def save(
        self,
        promise: dict[str, Any],
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        losses: list[float],
        seconds: float,
    ) -> None:
        state = {
            "promise": promise,
            "module": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "losses": losses,
            "seconds": seconds,
        }
        self._write(self.state, lambda path: torch.save(state, path))

    def write_tensors(self, module: nn.Module, half: bool) -> None:
        """Kernels and matrices in 16 bits if `half`; vectors, among them variances, are few and stay as they are."""
        stored = {
            name: (tensor.half() if half and tensor.dim() > 1 else tensor).contiguous()
            for name, tensor in module.state_dict().items()
        }
        content: bytes = models.package("safetensors.torch").save(stored)
        self._write(self.tensors, lambda path: path.write_bytes(content))

    def finish(self, card: dict[str, Any]) -> dict[str, Any]:
        """Write the card and return it as it will be read."""
        text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
        self._write(self.card, lambda path: path.write_text(text, encoding="utf-8"))
        self.state.unlink(missing_ok=True)
        written: dict[str, Any] = json.loads(text)
        return written

    def _write(self, path: Path, write: Callable[[Path], object]) -> None:
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            write(part)
            part.replace(path)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise errors.DataError(
                f"{path} cannot be written ({error}): free some space, or give another --out"
            ) from error

    @staticmethod
    def _same(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
        # Through JSON, so that a card that was read back compares equal.
        before, now = (json.loads(json.dumps(each)) for each in (before, now))
        other = [
            f"{part}.{key} was {(before.get(part) or {}).get(key)!r}, now {value!r}"
            for part, values in now.items()
            for key, value in values.items()
            if (before.get(part) or {}).get(key) != value
        ]
        if other:
            raise errors.StateMismatch(
                f"{path} is from another run ({'; '.join(other)}): give another --name or --out, or --restart"
            )


def _print(step: Step) -> None:
    if step.ends_epoch:
        print(f"epoch {step.epoch}/{step.epochs}  loss {step.loss:.4f}", flush=True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
