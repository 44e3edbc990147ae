"""What is stopped and resumed? Adapters of several kinds and their streams, the same in every process.

    python resume.py FOLDER BATCH

goes on, in this process, from the states in FOLDER at batch BATCH, and leaves what came out beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from core import nets

from wise_atta import Adapter, adapt, methods, what, when, who

LENGTH = 24
STOP = 11


def delayed() -> who.Annotator:
    return who.Delayed(who.Noisy(who.Oracle(nets.truth), 0.3, nets.CLASSES, seed=2), who.Between(1, 6), seed=3)


def wise(kind: str = "batch-norm", **options: Any) -> Adapter:
    dtype = torch.float32 if kind == "batch-norm" else torch.float64
    given = {"lr": 0.05, "ratio": 0.7, "entropy": "all", "statistics": "batch"}
    return adapt(nets.make(kind, dtype=dtype), "wise", **(given | options))


BUILD: dict[str, Callable[[], Adapter]] = {
    "delayed labels, momentum, anchor, ema, balance": lambda: wise(
        statistics="ema", selector=what.Drift(balance=True, seed=4), annotator=delayed(), expires_after=4, seed=1
    ),
    "late labels in their own context, two a batch": lambda: wise(
        ratio=1.5, labels=2, annotator=delayed(), selector="perturbation"
    ),
    "late labels in the current context": lambda: wise(context="current", annotator=delayed(), policy="random", seed=6),
    "late labels by their age, some too old": lambda: wise(late_weight=2.5, late_limit=4, annotator=delayed()),
    "light": lambda: wise(only_selected=True, annotator=delayed(), statistics="mixed", utility="topk-drift"),
    "published": lambda: wise(preset="authors", length=LENGTH, entropy="filtered", annotator=delayed()),
    "text": lambda: wise("text", annotator=who.Delayed(who.Oracle(nets.truth), 3)),
    "tabular, total": lambda: wise(
        "tabular", ratio=None, annotator=delayed(), policy=when.BudgetPaced(0.5, total=5, credit=2)
    ),
    "adam": lambda: adapt(nets.make("tokens"), methods.tent(lr=0.01, optimizer="adam")),
}


def batch(name: str, number: int) -> Any:
    kind = {"text": "text", "adam": "tokens", "tabular, total": "tabular"}.get(name, "batch-norm")
    return nets.batch(kind, number, dtype=torch.float32 if kind == "batch-norm" else torch.float64)


def go_on(adapter: Adapter, name: str, first: int) -> list[Tensor]:
    """The rest of the stream from a batch on; its logits."""
    return [adapter.step(batch(name, number)).logits for number in range(first, LENGTH + 1)]


def main() -> None:
    folder, first = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    for index, (name, build) in enumerate(BUILD.items()):
        adapter = build()
        adapter.load_state_dict(torch.load(folder / f"{index}.state", weights_only=True))
        logits = go_on(adapter, name, first)
        torch.save({"logits": logits, "state": adapter.state_dict()}, folder / f"{index}.out")


if __name__ == "__main__":
    main()
