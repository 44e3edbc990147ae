"""What does recording cost? The time of a step with every row written down, beside the same step alone.

    python benchmarks/recording.py --device cuda --out recording.json     ResNet-50 at 224 px, batches of 64
    python benchmarks/recording.py --device cpu --model resnet18 --size 64 --batch 8 --rounds 3

Needs torch, torchvision, numpy, pyarrow and pydantic. The network has random weights and the pictures are noise:
arithmetic takes as long whatever the numbers. *alone* is `adapter.step` and the predicted classes on the host, which
whoever uses them waits for. *recorded* adds all that `wise-atta run` does: scores by domain and picture, a row a
batch, a row a question, and at every checkpoint the state and the Parquet files. Both take turns, four batches each,
so that whatever the machine does falls on both alike; a ratio is the median over rounds. A checkpoint is timed by
itself and shared among the batches between two.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision

import wise_atta as wa
from wise_atta import methods, who
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.place import device_name
from wise_atta.bench.record import Folder
from wise_atta.bench.run import CHECKPOINT_SHARE, Built, Recorder, pick_device
from wise_atta.data import from_iterable
from wise_atta.loop import Adapter
from wise_atta.stream import Batch

# Batches that are cycled through; warm-up steps of each side.
DISTINCT, WARM = 4, 3


def batches(count: int, size: int, device: torch.device) -> list[Batch]:
    """Noise as pictures, the same on every machine."""
    noise = torch.Generator().manual_seed(0)
    return [
        Batch(
            torch.rand(count, 3, size, size, generator=noise).to(device),
            ids=[f"noise/{number}-{place}" for place in range(count)],
            meta={"domain": "noise"},
        )
        for number in range(DISTINCT)
    ]


def sure(model: torch.nn.Module, pictures: torch.Tensor) -> torch.nn.Module:
    """The model with a head so large that nearly every prediction passes the entropy filter, and every step is made."""
    head = next(part for part in reversed(list(model.modules())) if isinstance(part, torch.nn.Linear))
    with torch.no_grad():
        model.train()
        spread = model(pictures).std(dim=0).mean().item()
        model.eval()
        head.weight.mul_(20 / spread)
    return model


def adapter(model: torch.nn.Module, method: methods.Method, truth: dict[str, int]) -> Adapter:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return wa.adapt(model, method, mean=mean, std=std, annotator=who.Oracle(truth), statistics="batch")


def milliseconds(step: Callable[[Batch], object], stream: list[Batch], steps: int) -> float:
    """Mean time of a step; what a step leaves undone on the device is waited for."""
    began = time.perf_counter()
    for number in range(steps):
        step(stream[number % len(stream)])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began) / steps


def measure(given: argparse.Namespace) -> dict[str, Any]:
    device = pick_device(given.device)
    stream = batches(given.batch, given.size, device)
    truth = {name: place % 1000 for batch in stream for place, name in enumerate(batch.ids or [])}
    torch.manual_seed(0)
    model = sure(torchvision.models.get_model(given.model, weights=None).to(device), stream[0].inputs)  # type: ignore[arg-type]
    # So small a rate that the predictions stay as they are however many steps are timed.
    options = {"lr": 1e-7, "ratio": given.ratio}
    own = {name: value for name, value in options.items() if name in methods.options(given.method)}
    bare_method, method = (methods.get(given.method, **own) for _ in range(2))
    bare, recorded = adapter(model, bare_method, truth), adapter(model, method, truth)
    experiment = Experiment(method=given.method, batch=given.batch, deterministic=False)
    with tempfile.TemporaryDirectory() as place:
        files = Folder(Path(place) / "run")
        # The batches are handed to the recorder one by one; of a stream it wants no more than what ids mean.
        built = Built(experiment, recorded, method, from_iterable([])[0], truth, None, device)  # type: ignore[arg-type]
        recorder = Recorder(built, files)

        def alone(batch: Batch) -> list[int]:
            found: list[int] = bare.step(batch).logits.argmax(dim=1).tolist()
            return found

        sides = {"alone": alone, "recorded": recorder.step}
        for step in sides.values():
            milliseconds(step, stream, WARM)
        rounds: list[dict[str, float]] = []
        checkpoints = []
        for number in range(given.rounds):
            # Whoever goes first finds another machine than who goes second.
            order = list(sides) if number % 2 == 0 else list(sides)[::-1]
            rounds.append({name: milliseconds(sides[name], stream, given.steps) for name in order})
            if number % 10 == 0:
                recorder.flush()
                began = time.perf_counter()
                files.checkpoint({"digest": "", "recorder": recorder.state_dict(), "batch": 0, "seconds": 0.0})
                checkpoints.append(1000 * (time.perf_counter() - began))
        files.close()
        updated = statistics.mean(row["backwards"] > 0 for row in files.steps.rows)
    ms = {name: statistics.median(each[name] for each in rounds) for name in sides}
    rows = statistics.median(each["recorded"] / each["alone"] for each in rounds) - 1
    checkpoint = statistics.median(checkpoints)
    # A run makes fewer of them where they would take more.
    shared = min(checkpoint / given.every / ms["alone"], CHECKPOINT_SHARE)
    return {
        "model": given.model,
        "method": given.method,
        "batch": given.batch,
        "size": given.size,
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "rounds": given.rounds,
        "steps": given.steps,
        "every": given.every,
        "updated": updated,
        "ms_alone": ms["alone"],
        "ms_recorded": ms["recorded"],
        "ms_checkpoint": checkpoint,
        "overhead_rows": rows,
        "overhead_checkpoints": shared,
        "overhead": rows + shared,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--model", default="resnet50", help="a torchvision model with BatchNorm")
    parser.add_argument("--method", default="wise", choices=sorted(methods.METHODS))
    parser.add_argument("--ratio", type=float, default=0.5, help="labels a batch")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224, help="pixels a side")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--steps", type=int, default=4, help="batches of a side in a round")
    parser.add_argument("--every", type=int, default=100, help="batches between checkpoints")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    given = parser.parse_args(arguments)
    found = measure(given)
    print(f"{found['model']}, {found['method']}, {found['batch']} pictures of {found['size']} px, {found['device']}")
    print(f"{100 * found['updated']:.0f} % of the steps updated the network")
    print("| step alone, ms | recorded, ms | rows | checkpoints | overhead |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    shares = " | ".join(f"{100 * found[name]:.2f} %" for name in ("overhead_rows", "overhead_checkpoints", "overhead"))
    print(f"| {found['ms_alone']:.2f} | {found['ms_recorded']:.2f} | {shares} |")
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
