"""How much more than inference does adaptation cost? Every row is a ratio to peers measured in the same run.

    python benchmarks/speed.py --device cuda --out speed.json        ResNet-50 and ViT-B/16 at 224 px
    python benchmarks/speed.py --device cpu --out speed.json         ResNet-18 at 32 px, EfficientNet-Lite0 at 224 px
    python benchmarks/speed.py --device cuda --profile traces        and a chrome trace of each way of running wise

Needs torch, torchvision and numpy (timm for EfficientNet-Lite0). Networks have random weights and pictures are random
fields: arithmetic takes as long whatever the numbers. The head is scaled so that about half of the predictions pass the
entropy filter, and learning rates are so small that they keep passing it; a run without either would skip the steps
that it claims to time. The columns forwards and backwards say what was really done.

A group is one network in one precision and one memory format. Its peers are plain inference with batch statistics, a
tent loop written by hand (`peers.py`) and the published code's sequence (`authors.py`), all in that precision and
format; and, as the *base*, that sequence in TF32 (on a CPU in float32) and the default format. All that is timed in a
group takes turns, a block of batches each, until every one had its rounds: a machine that drifts slows all alike. Times
are medians of blocks, ratios are medians of the ratios within a round. In bf16 the peers' whole model is bfloat16.
Compiling takes minutes: `--modes compile "compile + graphs" --limit 500` measures those groups alone.

On a CPU the process keeps the memory that it frees (`wise_atta.keep_memory`), which makes every competitor faster, the
peers too. `--fresh-memory` leaves that out: large tensors then come from the system one by one.

The split comes from an extra pass in which the device is waited for before and after each part, so its parts add up to
more than the time of a batch. *policy* is the decision, the choice of a sample, the question and its account; *rest* is
what no part claims: Python, the finite flag, the one copy to the host.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import gzip
import json
import math
import os
import platform
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from authors import Authors, entropy, head_of, use_batch_statistics
from peers import Inference, Tent
from torch import Tensor, nn

import wise_atta as wa

LR = 1e-7
SPLIT = ("forward", "backward", "anchor", "optimizer", "loss", "policy", "rest")
# Batches that are cycled through, and warm-up steps: the published sequence selects by drift from the fifth batch on.
DISTINCT, WARM = 8, {"cuda": 6, "cpu": 4}


# -- what is timed ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """One way to run wise-atta: a name and the keywords that `wise_atta.adapt` takes for it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """A network in one precision and one memory format, and the ways in which wise-atta is run there."""

    model: str
    precision: str
    modes: Sequence[Mode]
    channels_last: bool = False
    methods: bool = False
    asked_for: bool = False  # measured only where its modes are named, since it takes minutes

    @property
    def name(self) -> str:
        return f"{self.model}, {self.precision}" + (", channels-last" if self.channels_last else "")


EAGER = Mode("eager")
GRAPHS = Mode("graphs", {"graphs": True})
COMPILE = Mode("compile", {"compile": True})
BOTH = Mode("compile + graphs", {"compile": True, "graphs": True})
CHECKPOINT = Mode("checkpointing", {"checkpointing": True})

GROUPS = {
    "cuda": [
        Group("resnet50", "tf32", [EAGER, GRAPHS], methods=True),
        Group("vit_b_16", "tf32", [EAGER, GRAPHS], methods=True),
        Group("resnet50", "bf16", [EAGER, GRAPHS], channels_last=True),
        Group("vit_b_16", "bf16", [EAGER, GRAPHS]),
        Group("resnet50", "tf32", [EAGER, GRAPHS, CHECKPOINT], channels_last=True),
        Group("resnet50", "fp32", [EAGER]),
        Group("resnet50", "bf16", [COMPILE, BOTH], channels_last=True, asked_for=True),
        Group("vit_b_16", "bf16", [COMPILE, BOTH], asked_for=True),
    ],
    "cpu": [
        Group("resnet18", "fp32", [EAGER], methods=True),
        Group("resnet18", "fp32", [EAGER], channels_last=True),
        Group("efficientnet_lite0", "fp32", [EAGER], methods=True),
        Group("efficientnet_lite0", "fp32", [EAGER], channels_last=True),
        Group("resnet18", "bf16", [EAGER], channels_last=True),
        Group("efficientnet_lite0", "bf16", [EAGER], channels_last=True),
    ],
}
PIXELS = {"resnet18": 32}
BATCH = {"efficientnet_lite0": 16}  # a CPU takes seconds for more
METHODS: dict[str, dict[str, Any]] = {
    "tent": {},
    # The redundancy filter is computed but keeps all: batches come again, and would all be redundant.
    "eta": {"epsilon": 2.0},
    "sar": {"restore_below": 0.0},
    "roid": {},
    "eatta": {"ratio": 0.5},
}


def build(name: str) -> nn.Module:
    """A network with random weights."""
    if name == "resnet18":
        from wise_atta.data import nets

        return nets.build("resnet18")
    if name == "efficientnet_lite0":
        import timm

        return timm.create_model("tf_efficientnet_lite0", pretrained=False)
    import torchvision

    return getattr(torchvision.models, name)(weights=None)


def pictures(count: int, batch: int, px: int) -> list[Tensor]:
    """Batches of random smooth fields in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        coarse = torch.rand(batch, 3, 5, 5, generator=generator)
        smooth = nn.functional.interpolate(coarse, size=(px, px), mode="bilinear")
        found.append((smooth + 0.1 * torch.rand(batch, 3, px, px, generator=generator)).clamp(0, 1))
    return found


def sharpen(model: nn.Module, x: Tensor, share: float = 0.5) -> None:
    """Give the model a random head under which this share of the batch has H < 0.4·ln C."""
    head = head_of(model)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(head.weight.shape, generator=generator).to(head.weight)
    seen = copy.deepcopy(model)
    use_batch_statistics(seen)
    features: list[Tensor] = []
    head_of(seen).register_forward_pre_hook(lambda module, args: features.append(args[0]))
    with torch.no_grad():
        seen(x)
        centred = (features[0] - features[0].mean(0)) @ weight.T
        low, high = 1e-3, 1e6
        for _ in range(60):
            scale = math.sqrt(low * high)
            sure = (entropy(centred * scale) < 0.4 * math.log(len(weight))).double().mean().item()
            low, high = (scale, high) if sure < share else (low, scale)
        head.weight.copy_(weight * high)
        head.bias.copy_(-high * weight @ features[0].mean(0))


# -- the clock --------------------------------------------------------------------------------------------------------


class Clock:
    """Time of each part without the parts inside it. Off, it costs next to nothing."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
        self.on = False
        self.seconds: Counter[str] = Counter()
        self._inside: list[float] = []
        self._began: list[float] = []

    def __call__(self, part: str) -> contextlib.AbstractContextManager[None]:
        return Part(self, part) if self.on else contextlib.nullcontext()

    def enter(self) -> None:
        self.wait()
        self._inside.append(0.0)
        self._began.append(time.perf_counter())

    def leave(self, part: str) -> None:
        self.wait()
        taken = time.perf_counter() - self._began.pop()
        self.seconds[part] += taken - self._inside.pop()
        if self._inside:
            self._inside[-1] += taken


class Part(contextlib.AbstractContextManager[None]):
    """One part while it lasts. No generator: that would take a share of what is timed."""

    def __init__(self, clock: Clock, part: str) -> None:
        self._clock, self._part = clock, part

    def __enter__(self) -> None:
        self._clock.enter()

    def __exit__(self, *error: object) -> None:
        self._clock.leave(self._part)


class Timed:
    """A function or callable object, timed; all else about it is as it was."""

    def __init__(self, inner: Any, clock: Clock, part: str | Callable[..., str]) -> None:
        self._inner = inner
        self._clock = clock
        self._part = part

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock(self._part if isinstance(self._part, str) else self._part(*args, **kwargs)):
            return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextlib.contextmanager
def watched(adapter: wa.Adapter, clock: Clock) -> Iterator[None]:
    """Tell the clock what an adapter does."""
    classifier, update = adapter.classifier, adapter.update

    def which(*args: Any, version: Any = None, grad: bool = False, **kwargs: Any) -> str:
        return "anchor" if version is not None and not grad else "forward"

    places: list[tuple[Any, str, str | Callable[..., str]]] = [
        (classifier, "forward", which),
        (classifier, "gradients", "backward"),
        (classifier, "pull", "backward"),
        (update.optimizer, "step", "optimizer"),
        (update.optimizer, "move", "optimizer"),
        *((adapter.policy, name, "policy") for name in ("foresee", "decide")),
        *((adapter.selector, name, "policy") for name in ("pick", "best")),
        *((adapter, name, "policy") for name in ("_questions", "_context", "_ask")),
        *((adapter, name, "policy") for name in ("_checked", "_sift", "_labels", "_settle")),
        (update, "objective", "loss"),
        (adapter, "utility", "loss"),
    ]
    if adapter.anchor is not None:
        places.append((adapter.anchor, "follow", "optimizer"))
    with contextlib.ExitStack() as stack:
        for owner, name, part in places:
            if getattr(owner, name, None) is None:
                continue
            own = vars(owner).get(name)
            setattr(owner, name, Timed(getattr(owner, name), clock, part))
            stack.callback(_put_back, owner, name, own)
        yield


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


# -- competitors ------------------------------------------------------------------------------------------------------


class Peer(Protocol):
    forwards: int
    backwards: int

    def step(self, x: Tensor, truth: list[int]) -> Tensor: ...


class Ours:
    """An adapter, seen as the peers are."""

    def __init__(self, adapter: wa.Adapter, clock: Clock, learn: bool = True) -> None:
        self.adapter = adapter
        self.clock = clock
        self.learn = learn
        self.asked = self.skipped = self.steps = 0

    @property
    def forwards(self) -> int:
        return self.adapter.classifier.work.forwards

    @property
    def backwards(self) -> int:
        return self.adapter.classifier.work.backwards

    def step(self, x: Tensor, truth: list[int]) -> Tensor:
        if not self.learn:
            return self.adapter.predict(x, ask=False, learn=False).logits
        out = self.adapter.predict(x)
        step = self.adapter.learn(out, {query.id: truth[query.index] for query in out.queries})
        self.steps += 1
        self.asked += len(step.asked)
        self.skipped += "skipped" in step.losses
        return out.logits


class EverySecond(Authors):
    """The published sequence with a label in every second batch, so that blocks are alike; its policy still decides."""

    def decide(self, score: float) -> bool:
        super().decide(score)
        return self.seen % 2 == 0


@dataclass
class Case:
    """One competitor of a group: how it is made, in which precision and format it runs, what became of it."""

    name: str
    mode: str
    make: Callable[[], Peer]
    precision: str
    channels_last: bool
    cast: bool = False
    peer: Peer | None = None
    error: str | None = None
    seconds: list[float] = field(default_factory=list)
    forwards: list[float] = field(default_factory=list)
    backwards: list[float] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)


class Bench:
    """Runs the groups on one device."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        self.clock = Clock(self.wait)
        self.began = time.perf_counter()
        self.pictures: dict[tuple[int, int], list[Tensor]] = {}
        self.base: dict[str, Any] = {"precision": "tf32" if self.cuda else "fp32", "channels_last": False}
        self.report: dict[str, Any] = {"machine": machine(self.device), "settings": settings(options), "groups": []}

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    @property
    def left(self) -> float:
        return self.options.limit - (time.perf_counter() - self.began)

    def run(self, groups: Sequence[Group]) -> None:
        for group in groups:
            if self.left <= 0:
                self.report["groups"].append({"group": group.name, "left_out": f"the limit of {self.options.limit} s"})
                continue
            began = time.perf_counter()
            try:
                found = self.group(group)
            except Exception as error:
                found = {"group": group.name, "left_out": reason(error)}
            self.report["groups"].append(found | {"seconds": time.perf_counter() - began})
            self.report["checks"] = checks(self.report)
            self.save()
            print(table(found), flush=True)
            gc.collect()
        self.save()

    def save(self) -> None:
        out = self.options.out
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(self.report, indent=1) + "\n")
            out.with_name(f"table-{out.stem}.md").write_text(markdown(self.report))

    # -- one group --------------------------------------------------------------------------------------------------

    def group(self, group: Group) -> dict[str, Any]:
        px = self.options.px or PIXELS.get(group.model, 224)
        self.batch = self.options.batch or BATCH.get(group.model, 64)
        self.name = f"{group.model}-{px}"
        torch.manual_seed(0)
        if (px, self.batch) not in self.pictures:
            self.pictures[px, self.batch] = [x.to(self.device) for x in pictures(DISTINCT, self.batch, px)]
        batches = self.pictures[px, self.batch]
        model = build(group.model).to(self.device).eval()
        self.precise("fp32")
        sharpen(model, batches[0])
        self.model_bytes = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        classes = head_of(model).out_features
        self.truth = [[(7 * i + 13 * row) % classes for row in range(self.batch)] for i in range(DISTINCT)]
        self.batches = {
            False: batches,
            True: [x.contiguous(memory_format=torch.channels_last) for x in batches],
        }
        cases = self.cases(group, model)
        for case in cases:
            self.start(case)
        for _ in range(self.options.rounds):
            for case in cases:
                if case.peer is not None:
                    self.block(case)
        for case in cases:
            self.finish(case, cases)
        return {
            "group": group.name,
            "model": group.model,
            "precision": group.precision,
            "channels_last": group.channels_last,
            "px": px,
            "batch": self.batch,
            "rows": [case.row for case in cases],
        }

    def cases(self, group: Group, model: nn.Module) -> list[Case]:
        own = {"precision": group.precision, "channels_last": group.channels_last}
        length = (self.options.rounds + 3) * self.options.batches + 50
        compiled = any("compile" in mode.options for mode in group.modes)

        def peer(name: str, make: Callable[[nn.Module], Peer], mode: str = "eager", **other: Any) -> Case:
            how = own | other
            return Case(name, mode, lambda: make(self.formed(model, **how)), cast=how["precision"] == "bf16", **how)

        def adapter(method: str, mode: Mode, learn: bool = True, **options: Any) -> Callable[[], Peer]:
            return lambda: Ours(self.adapter(model, method, group, mode, options), self.clock, learn)

        def authors(net: nn.Module) -> Peer:
            return EverySecond(net, length=length, lr=LR, second_lr=LR, clock=self.clock)

        cases = [
            peer("plain inference", lambda net: Inference(net, clock=self.clock)),
            peer("tent by hand", lambda net: Tent(net, lr=LR, clock=self.clock)),
            peer("authors", authors),
        ]
        if own != self.base:
            cases.append(peer("authors, " + self.base["precision"], authors, **self.base))
        if compiled:
            cases += [
                peer(
                    "plain inference, compiled", lambda net: Inference(net, clock=self.clock, compiled=True), "compile"
                ),
                peer(
                    "tent by hand, compiled", lambda net: Tent(net, lr=LR, clock=self.clock, compiled=True), "compile"
                ),
            ]
        # With so little slack every second (in light mode every fifth) batch is labelled, as in the peer.
        wise = {"ratio": 0.5, "slack": 0.5, "statistics": "batch", "lr": LR}
        light = {**wise, "ratio": 0.2, "only_selected": True}
        for mode in group.modes:
            ways: list[tuple[str, Callable[[], Peer]]] = [
                ("wise", adapter("wise", mode, **wise)),
                ("tent", adapter("tent", mode, lr=LR)),
                ("predict", adapter("bn", mode, learn=False)),
            ]
            ways.append(("wise, light", adapter("wise", mode, **light)))
            if group.methods and mode is EAGER:
                ways += [(name, adapter(name, mode, lr=LR, **METHODS[name])) for name in METHODS if name != "tent"]
            cases += [Case(name, mode.name, make, **own) for name, make in ways]
        wanted = self.options.rows
        return [case for case in cases if not wanted or case.name in wanted]

    def formed(self, model: nn.Module, *, precision: str, channels_last: bool) -> nn.Module:
        """A copy of the model as a peer gets it."""
        net = copy.deepcopy(model)
        if channels_last:
            net = net.to(memory_format=torch.channels_last)
        return net.to(torch.bfloat16) if precision == "bf16" else net

    def adapter(self, model: nn.Module, method: str, group: Group, mode: Mode, options: dict[str, Any]) -> wa.Adapter:
        ways = {"precision": group.precision, "channels_last": group.channels_last, **mode.options}
        return wa.adapt(model, method, **options, **ways)

    def precise(self, precision: str) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"

    def start(self, case: Case) -> None:
        """Make a competitor, warm it up, and read what memory it takes."""
        if self.left <= 0:
            case.error = f"left out: the limit of {self.options.limit} s"
            return
        try:
            if self.cuda:
                case.row["peak_mib"] = self.peak(case)
            else:
                self.warm(case)
        except Exception as error:
            case.peer, case.error = None, reason(error)
            if self.options.verbose:
                traceback.print_exc()

    def warm(self, case: Case) -> None:
        case.peer = case.make()
        self.precise(case.precision)
        self.steps(case, WARM[self.device.type])
        self.wait()

    def peak(self, case: Case) -> float:
        """MiB on the GPU at the worst moment of some batches, the model included."""
        gc.collect()
        torch.cuda.empty_cache()
        before, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        self.warm(case)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.steps(case, self.options.batches)
        self.wait()
        # A peer has a copy of the model; an adapter shares the one that is there already.
        shared = self.model_bytes if isinstance(case.peer, Ours) else 0
        peak, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_reserved() - held
        # What a recorded graph works in is reserved for it, and not counted as allocated.
        return (shared + (reserved if "graphs" in case.mode else peak)) / 2**20

    def steps(self, case: Case, count: int) -> None:
        assert case.peer is not None
        xs = self.batches[case.channels_last]
        for i in range(count):
            x = xs[i % DISTINCT]
            case.peer.step(x.bfloat16() if case.cast else x, self.truth[i % DISTINCT])

    def block(self, case: Case) -> None:
        assert case.peer is not None
        self.precise(case.precision)
        worked = case.peer.forwards, case.peer.backwards
        try:
            self.wait()
            began = time.perf_counter()
            self.steps(case, self.options.batches)
            self.wait()
            case.seconds.append((time.perf_counter() - began) / self.options.batches)
            case.forwards.append((case.peer.forwards - worked[0]) / self.options.batches)
            case.backwards.append((case.peer.backwards - worked[1]) / self.options.batches)
        except Exception as error:
            case.peer, case.error = None, reason(error)

    def finish(self, case: Case, cases: Sequence[Case]) -> None:
        row: dict[str, Any] = {"name": case.name, "mode": case.mode}
        if case.peer is None or not case.seconds:
            case.row = row | {"error": case.error or "no round was run"}
            return
        seconds = statistics.median(case.seconds)
        row |= {"ms": 1e3 * seconds, "pictures_per_s": self.batch / seconds}
        row |= {"forwards": statistics.mean(case.forwards), "backwards": statistics.mean(case.backwards)}
        row["blocks_ms"] = [1e3 * taken for taken in case.seconds]
        row["ratio"] = {name: paired(other, case) for name, other in rivals(case, cases, self.base).items()}
        row |= case.row
        self.precise(case.precision)
        case.row = row
        try:
            self.look_inside(case)
        except Exception as error:
            row["not_looked_inside"] = reason(error)
        case.peer = None

    def look_inside(self, case: Case) -> None:
        """The split of the time and, of an adapter, what it keeps and asks."""
        row, peer = case.row, case.peer
        if isinstance(peer, Ours) and peer.steps:
            row["labelled"] = peer.asked / peer.steps
            row["skipped"] = peer.skipped / peer.steps
            row["state_bytes"] = state_bytes(peer.adapter.state_dict())
            row["adapted_bytes"] = adapted_bytes(peer.adapter)
        row["split_ms"] = self.split(case, self.wait)
        if isinstance(peer, Ours):
            # Of the host's own time: in a run where nothing is waited for but what the adapter itself waits for.
            row["bookkeeping_percent"] = 100 * self.split(case, lambda: None)["policy"] / row["ms"]
        if self.options.profile is not None and case.name == "wise":
            row["busy"] = self.trace(case)

    def split(self, case: Case, wait: Callable[[], None]) -> dict[str, float]:
        """Milliseconds of a batch by part, waiting before and after each."""
        assert case.peer is not None
        self.clock.wait = wait
        self.clock.seconds.clear()
        watch = watched(case.peer.adapter, self.clock) if isinstance(case.peer, Ours) else contextlib.nullcontext()
        with watch:
            self.wait()
            self.clock.on = True
            began = time.perf_counter()
            try:
                self.steps(case, self.options.batches)
                self.wait()
            finally:
                self.clock.on = False
            self.clock.seconds["rest"] += time.perf_counter() - began - sum(self.clock.seconds.values())
        return {part: 1e3 * self.clock.seconds[part] / self.options.batches for part in SPLIT}

    def trace(self, case: Case) -> float | None:
        """Write a chrome trace of some batches; gives the share of the time in which the device was busy."""
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        self.options.profile.mkdir(parents=True, exist_ok=True)
        words = f"{self.name} {case.precision} {'last ' * case.channels_last}{case.name} {case.mode}"
        path = self.options.profile / f"{'-'.join(words.replace(',', '').replace('+', '').split())}.json"
        with profile(activities=kinds) as profiler:
            self.steps(case, 4)
            self.wait()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        with gzip.open(f"{path}.gz", "wt") as packed:
            packed.write(path.read_text())
        path.unlink()
        return busy(events)


def rivals(case: Case, cases: Sequence[Case], base: dict[str, Any]) -> dict[str, Case]:
    """Whom a row is compared with, by the name of the column."""
    found = {}
    for other in cases:
        if other is case or not other.seconds:
            continue
        if other.name in ("plain inference", "tent by hand", "authors") and other.mode == "eager":
            found[other.name] = other
        if other.name.startswith("authors") and vars(other).items() >= base.items():
            found["authors, base"] = other
        if other.name in ("tent", "predict") and other.mode == case.mode:
            found[f"{other.name}, same mode"] = other
    return found


def paired(other: Case, case: Case) -> float:
    """How many times faster the case is than the other: the median over rounds."""
    return statistics.median(theirs / ours for theirs, ours in zip(other.seconds, case.seconds, strict=False))


def busy(events: Sequence[dict[str, Any]]) -> float | None:
    """The share of the span from the first to the last kernel in which some kernel or copy ran."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event
    )
    if not spans:
        return None
    covered, until = 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / (until - spans[0][0])


def state_bytes(state: Any) -> int:
    """What a saved state takes, numbers and strings at eight bytes each."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(state_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(state_bytes(value) for value in state)
    return 8


def adapted_bytes(adapter: wa.Adapter) -> int:
    return sum(t.numel() * t.element_size() for t in adapter.classifier.live.tensors.values())


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


# -- what is promised -------------------------------------------------------------------------------------------------


def checks(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The promises that these rows bear on, each with its number and limit."""
    found: list[dict[str, Any]] = []

    def hold(claim: str, value: float, limit: float, at_least: bool) -> None:
        holds = value >= limit if at_least else value <= limit
        found.append({"claim": claim, "value": value, "limit": limit, "at_least": at_least, "holds": holds})

    cuda = report["machine"]["device"].startswith("cuda")
    fastest: dict[str, tuple[float, str]] = {}
    for group in report["groups"]:
        rows = {(row["name"], row["mode"]): row for row in group.get("rows", ()) if "error" not in row}
        for (name, mode), row in rows.items():
            where = f"{group['group']}, {name}, {mode}"
            ratio = row["ratio"]
            if name == "wise":
                if "authors, base" in ratio:
                    fastest[group["model"]] = max(
                        fastest.get(group["model"], (0.0, "")), (ratio["authors, base"], where)
                    )
                tent, predict = rows.get(("tent", mode)), rows.get(("predict", mode))
                if tent and predict:
                    blocks = zip(row["blocks_ms"], tent["blocks_ms"], predict["blocks_ms"], strict=False)
                    extra = statistics.median((ours - theirs) / forward for ours, theirs, forward in blocks)
                    hold(f"{where}: forwards more than tent in the same mode", extra, 0.6, False)
                    if "peak_mib" in row:
                        allowed = tent["peak_mib"] + predict["peak_mib"]
                        hold(f"{where}: peak MiB, tent's plus inference's", row["peak_mib"], allowed, False)
                if mode == "eager" and "authors" in ratio:
                    if not cuda:
                        hold(f"{where}: × authors", ratio["authors"], 1.5, True)
                    elif group["precision"] == "tf32" and not group["channels_last"]:
                        limit = {"resnet50": 1.8, "vit_b_16": 1.7}.get(group["model"])
                        if limit:
                            hold(f"{where}: × authors", ratio["authors"], limit, True)
                if cuda and group["model"] == "resnet50" and "bookkeeping_percent" in row:
                    hold(f"{where}: policy and bookkeeping, %", row["bookkeeping_percent"], 1.0, False)
                if "state_bytes" in row:
                    allowed = 3 * row["adapted_bytes"] + 10**6
                    hold(f"{where}: state bytes, 3 × adapted + 1 MB", row["state_bytes"], allowed, False)
            if name == "wise, light" and ("predict", mode) in rows:
                hold(f"{where}: forwards", 1 / ratio["predict, same mode"], 1.6, False)
    if cuda:
        for model, (value, where) in fastest.items():
            hold(f"{model}, fastest ({where}): × authors in tf32", value, 4.5, True)
    return found


# -- what is printed --------------------------------------------------------------------------------------------------

COLUMNS = {
    "× inference": "plain inference",
    "× tent": "tent by hand",
    "× authors": "authors",
    "× authors, base": "authors, base",
}


def table(group: dict[str, Any]) -> str:
    """One group as a markdown table."""
    if "left_out" in group:
        return f"### {group['group']}\n\nLeft out: {group['left_out']}\n"
    lines = [f"### {group['group']}", "", f"Batches of {group['batch']} at {group['px']} px.", ""]
    heads = ["row", "mode", "pictures/s", *COLUMNS, "peak MiB", "fwd/bwd", *SPLIT]
    lines += [f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * (len(heads) - 2)}"]
    for row in group["rows"]:
        if "error" in row:
            lines.append(
                f"| {row['name']} | {row['mode']} | {row['error'].replace('|', '/')} |" + " |" * (len(heads) - 3)
            )
            continue
        cells = [row["name"], row["mode"], f"{row['pictures_per_s']:,.0f}"]
        cells += [f"{row['ratio'][name]:.2f}" if name in row["ratio"] else "" for name in COLUMNS.values()]
        cells.append(f"{row['peak_mib']:,.0f}" if "peak_mib" in row else "")
        cells.append(f"{row['forwards']:.1f}/{row['backwards']:.1f}")
        cells += [f"{row['split_ms'][part]:.2f}" if "split_ms" in row else "" for part in SPLIT]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def summary(report: dict[str, Any]) -> str:
    """The promises as a markdown table."""
    lines = ["| promise | measured | limit | holds |", "| --- | ---: | ---: | --- |"]
    for check in report.get("checks", []):
        sign = "≥" if check["at_least"] else "≤"
        value, limit = (f"{n:,.2f}" if n < 1000 else f"{n:,.0f}" for n in (check["value"], check["limit"]))
        lines.append(f"| {check['claim']} | {value} | {sign} {limit} | {'yes' if check['holds'] else 'no'} |")
    return "\n".join([*lines, ""])


def markdown(report: dict[str, Any]) -> str:
    """A whole report."""
    about, how = report["machine"], report["settings"]
    opening = (
        f"{about['name']}, torch {about['torch']}, {about['threads']} threads; "
        f"{how['rounds']} rounds of {how['batches']} batches each{', memory kept' * how.get('keeps_memory', False)}. "
        "Split in ms a batch."
    )
    return "\n".join([opening, "", *(table(group) for group in report["groups"]), summary(report)])


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "device": str(device),
        "name": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "wise_atta": wa.__version__,
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("batch", "px", "batches", "rounds", "limit", "keeps_memory")}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", help="only groups of these networks")
    parser.add_argument("--precisions", nargs="+", help="only groups of these precisions: fp32, tf32, bf16")
    parser.add_argument("--modes", nargs="+", help="only these modes, as named in the table")
    parser.add_argument("--rows", nargs="+", help="only these rows, as named in the table")
    parser.add_argument("--batch", type=int, help="pictures in a batch: 64, on EfficientNet-Lite0 16")
    parser.add_argument("--px", type=int, help="another size of the pictures than the network's own")
    parser.add_argument("--batches", type=int, default=10, help="batches in a block")
    parser.add_argument("--rounds", type=int, default=4, help="blocks of each competitor")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--fresh-memory", action="store_true", help="on a CPU, let freed memory go back to the system")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which nothing new is begun")
    parser.add_argument("--out", type=Path, help="a file for the results; tables go to table-….md beside it")
    parser.add_argument("--profile", type=Path, help="a folder for chrome traces")
    parser.add_argument("--verbose", action="store_true", help="print the traceback of what fails")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    groups = [
        replace(group, modes=modes)
        for group in GROUPS["cuda" if options.device.startswith("cuda") else "cpu"]
        if not options.models or group.model in options.models
        if not options.precisions or group.precision in options.precisions
        if options.modes or not group.asked_for
        if (modes := [mode for mode in group.modes if not options.modes or mode.name in options.modes])
    ]
    if not groups:
        sys.exit("no group of this device is left: see GROUPS in this file")
    # Before anything is made, and for all alike: it is a setting of the process.
    options.keeps_memory = options.device == "cpu" and not options.fresh_memory and wa.keep_memory()
    bench = Bench(options)
    bench.run(groups)
    print(summary(bench.report))


if __name__ == "__main__":
    main()
