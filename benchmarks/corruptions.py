"""How fast are the corruptions, beside the package `imagecorruptions` on the same pictures in the same run?

    python benchmarks/corruptions.py                           # two CPU threads, 224 px
    python benchmarks/corruptions.py --threads 1 --clock cpu   # on a machine that does other things too
    python benchmarks/corruptions.py --device cuda             # and whether the GPU gives the CPU's bytes

Prints a table and, with --json, writes the numbers. Where the reference is not installed, only our own times appear.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wise_atta import errors, rng
from wise_atta.data.corruptions import CORRUPTIONS, EXTRA, corrupt, frost_source
from wise_atta.data.corruptions.check import Reference, pictures, reference

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Row:
    """Milliseconds a picture, and on a GPU how far its bytes lie from the CPU's."""

    corruption: str
    ours_ms: float
    reference_ms: float | None = None
    levels_from_cpu: int | None = None
    share_differing: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.reference_ms is None else self.reference_ms / self.ours_ms

    def cells(self) -> dict[str, float]:
        """What was measured, by title."""
        all_cells = {
            "ours, ms a picture": self.ours_ms,
            "reference, ms a picture": self.reference_ms,
            "times as fast": self.ratio,
            "grey levels from the CPU's": self.levels_from_cpu,
            "share of pixels that differ": self.share_differing,
        }
        return {title: value for title, value in all_cells.items() if value is not None}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(os.environ.get("WISE_ATTA_DATA", ".")) / "imagenet-sample.zip"
    parser.add_argument("--data", type=Path, default=default, help="a zip file of pictures")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of torch and OpenCV on the CPU")
    parser.add_argument("--pictures", type=int, help="a batch: 16 on the CPU, 256 on a GPU")
    parser.add_argument("--reference-pictures", type=int, default=4, help="how many of them the reference gets")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--severity", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="the median counts")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: this process's own, for a busy machine"
    )
    parser.add_argument("--extra", action="store_true", help="the four extra corruptions too")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(chosen.threads)
    device = torch.device(chosen.device)
    images, source = load(chosen.data, chosen.pictures or (16 if device.type == "cpu" else 256), chosen.size)
    theirs, why = load_reference(chosen.threads)
    names = [*CORRUPTIONS, *(EXTRA if chosen.extra else ())]
    rows = [measure(name, images, device, chosen, theirs) for name in names]
    fifteen = [row for row in rows if row.corruption in CORRUPTIONS]
    rows.append(total("the 15 together", fifteen))
    rows.append(total("without glass_blur", [row for row in fifteen if row.corruption != "glass_blur"]))
    report = {
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "pictures": f"{len(images)} of {chosen.size} px, {source}",
        "severity": chosen.severity,
        "clock": chosen.clock,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {chosen.threads} threads",
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "frost": frost_source(),
        "reference": "imagecorruptions" if theirs else f"absent: {why}",
    }
    show(report, rows)
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def load(path: Path, count: int, size: int) -> tuple[Tensor, str]:
    """Real pictures where there are some, otherwise smooth noise; repeated where there are too few."""
    try:
        distinct = pictures(path, min(count, 64), size)
        source = path.name
    except errors.DataError:
        coarse = torch.from_numpy(
            rng.numpy(0, "benchmark pictures").integers(0, 256, (8, 3, 16, 16)).astype(np.float32)
        )
        distinct = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear").to(torch.uint8)
        source = "smooth noise"
    return distinct.repeat(-(-count // len(distinct)), 1, 1, 1)[:count], source


def load_reference(threads: int) -> tuple[Reference | None, str]:
    try:
        theirs = reference()
    except errors.MissingExtra as error:
        return None, str(error)
    import cv2

    cv2.setNumThreads(threads)
    return theirs, ""


def measure(
    name: str, images: Tensor, device: torch.device, chosen: argparse.Namespace, theirs: Reference | None
) -> Row:
    """One corruption, ours and theirs."""
    there, ids = images.to(device), range(len(images))

    def ours() -> Tensor:
        result = corrupt(there, name, chosen.severity, ids=ids)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return result

    result = ours()
    ours_ms = timed(ours, chosen.repeats, chosen.clock) / len(images)
    reference_ms = levels = share = None
    if theirs:
        sample = np.ascontiguousarray(images[: chosen.reference_pictures].permute(0, 2, 3, 1).numpy())
        run = theirs

        def reference_run() -> None:
            for picture in sample:
                run(picture, name, chosen.severity)

        # One run of glass_blur takes seconds; the others are quick, and repeated.
        repeats = 1 if name == "glass_blur" else chosen.repeats
        reference_ms = timed(reference_run, repeats, chosen.clock) / len(sample)
    if device.type == "cuda":
        few = slice(0, 16)
        difference = (result[few].cpu().int() - corrupt(images[few], name, chosen.severity, ids=ids[few]).int()).abs()
        levels, share = int(difference.max()), float((difference > 0).float().mean())
    return Row(name, ours_ms, reference_ms, levels, share)


def timed(run: Callable[[], object], repeats: int, clock: str) -> float:
    """The median of several runs, in milliseconds."""
    spans, now = [], CLOCKS[clock]
    for _ in range(repeats):
        start = now()
        run()
        spans.append((now() - start) * 1000)
    return statistics.median(spans)


def total(title: str, rows: Sequence[Row]) -> Row:
    def added(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    return Row(
        title,
        sum(row.ours_ms for row in rows),
        added(row.reference_ms for row in rows),
        max((row.levels_from_cpu for row in rows if row.levels_from_cpu is not None), default=None),
        max((row.share_differing for row in rows if row.share_differing is not None), default=None),
    )


def show(report: dict[str, object], rows: Sequence[Row]) -> None:
    print("; ".join(f"{key}: {value}" for key, value in report.items() if key != "rows"), end="\n\n")
    titles = list(rows[0].cells())
    print(f"| corruption | {' | '.join(titles)} |")
    print("|" + " --- |" * (1 + len(titles)))
    for row in rows:
        print(f"| {row.corruption} | {' | '.join(f'{value:.3g}' for value in row.cells().values())} |")


if __name__ == "__main__":
    sys.exit(main())
