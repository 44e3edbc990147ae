"""What 0.1 left behind: the scenarios whose states, ledgers, cards and exports lie in `v01/`.

`write_v01.py` wrote the folder with 0.1; `test_v01.py` reads it with the present code. The scenarios say everything in
the names that users typed then, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from golden import nets
from golden.configurations import Case, oracle
from torch import nn

import wise_atta as wa

FOLDER = Path(__file__).with_name("v01")
# The batch after which states were saved, and the last one that is recorded.
STOP, LENGTH = 6, 11

WISE = {"ratio": 0.8, "lr": 0.02, "slack": 1}


def people(adapter: wa.Adapter, inputs: Any, number: int) -> wa.Prediction:
    """Somebody looks at two questions a batch and answers one of them every second batch."""
    out = adapter.step(inputs)
    inbox = adapter.annotator
    assert isinstance(inbox, wa.who.Inbox)
    for query in inbox.open(limit=2)[:1]:
        if number % 2:
            inbox.put(query.id, nets.truth(query))
    return out


def waiting(adapter: wa.Adapter, inputs: Any, number: int) -> wa.Prediction:
    """Answers by hand, three batches late; one question is shown and never answered, one is given up."""
    out = adapter.predict(inputs)
    adapter.learn(out)
    adapter.show([query.id for query in out.queries if number == 2])
    adapter.answer({q.id: nets.truth(q) for q in adapter.open if int(q.id.split("-")[0]) == number - 3 > 2})
    adapter.give_up([query.id for query in adapter.open if number == 4][:1])
    return out


def _late(seed: int = 0) -> wa.who.Annotator:
    return wa.who.Delayed(wa.who.Noisy(oracle(), 0.3, nets.CLASSES, seed=2), wa.who.Between(1, 5), seed=seed)


def _case(net: str, method: str, options: Callable[[], dict[str, Any]], turn: Any = None) -> Case:
    return Case(net, method, options, length=LENGTH) if turn is None else Case(net, method, options, LENGTH, turn=turn)


def _wise(net: str = "batch-norm", turn: Any = None, **options: Any) -> Case:
    """`wise`; an annotator is given as a function that makes it."""
    made = options.pop("annotator", _late)
    return _case(net, "wise", lambda: {**WISE, **options, **({} if made is None else {"annotator": made()})}, turn)


STATES: dict[str, Case] = {
    "wise, mixed, late": _wise(),
    "wise, batch, late in its own context": _wise(statistics="batch", expires_after=4),
    "wise, ema, late": _wise(statistics="ema", late_weight=2.0, late_limit=4),
    "wise, renorm": _wise(statistics="renorm", context="current"),
    "wise, source": _wise(statistics="source"),
    "wise, fp32": _wise(precision="fp32", statistics="batch"),
    "wise, bf16, ema": _wise(precision="bf16", statistics="ema"),
    "wise, guarded": _wise(guard=True, utility="topk-drift"),
    "wise, an inbox": _wise(annotator=wa.who.Inbox, turn=people, expires_after=6),
    "wise, open and pending": _wise(annotator=None, turn=waiting, statistics="batch"),
    "wise, layer norm": _wise("layer-norm", labels=2, ratio=1.2),
    "wise, by name": _wise("text"),
    "wise, two inputs": _wise("pair"),
    "wise, tied": _wise("tied"),
    "wise, authors": _wise("residual", preset="authors", length=LENGTH, slack=None),
    "wise, block": _wise(block="body.3"),
    "wise, roid": _wise(objective="roid", pull=0.01, lambda_ent=1.0, correct_prior=True, statistics="batch"),
    "wise, random, balanced": _case(
        "batch-norm",
        "wise",
        lambda: {"ratio": 0.6, "policy": "random", "selector": wa.what.Drift(balance=True), "annotator": _late()},
    ),
    "wise, no question yet": _wise(ratio=0.0),
    "source": _case("batch-norm", "source", dict),
    "bn": _case("batch-norm", "bn", dict),
    "tent, adam": _case("batch-norm", "tent", lambda: {"lr": 0.01, "optimizer": "adam"}),
    "eta": _case("batch-norm", "eta", lambda: {"lr": 0.05, "epsilon": 0.8}),
    "eata": _case(
        "batch-norm",
        "eata",
        lambda: {"lr": 0.05, "epsilon": 0.8, "source": [nets.batch("batch-norm", 100)], "fisher_weight": 3.0},
    ),
    "sar": _case("batch-norm", "sar", lambda: {"lr": 0.05}),
    "cotta": _case("batch-norm", "cotta", lambda: {"lr": 0.01, "views": 2, "threshold": 0.6, "restore": 0.05}),
    "roid": _case("batch-norm", "roid", lambda: {"lr": 0.02, "guard": True, "statistics": "ema"}),
    "simatta": _case(
        "batch-norm",
        "simatta",
        lambda: {"lr": 0.002, "e_l": 0.4, "e_h": 0.3, "steps": 2, "batch": 8, "size": 12, "annotator": _late()},
    ),
    "hiltta": _case("batch-norm", "hiltta", lambda: {"labels": 2, "ratio": 2.0, "annotator": _late()}),
    "cema": _case(
        "batch-norm",
        "cema",
        lambda: {
            "teacher": nets.make("batch-norm", seed=5),
            "queue": 6,
            "replayed": 6,
            "alone": 6,
            "ready": 4,
            "size": 8,
            "lr": 0.02,
            "epsilon": 0.9,
            "below": 0.9,
        },
    ),
    "eatta": _case("batch-norm", "eatta", lambda: {"lr": 0.02, "annotator": _late()}),
}

# States whose exports are kept as well: modules that are pickled whole, made of torch's own layers.
EXPORTS = ("batch", "source", "mixed", "ema", "renorm")


def plain_net() -> nn.Sequential:
    """A network of torch's own classes: a pickle of it names no file of these tests."""
    made = nets.make("batch-norm")
    net = nn.Sequential(made.body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), made.head)
    return net.eval()


def exported(mode: str) -> nn.Module:
    adapter = wa.adapt(plain_net(), "wise", **WISE, statistics=mode, annotator=_late())
    for number in range(1, STOP):
        adapter.step(nets.batch("batch-norm", number))
    return adapter.export()


def file_name(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def shown(adapter: wa.Adapter) -> dict[str, Any]:
    """What an adapter says about itself."""
    return {
        "open": [query.id for query in adapter.open],
        "counts": [getattr(adapter.counts, name) for name in ("asked", "shown", "answered", "learned", "cant_tell")],
        "number": adapter.number,
    }


def go_on(adapter: wa.Adapter, case: Case, first: int) -> dict[str, Any]:
    """Batches `first` to the last one: logits, questions, what was learned, and the weights at the end."""
    learned: list[list[str]] = []
    adapter.on_step(lambda step: learned.append(list(step.learned)))
    outs = [case.turn(adapter, case.batch(number), number) for number in range(first, LENGTH + 1)]
    return {
        "logits": [out.logits.detach().clone() for out in outs],
        "asked": [[query.id for query in (*out.queries, *out.sent)] for out in outs],
        "spent": [out.spent for out in outs],
        "learned": learned,
        "weights": {name: value.detach().clone() for name, value in adapter.export().state_dict().items()},
        "shown": shown(adapter),
    }


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)
