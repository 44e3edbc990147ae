"""Are these the corruptions of the package `imagecorruptions`, on real pictures?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from wise_atta import errors
from wise_atta.data.corruptions import CORRUPTIONS, EXTRA, check, corrupt


@pytest.fixture(scope="module")
def theirs() -> check.Reference:
    try:
        return check.reference()
    except errors.MissingExtra as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def images(wise_atta_data: Path) -> Tensor:
    return check.pictures(wise_atta_data / "imagenet-sample.zip", 3)


@pytest.mark.parametrize("name", [*CORRUPTIONS, *EXTRA])
def test_every_corruption_stays_within_its_stated_bounds(name: str, images: Tensor, theirs: check.Reference) -> None:
    # The reference needs a second a picture for glass.
    severities, count = ((4,), 1) if name == "glass_blur" else ((1, 3, 5), 3)
    for severity in severities:
        comparison = check.compare(images[:count], name, severity, theirs)
        shares = comparison.excess()
        assert max(shares.values()) <= 1, (comparison, shares)


def test_another_corruption_would_not_pass(images: Tensor, theirs: check.Reference) -> None:
    def stronger(picture: check.Picture, name: str, severity: int) -> check.Picture:
        return theirs(picture, name, severity + 1)

    for name in ("gaussian_noise", "impulse_noise", "zoom_blur", "contrast", "jpeg_compression"):
        assert max(check.compare(images, name, 2, stronger).excess().values()) > 1


def test_the_command_prints_a_table_and_fails_out_of_bounds(
    wise_atta_data: Path, theirs: check.Reference, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--data", str(wise_atta_data / "imagenet-sample.zip"), "--pictures", "1", "--severities", "2"]
    assert check.main([*arguments, "--only", "contrast", "snow"]) == 0
    assert "| contrast | 0.000 (≤ 0.05)" in capsys.readouterr().out
    monkeypatch.setitem(check.BOUNDS, "snow", check.Bounds(pixels=1e-9))
    assert check.main([*arguments, "--only", "snow"]) == 1
    assert "snow at severity 2: pixels out of bounds" in capsys.readouterr().err


def test_numpys_global_chance_is_left_alone(images: Tensor, theirs: check.Reference) -> None:
    before = np.random.get_state()[1].copy()
    check.compare(images[:1], "gaussian_noise", 1, theirs)
    check.compare(images[:1], "fog", 1, theirs)
    assert np.array_equal(before, np.random.get_state()[1])


def test_pictures_that_are_not_there_are_an_error(tmp_path: Path, wise_atta_data: Path) -> None:
    with pytest.raises(errors.DataError, match="no zip file"):
        check.pictures(tmp_path / "none.zip", 1)
    with pytest.raises(errors.DataError, match="not 2"):
        check.pictures(wise_atta_data / "cifar10-test.zip", 2)


def test_small_pictures_look_like_what_they_were(wise_atta_data: Path) -> None:
    """At severity 1 of the 32 px table a CIFAR-10 picture is still closer to itself than to any other picture."""
    images = check.pictures(wise_atta_data / "cifar10-test.zip", 10, size=32)
    clean = images.flatten(1).float()
    for name in CORRUPTIONS:
        shown = corrupt(images, name, 1, ids=range(10)).flatten(1).float()
        shown = (shown - shown.mean(1, keepdim=True)) / shown.std(1, keepdim=True)
        plain = (clean - clean.mean(1, keepdim=True)) / clean.std(1, keepdim=True)
        assert torch.equal((shown @ plain.T).argmax(1), torch.arange(10)), name
