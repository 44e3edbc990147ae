"""What do the data tests share? Small pictures, and small data sets with the folder names of the real ones."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wise_atta import rng
from wise_atta.data.corruptions import CORRUPTIONS

# Classes of ImageNet-R and ImageNet-A alike, with their places among the 1,000.
WNIDS = {"n01443537": 1, "n01498041": 6, "n07749582": 951}


@pytest.fixture(scope="session")
def jpeg() -> Callable[..., bytes]:
    """A function that makes a picture file from a number: smooth, in colour, the same every time."""

    def make(number: int, size: tuple[int, int] = (40, 36), form: str = "JPEG") -> bytes:
        coarse = rng.numpy(number, "picture").integers(0, 256, (4, 4, 3)).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(file, form)
        return file.getvalue()

    return make


@pytest.fixture(scope="session")
def pack() -> Callable[[Path, Mapping[str, bytes]], Path]:
    """A function that writes files as a folder, a zip or a tar, by the ending of the path."""

    def write(path: Path, files: Mapping[str, bytes]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".zip":
            with zipfile.ZipFile(path, "w") as archive:
                for number, (name, data) in enumerate(files.items()):
                    archive.writestr(name, data, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[number % 2])
        elif path.suffix == ".tar":
            with tarfile.open(path, "w") as tar:
                for name, data in files.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        else:
            for name, data in files.items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(data)
        return path

    return write


@pytest.fixture(scope="session")
def class_files(jpeg: Callable[..., bytes]) -> Callable[..., dict[str, bytes]]:
    """A function that makes files `prefix/class/picture` for the three classes, as the ImageNet sets name them."""

    def make(prefix: str = "", count: int = 2, size: tuple[int, int] = (40, 36), first: int = 0) -> dict[str, bytes]:
        names = [(wnid, number) for wnid in WNIDS for number in range(count)]
        return {
            f"{prefix}{wnid}/ILSVRC2012_val_{place:08d}.JPEG": jpeg(first + place, size)
            for place, (wnid, number) in enumerate(names)
        }

    return make


@pytest.fixture(scope="session")
def imagenet_folder(
    tmp_path_factory: pytest.TempPathFactory, pack: Callable[..., Path], class_files: Callable[..., dict[str, bytes]]
) -> Path:
    """A data folder with ImageNet-C as two tars, R as a tar, K as a zip and A as a folder, three classes each."""
    root = tmp_path_factory.mktemp("imagenet")
    for name, chosen in (("noise.tar", CORRUPTIONS[:7]), ("weather.tar", CORRUPTIONS[7:])):
        files: dict[str, bytes] = {}
        for corruption in chosen:
            for severity in (1, 2, 3, 4, 5):
                first = 100 * CORRUPTIONS.index(corruption) + 10 * severity
                files |= class_files(f"{corruption}/{severity}/", size=(224, 224), first=first)
        pack(root / "ImageNet-C" / name, files)
    renditions = class_files("imagenet-r/", size=(300, 260))
    pack(root / "imagenet-r.tar", {"imagenet-r/README.txt": b"about the set", **renditions})
    pack(root / "ImageNet-Sketch.zip", class_files("sketch/", size=(240, 320)))
    pack(root / "imagenet-a", class_files("", size=(256, 256)))
    return root
