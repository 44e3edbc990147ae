"""Files to pixels: decoded to 8 bits, resized and cropped the way published results did it.

Conversions, all of them:

- grey, palette, CMYK and YCCK pictures become RGB, transparency is dropped (what torchvision's loader does);
- 16-bit grey is divided by 257, so that white stays white (Pillow's own conversion would clip it);
- an EXIF rotation is not applied (torchvision's loader does not either).

Anything else is an error that names the file: no picture is ever skipped or filled in.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wise_atta import errors

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]
SUFFIXES = (
    *(".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".avif", ".jp2", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
INTERPOLATIONS = ("bilinear", "bicubic")


def decode(data: bytes, name: str) -> Image:
    """An RGB picture from the bytes of a file; `name` is what an error calls it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise errors.MissingExtra("pictures need Pillow: pip install 'wise-atta[vision]'") from error
    try:
        picture = Image.open(io.BytesIO(data))
        picture.load()
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, …
        raise errors.DataError(f"{name} cannot be decoded ({error}): truncated, or no picture. Get it again") from error
    if picture.mode == "RGB":
        return picture
    if picture.mode == "I" or picture.mode.startswith("I;16"):
        values = np.asarray(picture)
        if values.min() < 0 or values.max() > 65535:
            raise errors.DataError(f"{name} has grey values outside 16 bits: convert it to 8 bits yourself")
        # (value + 128) // 257 in 16 bits: a small file may hold many pixels, and wider numbers would fill the memory.
        whole, rest = np.divmod(values.astype(np.uint16), np.uint16(257))
        return Image.fromarray((whole + (rest > 128)).astype(np.uint8)).convert("RGB")
    if picture.mode not in ("1", "L", "LA", "P", "PA", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB"):
        raise errors.DataError(f"{name} has pixels of kind {picture.mode!r}: convert it to 8-bit RGB yourself")
    return picture.convert("RGB")


def fit(
    picture: Image | Pixels,
    name: str,
    *,
    resize: int | None = None,
    crop: int | None = None,
    where: float = 0.5,
    interpolation: str = "bilinear",
) -> Pixels:
    """Short side to `resize` with antialiasing, then a square of side `crop`, as [height, width, channels] in 8 bits.

    The sizes are those of torchvision's `Resize` and `CenterCrop`. `where` says which square: 0 the top left, 0.5 the
    centre, 1 the bottom right.

    >>> fit(np.zeros((6, 9, 3), np.uint8), "a", resize=4, crop=4).shape
    (4, 4, 3)
    """
    if resize is not None:
        picture = _resize(picture, resize, interpolation)
    pixels = picture if isinstance(picture, np.ndarray) else np.asarray(picture)
    if crop is None:
        return pixels
    height, width = pixels.shape[:2]
    if min(height, width) < crop:
        raise errors.DataError(
            f"{name} is {width}×{height}, smaller than the crop of {crop}: give `resize`, or a smaller `crop`"
        )
    top, left = round((height - crop) * where), round((width - crop) * where)
    return pixels[top : top + crop, left : left + crop]


def _resize(picture: Image | Pixels, resize: int, interpolation: str) -> Image | Pixels:
    from PIL import Image

    if isinstance(picture, np.ndarray):
        grey = picture.ndim == 3 and picture.shape[2] == 1
        resized = _resize(Image.fromarray(picture[:, :, 0] if grey else picture), resize, interpolation)
        return np.asarray(resized)[:, :, None] if grey else np.asarray(resized)
    width, height = picture.size
    short = min(width, height)
    size = (int(resize * width / short), int(resize * height / short))
    return picture.resize(size, getattr(Image.Resampling, interpolation.upper())) if size != picture.size else picture
