"""Does loading starve a GPU? Pictures a second beside torchvision's ImageFolder + DataLoader with the same workers.

Both read the same JPEG files in the same shuffled order, resize to 256, crop 224, and hand over float batches in [0, 1]
on the device. Rounds alternate, so that whatever else the machine does strikes both; the result is the ratio of the
medians. With WISE_ATTA_DATA the pictures are those of imagenet-sample.zip, otherwise made-up ones of the same size.

    python benchmarks/loader.py --workers 2 --device cpu
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms

from wise_atta import rng
from wise_atta.data import StreamSpec, open_stream
from wise_atta.stream import Batch

BATCH, PREFETCH = 64, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=2, help="how often each picture lies in the folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kind = pictures(Path(folder) / "set", options.copies)
        result = compare(Path(folder), options.workers, torch.device(options.device), options.rounds)
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine()
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
    facts = {"pictures": kind, "workers": options.workers, "cores": os.cpu_count(), "device": name, **versions}
    print(json.dumps({**facts, **result}, indent=2))


def pictures(folder: Path, copies: int) -> str:
    """Fill a folder `class/picture` with JPEG files, and say which."""
    packed = Path(os.environ.get("WISE_ATTA_DATA", "")) / "imagenet-sample.zip"
    if packed.is_file():
        shutil.unpack_archive(packed, folder)
        kind = packed.name
    else:
        for number in range(500):
            coarse = rng.numpy(number, "picture").integers(0, 256, (24, 32, 3)).astype(np.uint8)
            path = folder / f"class{number:03d}" / "0.jpg"
            path.parent.mkdir(parents=True)
            Image.fromarray(coarse).resize((341, 256), Image.Resampling.BICUBIC).save(path, quality=90)
        kind = "made up"
    for path in sorted(folder.glob("*/*.jpg")):
        for copy in range(1, copies):
            shutil.copy(path, path.with_name(f"{path.stem}-{copy}.jpg"))
    return kind


def compare(root: Path, workers: int, device: torch.device, rounds: int) -> dict[str, float | int]:
    spec = StreamSpec(data="tree:set", batch=BATCH, resize=256, crop=224)
    stream, _ = open_stream(spec, root, device=device, workers=workers, prefetch=PREFETCH)
    reference = torchvision.datasets.ImageFolder(
        str(root / "set"),
        transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]),
    )
    loader = DataLoader(
        reference,
        batch_size=BATCH,
        sampler=stream.plan.index.tolist(),  # type: ignore[attr-defined]
        num_workers=workers,
        prefetch_factor=PREFETCH if workers else None,
        pin_memory=device.type == "cuda",
        generator=rng.torch_cpu(0, "loader"),
    )
    for ours, (theirs, _) in zip(stream, loader, strict=True):
        assert isinstance(ours, Batch) and isinstance(ours.inputs, torch.Tensor)
        assert torch.equal(ours.inputs.cpu(), theirs), "the two do not load the same pixels"
    speeds: dict[str, list[float]] = {"wise_atta": [], "torchvision": []}
    for _ in range(rounds):
        speeds["wise_atta"].append(speed(stream, lambda batch: batch.inputs, device))
        speeds["torchvision"].append(speed(loader, lambda batch: batch[0].to(device, non_blocking=True), device))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "samples": len(reference),
        "wise_atta_per_s": round(medians["wise_atta"], 1),
        "torchvision_per_s": round(medians["torchvision"], 1),
        "ratio": round(medians["wise_atta"] / medians["torchvision"], 3),
    }


def speed(batches: Iterable[object], take: Callable[..., torch.Tensor], device: torch.device) -> float:
    """Pictures a second from the start of the workers to the last batch."""
    start, count = time.perf_counter(), 0
    for batch in batches:
        count += len(take(batch))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return count / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
