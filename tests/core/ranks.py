"""One process of several that adapt to one stream: what a test starts, and what it does alone to compare with.

python ranks.py RANK SIZE STORE OUT SCENARIO…
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from core import nets

import wise_atta as wa
from wise_atta.stream import tree_map


@dataclass(frozen=True)
class Scenario:
    """A method on a net; how many samples of each batch go to each rank, and after how many batches answers come.

    With `steps` an annotator in each process answers, for `step`, what came up there.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    net: str = "batch-norm"
    shares: tuple[int, int] = (32, 32)
    dtype: torch.dtype = torch.float64
    delay: int = 0
    batches: int = 20
    steps: bool = False


WISE: dict[str, Any] = {"ratio": 0.5, "lr": 1e-2, "statistics": "batch", "slack": 1}
SCENARIOS = {
    "tent": Scenario("tent", {"lr": 1e-2}, dtype=torch.float32),
    "tent, layer norm": Scenario("tent", {"lr": 1e-2}, "tokens", dtype=torch.float32),
    "wise": Scenario("wise", WISE, dtype=torch.float32),
    "wise, layer norm": Scenario("wise", WISE, "tokens", dtype=torch.float32),
    "tent, uneven": Scenario("tent", {"lr": 1e-2}, shares=(45, 19)),
    "wise, uneven": Scenario("wise", WISE, shares=(63, 1)),
    "wise, layer norm, uneven": Scenario("wise", WISE, "tokens", shares=(19, 45)),
    "wise, several labels": Scenario("wise", {**WISE, "labels": 3, "ratio": 2}),
    "wise, mixed statistics": Scenario("wise", {**WISE, "statistics": "mixed"}, shares=(40, 24)),
    "tent, mixture": Scenario("tent", {"lr": 1e-2, "statistics": "mixed", "mixture": 0.3}, dtype=torch.float32),
    "tent, mixture, uneven": Scenario("tent", {"lr": 1e-2, "statistics": "mixed", "mixture": 0.3}, shares=(63, 1)),
    "wise, mixture, late": Scenario("wise", {**WISE, "statistics": "mixed", "mixture": 0.5}, shares=(40, 24), delay=3),
    "wise, moving statistics": Scenario("wise", {**WISE, "statistics": "ema"}, "tabular", shares=(40, 24)),
    "wise, light": Scenario("wise", {**WISE, "ratio": 0.2, "only_selected": True}),
    "wise, late": Scenario("wise", WISE, shares=(40, 24), delay=3),
    "wise, late, layer norm": Scenario("wise", WISE, "tokens", delay=3),
    "wise, published": Scenario("wise", {"preset": "authors", "ratio": 0.5, "length": 20}),
    "wise, tree of inputs": Scenario("wise", WISE, "text", shares=(40, 24)),
    "wise, rows beyond samples": Scenario("wise", WISE, "folded", shares=(40, 24)),
    "wise, shadow": Scenario("wise", {**WISE, "shadow": True}),
    "wise, annotators": Scenario("wise", WISE, shares=(40, 24), delay=2, steps=True),
    "eta": Scenario("eta", {"lr": 1e-2, "epsilon": 0.9}),
    "sar": Scenario("sar", {"lr": 1e-2}),
    "eatta": Scenario("eatta", {"lr": 1e-2, "ratio": 0.5}),
}


def run(scenario: Scenario, rank: int | None = None, **options: Any) -> dict[str, Any]:
    """Adapt to the stream, as one rank or (None) alone; gives what it predicted, asked and came to."""
    begin, end = 0, sum(scenario.shares)
    if rank is not None:
        begin = sum(scenario.shares[:rank])
        end = begin + scenario.shares[rank]

    def truth(query: wa.Query) -> int:
        """A class that tells whether the sample is the right one: it follows from its place in the whole batch."""
        return (begin + query.index + query.batch) % nets.CLASSES

    if scenario.steps:
        options["annotator"] = wa.who.Delayed(wa.who.Oracle(truth), scenario.delay)
    adapter = wa.adapt(nets.make(scenario.net, dtype=scenario.dtype), scenario.method, **scenario.options, **options)
    start = adapter.classifier.live.flat
    adapter.on_step(lambda step: asked.append(step.asked))
    waiting: list[dict[str, int]] = []
    logits: list[Tensor] = []
    asked: list[tuple[str, ...]] = []
    own: list[str] = []
    for number in range(1, scenario.batches + 1):
        whole = nets.batch(scenario.net, number, sum(scenario.shares), scenario.dtype)
        share = tree_map(lambda leaf: leaf[begin:end], whole)
        out = adapter.step(share) if scenario.steps else adapter.predict(share)
        own += [query.id for query in out.queries]
        logits.append(out.logits)
        if not scenario.steps:
            waiting.append({query.id: truth(query) for query in out.queries})
            adapter.learn(out, waiting.pop(0) if len(waiting) > scenario.delay else {})
    return {
        "logits": logits,
        "asked": asked,
        "own": own,
        "counts": asdict(adapter.counts),
        "moved": (adapter.classifier.live.flat - start).abs().max().item(),
        "flat": adapter.classifier.live.flat,
        "state": adapter.state_dict(),
    }


def refusal(method: str, **options: Any) -> str:
    """The refusal of options that cannot be."""
    try:
        wa.adapt(nets.make(), method, group="world", **options)
    except wa.errors.WiseAttaError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def bad_share(rank: int) -> list[str]:
    """What each rank hears of shares that cannot be predicted on, and whether all go on afterwards."""
    adapter = wa.adapt(nets.make(), "tent", group="world")
    good, messages = nets.batch(n=8), []
    wrong = {"empty": good[:0], "other type": good.float(), "other size": good[:, :, :4], "not finite": good / 0}
    for bad in wrong.values():
        try:
            adapter.predict(bad if rank else good)
            messages.append("nothing")
        except wa.errors.WiseAttaError as error:
            messages.append(f"{type(error).__name__}: {error}")
    adapter.learn(adapter.predict(good))
    return messages


def main(rank: int, size: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    results: dict[str, Any] = {name: run(one, rank, group="world") for name, one in SCENARIOS.items()}
    results["refusals"] = {
        "other options": refusal("tent", lr=1e-3 * (1 + rank)),
        "other seed": refusal("wise", seed=rank),
        "roid": refusal("roid"),
        "cotta": refusal("cotta"),
        "guard": refusal("wise", guard=True),
        "compile": refusal("tent", compile=True),
        "renorm": refusal("tent", statistics="renorm"),
        "other mixture": refusal("tent", statistics="mixed", mixture=0.3 + 0.1 * rank),
    }
    results["bad shares"] = bad_share(rank)
    torch.save(results, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])
