"""Does the fast code compute what the published formulas say? Plain, slow versions of them answer, pixel by pixel."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import scipy.ndimage
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from wise_atta import rng
from wise_atta.data.corruptions import apply, blur, chance, digital, filters, jpeg, noise, weather
from wise_atta.data.corruptions.chance import NORMAL_UNIT, Chance
from wise_atta.data.corruptions.tables import TABLES, Disk, Elastic, Fog, Glass, Motion, Snow, Zooms

Picture = NDArray[np.uint8]
CPU = torch.device("cpu")


def photo(height: int, width: int, seed: int = 0) -> Tensor:
    """One picture [1, 3, H, W] with shapes and grain."""
    draws = rng.numpy(seed, "photo")
    smooth = scipy.ndimage.zoom(draws.random((3, 5, 5)), (1, height / 5, width / 5), order=1)
    pixels = (smooth * 235 + draws.normal(size=smooth.shape) * 8).clip(0, 255)
    return torch.from_numpy(pixels.astype(np.uint8))[None]


def keyed(key: str) -> Chance:
    return chance.draw(0, "test", 1, [key], torch.empty(0), CPU)


def last(images: Tensor) -> Picture:
    return images[0].permute(1, 2, 0).numpy()


def assert_close(ours: Tensor, theirs: NDArray[np.float64], within: float = 0.01) -> None:
    """Every pixel is the plain result rounded down, where that is known to some part of a grey level."""
    low, high = (np.floor((theirs + part).clip(0, 255)) for part in (-within, within))
    pixels = last(ours)
    assert ((low <= pixels) & (pixels <= high)).all()


# Chance


def mixed(value: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = (value ^ (value >> shift)) * factor % 2**32
    return value


def test_bits_are_the_hash_that_the_docs_describe() -> None:
    words = np.array([[0xDEADBEEF, 0x12345678, *range(14)]], dtype=np.uint32)
    bits = Chance(words, CPU).bits(4, 5, stream=3)[0].numpy().view(np.uint32)
    for place, value in enumerate(bits.ravel().tolist()):
        first = mixed((place * 0x9E3779B9 + 0xDEADBEEF) % 2**32)
        assert value == mixed((first + 0x12345678 + 3 * -0x61C88647 % 2**31) % 2**32)


def test_bits_of_pictures_streams_and_places_are_independent() -> None:
    ids = list(range(40))
    draws = chance.draw(0, "test", 1, ids, torch.empty(0), CPU)
    fields = torch.cat([draws.bits(64, 64, stream=s) for s in range(2)]).flatten(1)
    ones = torch.stack([(fields >> bit) & 1 for bit in range(32)]).double()
    assert (ones.mean((1, 2)) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(fields.numel())
    values = (fields.double() / 2**32).numpy()
    together = np.corrcoef(values)[np.triu_indices(len(values), 1)]
    assert np.abs(together).max() < 6 / math.sqrt(values.shape[1])
    for lag in (1, 2, 64, 65):
        shifted = (values[:, lag:] * values[:, :-lag]).mean() / values.var()
        assert abs(shifted) < 5 / math.sqrt(values.size)


def test_fields_have_the_distributions_that_they_are_named_after() -> None:
    draws = chance.draw(0, "test", 1, list(range(20)), torch.empty(0), CPU)
    uniform = draws.uniform(100, 100).flatten() / 65536
    counts = torch.histc(uniform, 100, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 99 + 5 * math.sqrt(2 * 99)
    normal = np.sort((draws.normal(100, 100) / NORMAL_UNIT).flatten().numpy())
    expected = (np.arange(len(normal)) + 0.5) / len(normal)
    reached = torch.special.ndtr(torch.from_numpy(normal)).numpy()
    assert np.abs(reached - expected).max() < 1.63 / math.sqrt(len(normal))
    scalars = chance.draw(0, "test", 1, list(range(4000)), torch.empty(0), CPU).scalars(6)
    assert np.abs(scalars.mean(0) - 0.5).max() < 5 / math.sqrt(12 * 4000)
    assert np.abs(np.corrcoef(scalars.T) - np.eye(6)).max() < 5 / math.sqrt(4000)


# Noise


def outcome_chances(table: Tensor) -> NDArray[np.float64]:
    """What an alias table makes of uniform bits: every column is chosen equally often."""
    packed = table.numpy().view(np.uint32).reshape(256, 256)
    keeps, alias = (packed >> 8) / 2**24, (packed & 0xFF).astype(int)
    chances = keeps / 256
    np.add.at(chances, (np.arange(256)[:, None], alias), (1 - keeps) / 256)
    return chances


@pytest.mark.parametrize("name", ["gaussian_noise", "speckle_noise", "shot_noise", "impulse_noise"])
@pytest.mark.parametrize(("size", "severity"), [(32, 1), (64, 3), (224, 5)])
def test_noise_has_the_mean_and_deviation_of_its_formula(name: str, size: int, severity: int) -> None:
    amount = TABLES[size][name][severity - 1][0]
    outcomes = {
        "gaussian_noise": noise._gaussian,
        "speckle_noise": noise._speckle,
        "shot_noise": noise._shot,
        "impulse_noise": noise._impulse,
    }[name]
    chances = outcome_chances(noise._alias_table(outcomes, amount, CPU))
    draws = rng.numpy(severity, name)
    for level in (0, 10, 128, 200, 255):
        x, count = np.full(400_000, level / 255), 400_000
        if name == "gaussian_noise":
            value = x + draws.normal(size=count, scale=amount)
        elif name == "speckle_noise":
            value = x + x * draws.normal(size=count, scale=amount)
        elif name == "shot_noise":
            value = draws.poisson(x * amount) / amount
        else:
            hit = draws.random(count) <= amount
            value = np.where(hit, draws.random(count) <= 0.5, x)
        theirs = np.bincount((value.clip(0, 1) * 255).astype(np.uint8), minlength=256) / count
        # The distance of an empirical distribution from its own law (Kolmogorov's, at 1 in 10,000).
        assert np.abs(np.cumsum(chances[level]) - np.cumsum(theirs)).max() < 2.23 / math.sqrt(count)


def test_noise_draws_from_its_table() -> None:
    images = torch.full((1, 3, 400, 400), 100, dtype=torch.uint8)
    result = noise.gaussian_noise(images, TABLES[224]["gaussian_noise"][0], keyed("a"))  # type: ignore[arg-type]
    counts = torch.bincount(result.flatten(), minlength=256).numpy()
    expected = outcome_chances(noise._alias_table(noise._gaussian, 0.08, CPU))[100] * result.numel()
    likely = expected > 50
    assert ((counts - expected)[likely] ** 2 / expected[likely]).sum() < likely.sum() + 5 * math.sqrt(2 * likely.sum())


# Blur


@pytest.mark.parametrize("sigma", [0.25, 0.4, 0.9, 1.5, 6])
def test_gaussian_is_scipys(sigma: float) -> None:
    images = photo(40, 57)
    ours = filters.gaussian(images, sigma)[0].numpy()
    theirs = scipy.ndimage.gaussian_filter(images[0].numpy().astype(float), (0, sigma, sigma), mode="nearest")
    assert np.abs(ours - theirs).max() < 0.01
    wide = filters.gaussian(images, 30 * sigma, truncate=3.0, border="reflect")[0].numpy()
    theirs = scipy.ndimage.gaussian_filter(
        images[0].numpy().astype(float), (0, 30 * sigma, 30 * sigma), mode="reflect", truncate=3.0
    )
    assert np.abs(wide - theirs).max() < 0.05


@pytest.mark.parametrize("size", [32, 64, 224])
def test_defocus_is_a_sum_over_the_disk(size: int) -> None:
    for disk in TABLES[size]["defocus_blur"]:
        assert isinstance(disk, Disk)
        images = photo(36, 30)
        kernel = blur._disk(disk, CPU)[0].numpy() / filters.UNIT
        assert abs(kernel.sum() - 1) < 0.015  # softened at the edge of its window, the largest disks weigh more
        reach = len(kernel) // 2
        inside = np.hypot(*np.meshgrid(np.arange(-reach, reach + 1), np.arange(-reach, reach + 1))) <= disk.radius
        if disk.alias <= 0.1:  # hardly softened: the disk itself
            assert np.abs(kernel - inside / inside.sum()).max() < 1e-5
        theirs = scipy.ndimage.correlate(images[0].numpy().astype(float), kernel[None], mode="mirror")
        assert_close(blur.defocus_blur(images, disk, keyed("a")), theirs.transpose(1, 2, 0))


@pytest.mark.parametrize("angle", [-45.0, -17.3, 0.0, 30.0, 45.0, -90.0, -135.0])
def test_motion_is_a_weighted_sum_of_shifted_pictures(angle: float) -> None:
    images, motion = photo(33, 41), Motion(9, 2.5)
    picture = last(images).astype(float)
    weights = [math.exp(-(i**2) / (2 * motion.sigma**2)) for i in range(2 * motion.radius + 1)]
    total = np.zeros_like(picture)
    rows, columns = np.arange(33), np.arange(41)
    for i, weight in enumerate(weights):
        down = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        right = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        moved = picture[(rows + down).clip(0, 32)][:, (columns + right).clip(0, 40)]
        total += weight / sum(weights) * moved
    ours = blur.along_line(images, motion, np.array([angle]))[0].permute(1, 2, 0).numpy()
    assert np.abs(ours - total).max() < 0.01


@pytest.mark.parametrize("size", [32, 64, 224])
def test_zoom_is_scipys_zoom_of_the_centre(size: int) -> None:
    images = photo(size, size)
    picture = last(images).astype(np.float64)
    for zooms in TABLES[size]["zoom_blur"][::2]:
        assert isinstance(zooms, Zooms)
        total = picture.copy()
        for factor in zooms.factors:
            cut = math.ceil(size / factor)
            start = (size - cut) // 2
            grown = scipy.ndimage.zoom(
                picture[start : start + cut, start : start + cut], (factor, factor, 1), order=1, mode="nearest"
            )
            trim = (len(grown) - size) // 2
            total += grown[trim : trim + size, trim : trim + size]
        assert_close(blur.zoom_blur(images, zooms, keyed("a")), total / (len(zooms.factors) + 1), 1e-3)


@pytest.mark.parametrize("glass", [Glass(0.4, 1, 2), Glass(0.9, 2, 2), Glass(1.1, 3, 2), Glass(1.5, 4, 1)])
def test_glass_copies_pixels_one_after_the_other(glass: Glass) -> None:
    images, draws = photo(45, 38), keyed("b")

    def smooth(pixels: Picture) -> Picture:
        blurred = filters.gaussian(torch.from_numpy(pixels).permute(2, 0, 1), glass.sigma)
        return blurred.permute(1, 2, 0).numpy().astype(np.uint8)

    picture = smooth(last(images))
    for turn in range(glass.rounds):
        bits = draws.bits(45, 38, stream=turn)[0].numpy().view(np.uint32)
        for row in range(45 - glass.reach, glass.reach, -1):
            for column in range(38 - glass.reach, glass.reach, -1):
                word = int(bits[row, column])
                down, right = ((half * 2 * glass.reach >> 16) - glass.reach for half in (word & 0xFFFF, word >> 16))
                picture[row, column] = picture[row + down, column + right]
    assert np.array_equal(last(blur.glass_blur(images, glass, draws)), smooth(picture))


# Weather


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_snow_is_drawn_flake_by_flake(severity: int) -> None:
    snow = TABLES[32]["snow"][severity - 1]
    assert isinstance(snow, Snow)
    images, draws = photo(32, 32), keyed("s")
    cut = math.ceil(32 / snow.zoom)
    flakes = snow.mean + snow.deviation * draws.normal(cut, cut)[0].numpy() / NORMAL_UNIT
    if snow.zoom != 1:
        flakes = scipy.ndimage.zoom(flakes, snow.zoom, order=1, mode="nearest")
        trim = (len(flakes) - 32) // 2
        flakes = flakes[trim : trim + 32, trim : trim + 32]
    flakes[flakes < snow.threshold] = 0
    layer = (flakes.clip(0, 1) * 255).astype(np.uint8)
    moved = blur.along_line(
        torch.from_numpy(layer)[None, None], Motion(snow.radius, snow.sigma), draws.scalars(1)[0] * 90 - 135
    )
    layer = np.floor(moved[0, 0].numpy() + 0.5)
    x = last(images) / 255
    grey = (x @ np.array([0.299, 0.587, 0.114]))[..., None]
    x = snow.mix * x + (1 - snow.mix) * np.maximum(x, grey * 1.5 + 0.5)
    theirs = x * 255 + layer[..., None] + np.rot90(layer, 2)[..., None]
    assert_close(weather.snow(images, snow, draws), theirs)


def test_fog_is_the_diamond_square_algorithm() -> None:
    images, draws, fog = photo(30, 27), keyed("f"), Fog(1.5, 1.75)
    side = 32
    draw = (draws.uniform(side, side)[0].numpy() * 2 - 65535) / 65536
    heights = {(0, 0): 0.0}
    step, wobble = side, 100.0
    while step >= 2:
        half = step // 2
        for row in range(half, side, step):
            for column in range(half, side, step):
                corners = [(row + i, column + j) for i in (-half, half) for j in (-half, half)]
                mean = sum(heights[i % side, j % side] for i, j in corners) / 4
                heights[row, column] = mean + wobble**2 * draw[row, column]
        points = [(r, c) for r in range(0, side, half) for c in range(0, side, half) if (r, c) not in heights]
        for row, column in points:
            sides = [(row - half, column), (row + half, column), (row, column - half), (row, column + half)]
            mean = sum(heights[i % side, j % side] for i, j in sides) / 4
            heights[row, column] = mean + wobble**2 * draw[row, column]
        step, wobble = half, wobble / fog.decay
    cloud = np.array([[heights[i, j] for j in range(side)] for i in range(side)])
    cloud = (cloud - cloud.min()) / (cloud.max() - cloud.min())
    x = last(images) / 255
    theirs = (x + fog.thickness * cloud[:30, :27, None]) * x.max() / (x.max() + fog.thickness)
    assert_close(weather.fog(images, fog, draws), theirs * 255)


def test_frost_is_cut_from_a_texture() -> None:
    images = photo(32, 48)
    plain = apply(torch.zeros_like(images), "frost", TABLES[32]["frost"][0], ids=[5])
    mixed_in = apply(images, "frost", TABLES[32]["frost"][0], ids=[5])
    assert_close(mixed_in, last(images) + last(plain).astype(float), 1)
    starts = {
        apply(torch.zeros_like(images), "frost", TABLES[32]["frost"][0], ids=[i])[0, 0, 0, 0].item() for i in range(20)
    }
    assert len(starts) > 5


# Digital


@pytest.mark.parametrize("quality", [1, 7, 18, 40, 50, 80, 95, 100])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (64, 80), (33, 47), (17, 16)])
def test_jpeg_is_pillows_to_the_bit(quality: int, height: int, width: int) -> None:
    images = torch.cat([photo(height, width), torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8)])
    ours = jpeg.compress(images, quality)
    for before, after in zip(images, ours, strict=True):
        file = io.BytesIO()
        Image.fromarray(before.permute(1, 2, 0).numpy().copy()).save(file, "JPEG", quality=quality)
        assert np.array_equal(after.permute(1, 2, 0).numpy(), np.array(Image.open(file)))


@pytest.mark.parametrize("size", [32, 64, 224])
@pytest.mark.parametrize("shape", [(32, 32), (64, 64), (45, 71)])
def test_pixelate_is_pillows_to_the_bit(size: int, shape: tuple[int, int]) -> None:
    images = photo(*shape)
    picture = Image.fromarray(last(images).copy())
    for amount in TABLES[size]["pixelate"]:
        small = (int(shape[1] * amount[0]), int(shape[0] * amount[0]))
        theirs = picture.resize(small, Image.Resampling.BOX).resize(shape[::-1], Image.Resampling.BOX)
        assert np.array_equal(last(apply(images, "pixelate", amount)), np.array(theirs))


@pytest.mark.parametrize("elastic", [*TABLES[32]["elastic_transform"], TABLES[64]["elastic_transform"][3]])
def test_elastic_is_an_affine_map_and_a_displacement(elastic: Elastic) -> None:
    images, draws = photo(32, 32), keyed("e")
    old = np.array([[26.0, 26.0], [26.0, 6.0], [6.0, 6.0]])
    new = old + (draws.scalars(6).reshape(3, 2) * 2 - 1) * elastic.affine
    matrix = np.linalg.solve(np.c_[old, np.ones(3)], new).T
    forward = np.vstack([matrix, [0, 0, 1]])
    column, row = np.meshgrid(np.arange(32.0), np.arange(32.0))
    source = np.linalg.inv(forward) @ np.stack([column.ravel(), row.ravel(), np.ones(1024)])
    picture = [
        scipy.ndimage.map_coordinates(c.astype(float), source[1::-1], order=1, mode="mirror").reshape(32, 32)
        for c in images[0].numpy()
    ]
    right, down = (
        scipy.ndimage.gaussian_filter(
            (draws.uniform(32, 32, stream=s)[0].numpy() * 2 - 65535) / 65536, elastic.sigma, mode="reflect", truncate=3
        )
        * elastic.amplitude
        for s in range(2)
    )
    theirs = [scipy.ndimage.map_coordinates(c, [row + down, column + right], order=1, mode="reflect") for c in picture]
    assert_close(digital.elastic_transform(images, elastic, draws), np.stack(theirs, 2), 0.02)


@pytest.mark.parametrize("size", [32, 64])
def test_colour_and_contrast_follow_their_formulas(size: int) -> None:
    images = photo(size, size)
    x = last(images) / 255
    for severity in range(5):
        amount = TABLES[size]["contrast"][severity][0]
        means = x.mean((0, 1), keepdims=True)
        theirs = ((x - means) * amount + means) * 255
        assert_close(apply(images, "contrast", TABLES[size]["contrast"][severity]), theirs, 1e-6)
        lift = TABLES[size]["brightness"][severity][0]
        hue, saturation, value = to_hsv(x)
        theirs = from_hsv(hue, saturation, (value + lift).clip(0, 1)) * 255
        assert_close(apply(images, "brightness", TABLES[size]["brightness"][severity]), theirs, 1e-6)
        scale, shift = TABLES[size]["saturate"][severity][:2]
        theirs = from_hsv(hue, (saturation * scale + shift).clip(0, 1), value) * 255
        assert_close(apply(images, "saturate", TABLES[size]["saturate"][severity]), theirs, 1e-6)


def to_hsv(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    red, green, blue = np.moveaxis(x, -1, 0)
    value, span = x.max(-1), np.ptp(x, axis=-1)
    safe = np.where(span == 0, 1, span)
    hue = np.where(
        value == red,
        (green - blue) / safe % 6,
        np.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    return np.where(span == 0, 0, hue), np.where(value == 0, 0, span / np.where(value == 0, 1, value)), value


def from_hsv(
    hue: NDArray[np.float64], saturation: NDArray[np.float64], value: NDArray[np.float64]
) -> NDArray[np.float64]:
    def channel(offset: int) -> NDArray[np.float64]:
        k = (offset + hue) % 6
        return value - value * saturation * np.minimum(k, 4 - k).clip(0, 1)

    return np.stack([channel(5), channel(3), channel(1)], axis=-1)
