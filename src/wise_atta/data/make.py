"""Corrupted data sets written to disk, as layouts that are read here: a grid of folders, or npy arrays."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wise_atta import errors
from wise_atta.data import catalog
from wise_atta.data.pictures import Pixels
from wise_atta.data.streams import PictureStream, StreamSpec, open_stream

FORMATS = ("npy", "png", "jpeg")
# The quality at which ImageNet-C was written.
_JPEG_QUALITY = 85
# Called with how many pictures were written and how many there will be.
Progress = Callable[[int, int], None]


def make(
    name: str,
    out: str | Path,
    root: str | Path | None = None,
    *,
    corruptions: Sequence[str] = (),
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    form: str = "npy",
    limit: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a clean data set's pictures under corruptions to the new folder `out`, with `made.json` about them.

    Parameters
    ----------
    name
        A clean data set, see `open_dataset`.
    corruptions, severities
        Which; by default the fifteen at all five. `npy` holds five.
    form
        `npy` as CIFAR-10-C, read as `npy:OUT`; `png` (lossless) or `jpeg` (quality 85, as ImageNet-C was) in folders
        corruption/severity/class, read as `grid:OUT`.
    limit, seed
        See `StreamSpec`; a stream `NAME+c` with the same seed has the same pixels as `npy` and `png`.
    """
    out = Path(out)
    if form not in FORMATS:
        raise errors.unknown("format", form, FORMATS)
    if form == "npy" and tuple(severities) != (1, 2, 3, 4, 5):
        raise errors.BadConfig(f"npy holds the severities 1 to 5, not {tuple(severities)}: choose png or jpeg")
    if out.exists():
        raise errors.BadConfig(f"{out} exists: name a new folder")
    domains = tuple(corruptions) or catalog.open_dataset(f"{name}+c", root).domains
    streams = {
        (domain, severity): _open(name, root, domain, severity, limit, seed, device, workers)
        for domain in domains
        for severity in severities
    }
    first = streams[domains[0], severities[0]]
    if form != "npy":
        _check_names(first)
    card = {
        "spec": {**first.spec.to_dict(), "domains": list(domains), "severity": list(severities)},
        "form": form,
        "pictures": sum(stream.samples for stream in streams.values()),
        "fingerprint": first.describe()["fingerprint"],
        "version": metadata.version("wise-atta"),
    }
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        done = 0
        for (domain, severity), stream in streams.items():
            for number, batch in enumerate(stream):
                assert isinstance(batch.inputs, torch.Tensor)
                pixels = batch.inputs.mul(255).round().to(torch.uint8).expand(-1, 3, -1, -1)
                rows = pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy()
                if form == "npy":
                    _write_rows(part / f"{domain}.npy", rows, 5 * stream.samples)
                else:
                    names = [_file(stream, int(index)) for index in stream.arrangement.batch(number)[1]]
                    _write_files(part / domain / str(severity), names, rows, form)
                done += len(rows)
                if progress is not None:
                    progress(done, card["pictures"])
        if form == "npy":
            np.save(part / "labels.npy", np.tile(first.places[0].labels[first.arrangement.index], 5))
        (part / "made.json").write_text(json.dumps(card, indent=2) + "\n")
        part.rename(out)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise errors.DataError(f"{error.filename or part} cannot be written: {error.strerror}. Make room") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return card


def _open(
    name: str,
    root: str | Path | None,
    domain: str,
    severity: int,
    limit: int | None,
    seed: int,
    device: str | torch.device,
    workers: int | None,
) -> PictureStream:
    spec = StreamSpec(
        data=f"{name}+c", domains=(domain,), severity=severity, order="sequential", limit=limit, seed=seed
    )
    stream, _ = open_stream(spec, root, device=device, workers=workers)
    assert isinstance(stream, PictureStream)
    return stream


def _write_rows(path: Path, rows: Pixels, length: int) -> None:
    # Written from front to back: a mapped array would end the process, not raise an error, on a full disk.
    with path.open("ab") as file:
        if file.tell() == 0:
            header = {"descr": "|u1", "fortran_order": False, "shape": (length, *rows.shape[1:])}
            np.lib.format.write_array_header_1_0(file, header)
        file.write(rows.tobytes())


def _write_files(folder: Path, names: Sequence[str], rows: Pixels, form: str) -> None:
    from PIL import Image

    for name, pixels in zip(names, rows, strict=True):
        path = folder / f"{name}.{form}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=_JPEG_QUALITY)


def _check_names(stream: PictureStream) -> None:
    """Refuse two pictures that would be written to one file."""
    taken: dict[str, int] = {}
    for index in map(int, stream.arrangement.index):
        name = _file(stream, index)
        if name in taken:
            both = f"{stream.places[0].where(taken[name])} and {stream.places[0].where(index)}"
            raise errors.DataError(f"{both} would both be written as {name}: rename one, or choose npy")
        taken[name] = index


def _file(stream: PictureStream, index: int) -> str:
    """class/picture without its ending, and with the number of the crop where there are several."""
    place = stream.places[0]
    picture, view = divmod(index, place.views)
    label = stream.dataset.classes[int(place.pictures.labels[picture])]
    name = Path(place.pictures.names[picture]).stem
    return f"{label}/{name}" if place.views == 1 else f"{label}/{name}.{view}"
