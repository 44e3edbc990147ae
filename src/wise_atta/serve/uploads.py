"""Uploads: pictures of known kinds and bounded size become pixels; everything else is refused."""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from wise_atta import errors
from wise_atta.data import pictures
from wise_atta.data.models import Preparation

_MAGIC = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG", b"BM": "BMP"}
KINDS = ("JPEG", "PNG", "WEBP", "BMP", "NPY")
# An entry in the header of a .npy file: a word, and a type, a truth value or sides.
_ENTRY = re.compile(r"'(\w+)'\s*:\s*('[^']*'|True|False|\([\d,\s]*\))")


class TooLarge(errors.BadInput):
    """A picture or a request above its limit."""


@dataclass(frozen=True)
class Sample:
    """One picture: as it was received, and as the model takes it."""

    kind: str
    data: bytes
    pixels: Tensor


def sniff(data: bytes) -> str:
    """The kind of a file by its first bytes; its name and declared type are not asked.

    >>> sniff(b"BM......")
    'BMP'
    >>> sniff(b"<svg>")
    Traceback (most recent call last):
    wise_atta.errors.BadInput: not a picture that is taken here: send JPEG, PNG, WebP, BMP or .npy
    """
    for magic, kind in _MAGIC.items():
        if data.startswith(magic):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith(b"\x93NUMPY"):
        return "NPY"
    raise errors.BadInput("not a picture that is taken here: send JPEG, PNG, WebP, BMP or .npy")


class UploadReader:
    """Turns what clients send into what a model takes.

    Parameters
    ----------
    preparation
        What the model wants: channels, crop and resize.
    max_pictures, max_pixels
        Limits of one request.
    """

    def __init__(self, preparation: Preparation, *, max_pictures: int, max_pixels: int) -> None:
        self.preparation = preparation
        self.max_pictures = max_pictures
        self.max_pixels = max_pixels

    def files(self, files: list[bytes]) -> list[Sample]:
        """Pictures as files; a `.npy` may be among them and hold several."""
        samples: list[Sample] = []
        pixels = 0
        for number, data in enumerate(files):
            try:
                kind = sniff(data)
                if kind == "NPY":
                    array = read_npy(data, self.max_pixels - pixels)
                    pixels += array.size
                    samples += self._array(array, self.max_pictures - len(samples))
                else:
                    pixels += self._declared(kind, data, self.max_pixels - pixels)
                    samples.append(Sample(kind, data, self._picture(kind, data)))
            except TooLarge:
                raise
            except errors.WiseAttaError as error:
                raise errors.BadInput(f"picture {number}: {error}") from error
            if len(samples) > self.max_pictures:
                raise self._many(len(samples))
        if not samples:
            raise errors.BadInput("no picture: send at least one")
        return samples

    def encoded(self, texts: list[str]) -> list[Sample]:
        """Pictures in base64, as JSON carries them."""
        if len(texts) > self.max_pictures:
            raise self._many(len(texts))
        files = []
        for number, text in enumerate(texts):
            try:
                files.append(base64.b64decode(text, validate=True))
            except (binascii.Error, ValueError) as error:
                raise errors.BadInput(f"picture {number} is not base64: {error}") from error
        return self.files(files)

    def restore(self, kind: str, data: bytes) -> Tensor:
        """The same pixels again, from a picture as it was received."""
        if kind == "NPY":
            return self._array(read_npy(data, None), 1)[0].pixels
        return self._picture(kind, data)

    def _many(self, count: int) -> TooLarge:
        return TooLarge(f"{count} pictures in one request: send {self.max_pictures} at most")

    def _large(self) -> TooLarge:
        return TooLarge(f"more than {self.max_pixels} pixels in one request: send fewer or smaller pictures")

    def _declared(self, kind: str, data: bytes, left: int) -> int:
        """Pixels by the header alone, before anything is decompressed."""
        try:
            with Image.open(io.BytesIO(data), formats=[kind]) as picture:
                pixels = picture.width * picture.height
        except Image.DecompressionBombError as error:
            raise self._large() from error
        except Exception as error:  # Pillow's parsers raise OSError, SyntaxError, ValueError, struct.error, …
            raise errors.BadInput(f"it begins like {kind} but cannot be read ({type(error).__name__})") from error
        if pixels > left:
            raise self._large()
        if not pixels:
            raise errors.BadInput("it has no pixels")
        return pixels

    def _picture(self, kind: str, data: bytes) -> Tensor:
        picture = _upright(pictures.decode(data, f"the {kind}"))
        if len(self.preparation.mean) == 1:
            picture = picture.convert("L")
        return self._fit(picture)

    def _fit(self, picture: Any) -> Tensor:
        want = self.preparation
        height, width = picture.shape[:2] if isinstance(picture, np.ndarray) else (picture.height, picture.width)
        # A picture that is too small for the crop is enlarged: what a person sent is answered.
        resize = (
            want.resize if want.resize is not None else (want.crop if (height, width) != (want.crop,) * 2 else None)
        )
        if max(height, width) > 100 * min(height, width):
            raise errors.BadInput(f"{width}×{height} is more than a hundred times as long as wide")
        pixels = pictures.fit(picture, "it", resize=resize, crop=want.crop, interpolation=want.interpolation)
        pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous().float() / 255

    def _array(self, array: NDArray[Any], left: int) -> list[Sample]:
        channels, crop = len(self.preparation.mean), self.preparation.crop
        if len(array) > left:
            raise self._many(self.max_pictures - left + len(array))
        if array.dtype == np.uint8 and array.ndim in (3, 4) and min(array.shape, default=0) > 0:
            if array.ndim == 3:
                array = array[..., None]
            if array.shape[3] != channels:
                raise errors.BadInput(f"8-bit arrays must be [n, height, width, {channels}], not {list(array.shape)}")
            return [Sample("NPY", write_npy(one[None]), self._fit(one)) for one in array]
        if (
            array.dtype in (np.float32, np.float64, np.float16)
            and array.shape[1:] == (channels, crop, crop)
            and len(array)
        ):
            values = np.ascontiguousarray(array, dtype=np.float32)
            if not np.isfinite(values).all() or values.min() < 0 or values.max() > 1:
                raise errors.BadInput("pixels must be finite and in [0, 1]")
            return [Sample("NPY", write_npy(one[None]), torch.from_numpy(one.copy())) for one in values]
        raise errors.BadInput(
            f"an array of {array.dtype} {list(array.shape)}: send uint8 [n, height, width, {channels}], or floats in "
            f"[0, 1] as [n, {channels}, {crop}, {crop}]"
        )


def _upright(picture: Image.Image) -> Image.Image:
    """A picture as its EXIF data says that it is to be seen: phones store what the sensor saw, and how it was held."""
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:  # EXIF data that cannot be read says nothing; Pillow's parser raises errors of many kinds
        return picture


def read_npy(data: bytes, limit: int | None) -> NDArray[Any]:
    """An array from the bytes of a `.npy` file, checked against its header before memory is taken."""
    try:
        version = data[6], data[7]
        size_at, wide = (8, "<H") if version == (1, 0) else (8, "<I")
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version}")
        start = size_at + struct.calcsize(wide)
        (length,) = struct.unpack(wide, data[size_at:start])
        if length > 4096:
            raise ValueError("the header is too long")
        header = _header(data[start : start + length].decode("latin1"))
        dtype, fortran = np.dtype(header["descr"].strip("'")), header["fortran_order"] == "True"
        if not header["shape"].startswith("("):
            raise ValueError("sides must be a tuple")
        shape = tuple(int(side) for side in re.findall(r"\d+", header["shape"]))
        if dtype.kind not in "uf" or dtype.hasobject or not shape or len(shape) > 4:
            raise errors.BadInput(
                f"a .npy of {str(dtype)[:32]} with {len(shape)} sides: send uint8, or floats in [0, 1]"
            )
        if not all(isinstance(side, int) and 0 <= side <= len(data) for side in shape):
            raise ValueError(f"sides {shape}")
        count = math.prod(shape)
        body = memoryview(data)[start + length :]
        if count * dtype.itemsize != len(body):
            raise ValueError(f"{len(body)} bytes for an array of {dtype} {shape}")
        array = np.frombuffer(body, dtype=dtype).reshape(shape, order="F" if fortran else "C")
    except errors.BadInput:
        raise
    except Exception as error:  # a header is a literal and a type description: these raise errors of many kinds
        raise errors.BadInput(f"the .npy cannot be read ({type(error).__name__})") from error
    if limit is not None and count > limit:
        raise TooLarge("more values in the .npy than a request may hold: send fewer or smaller pictures")
    return array


def _header(text: str) -> dict[str, str]:
    """The three entries of a header, each as it is written.

    Not by `ast.literal_eval`: in Python 3.11 that fails now and then where several threads use it.
    """
    text = text.strip().replace('"', "'")
    entries = dict(_ENTRY.findall(text))
    if not (text.startswith("{") and text.endswith("}")) or set(entries) != {"descr", "fortran_order", "shape"}:
        raise ValueError("the header is not a dictionary of descr, fortran_order and shape")
    return entries


def write_npy(array: NDArray[Any]) -> bytes:
    """An array as the bytes of a `.npy` file."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def to_png(kind: str, data: bytes, side: int = 1024) -> bytes:
    """A picture as a browser can show it: decoded and encoded anew, so that nothing but pixels gets through."""
    if kind == "NPY":
        one = read_npy(data, None)[0]
        values = one if one.dtype == np.uint8 else np.rint(one.transpose(1, 2, 0) * 255).astype(np.uint8)
        picture = Image.fromarray(values[:, :, 0] if values.ndim == 3 and values.shape[2] == 1 else values)
    else:
        picture = _upright(pictures.decode(data, "the picture"))
    if max(picture.size) > side:
        picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
