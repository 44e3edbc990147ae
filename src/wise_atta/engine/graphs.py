"""CUDA graphs of a network: a forward, or its backward, launched at once, for batches of one shape."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from wise_atta.engine.layers import First
from wise_atta.stream import Inputs, leaves, tree_map

_log = logging.getLogger("wise_atta.graphs")
# Forwards of one shape before it is worth a graph, and runs before one is recorded.
_PATIENCE = 2
_WARMUP = 3
# Shapes that are counted at a time: where every batch has its own, nothing will come often.
_KINDS = 32


class Recorded(Protocol):
    """What a network leaves behind in the memory of its graph: outputs, and any tensors of its own beside them."""

    logits: Tensor
    features: Tensor
    first: First | None


# Runs the network on memory that it is given: inputs, adapted values, moving statistics, what the first layer gave if
# known. Whether there is a graph is torch's own setting at that moment.
Run: TypeAlias = Callable[[Inputs, dict[str, Tensor], Tensor | None, First | None], Recorded]
# What a recording serves: forwards with a graph, those without, and those without that follow one with a graph.
Use: TypeAlias = Literal["graph", "plain", "beside"]


class _Token:
    """Alive as long as a graph of autograd needs what the last forward left behind; `done` once it was used."""

    done = False


class Recording:
    """One network, recorded for one shape of inputs: a graph of its forward and, with `grad`, one of its backward.

    Everything is in memory of its own. A call copies inputs and adapted values in and results out, so nothing that
    others hold ever changes. A recording `beside` another, for the same inputs right after it, reads what that one
    left.
    """

    def __init__(
        self,
        run: Run,
        views: Callable[[Tensor], dict[str, Tensor]],
        inputs: Inputs,
        flat: Tensor,
        running: Tensor | None,
        grad: bool,
        beside: Recording | None = None,
    ) -> None:
        self.stream = torch.cuda.current_stream()
        self.beside = beside
        self.inputs: Inputs = tree_map(torch.clone, inputs) if beside is None else beside.inputs
        first = None if beside is None else beside.recorded.first
        self.flat = flat.detach().clone()
        self.running = None if running is None else running.clone()
        self.grad = grad
        self._lock = threading.Lock()
        self._token: weakref.ref[_Token] | None = None
        self._backward: torch.cuda.CUDAGraph | None = None
        self.recorded: Recorded
        tensors = views(self.flat)
        for tensor in tensors.values():
            tensor.requires_grad_(grad)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with _benchmarked(), torch.set_grad_enabled(grad):
            self._warm_up(aside, run, tensors, first)
            self._forward = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._forward, stream=aside, capture_error_mode="thread_local"):
                self.recorded = run(self.inputs, tensors, self.running, first)
            self.logits, self.features = self.recorded.logits, self.recorded.features
            if grad:
                self._record_backward(aside, tensors, views)
        self.recorded.logits = self.logits = self.logits.detach()
        self.recorded.features = self.features = self.features.detach()

    def _warm_up(self, aside: torch.cuda.Stream, run: Run, tensors: dict[str, Tensor], first: First | None) -> None:
        """Let libraries choose their kernels and compilers compile, before anything is recorded."""
        aside.wait_stream(self.stream)
        with torch.cuda.stream(aside):
            for _ in range(_WARMUP):
                out = run(self.inputs, tensors, self.running, first)
                if self.grad:
                    outputs = [out.logits, out.features]
                    _gradients(outputs, tensors, [torch.zeros_like(output) for output in outputs])
        self.stream.wait_stream(aside)

    def _record_backward(
        self, aside: torch.cuda.Stream, tensors: dict[str, Tensor], views: Callable[[Tensor], dict[str, Tensor]]
    ) -> None:
        outputs = [self.logits, self.features]
        self._slopes = [torch.zeros_like(output) for output in outputs]
        self._filled: set[int] = set()
        self.gradient = torch.zeros_like(self.flat)
        places = views(self.gradient)
        self._backward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            self._backward, pool=self._forward.pool(), stream=aside, capture_error_mode="thread_local"
        ):
            # What the forward saved must stay: a rule may take two gradients of one forward.
            gradients = _gradients(outputs, tensors, self._slopes, retain_graph=True)
            torch._foreach_copy_(list(places.values()), gradients)

    def fits(self) -> bool:
        """Whether it can be used now: on the stream it was made for, and not while an earlier forward is in use."""
        token = None if self._token is None else self._token()
        return torch.cuda.current_stream() == self.stream and (token is None or token.done)

    def done(self) -> None:
        """The gradient of the last forward was taken, and nobody will ask for another."""
        token = None if self._token is None else self._token()
        if token is not None:
            token.done = True

    def replay(self, inputs: Inputs, flat: Tensor, running: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Logits, features and the network's other tensors for these inputs and values, as tensors of their own."""
        with self._lock:
            if self.beside is None:
                torch._foreach_copy_(list(leaves(self.inputs)), list(leaves(inputs)))
            self.flat.copy_(flat)
            if self.running is not None and running is not None:
                self.running.copy_(running)
            self._forward.replay()
            return self.logits.clone(), self.features.clone(), [t.clone() for t in extras(self.recorded)]

    def backward(self, slopes: Sequence[Tensor | None]) -> Tensor:
        """The gradient of all adapted values, as one vector, for gradients of logits and features."""
        assert self._backward is not None
        with self._lock:
            for index, (place, gradient) in enumerate(zip(self._slopes, slopes, strict=True)):
                if gradient is not None:
                    place.copy_(gradient)
                elif index in self._filled:
                    place.zero_()
            self._filled = {index for index, gradient in enumerate(slopes) if gradient is not None}
            self._backward.replay()
            return self.gradient.clone()

    def is_last(self, node: Any) -> bool:
        """Whether a node of autograd is of the last forward, so that its memory was not taken by another."""
        return self._token is not None and self._token() is node.token

    def lend(self) -> _Token:
        token = _Token()
        self._token = weakref.ref(token)
        return token


def extras(recorded: Any) -> list[Tensor]:
    """The tensors beside logits and features that a forward fills in: statistics of its batch."""
    used = recorded.statistics
    return [] if used is None else [t for t in (used.values, used.moments) if t is not None]


class _Replayed(torch.autograd.Function):
    """A recorded network as one node of a graph of autograd."""

    @staticmethod
    def forward(
        ctx: Any, recording: Recording, inputs: Inputs, running: Tensor | None, rest: list[Tensor], flat: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits, features, others = recording.replay(inputs, flat, running)
        rest.extend(others)
        ctx.recording, ctx.token = recording, recording.lend()
        ctx.set_materialize_grads(False)
        return logits, features

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> Any:
        return None, None, None, None, _gradient(ctx, slopes)


def _recording_of(logits: Tensor) -> Recording | None:
    """The recording whose forward gave these logits, if they were recorded."""
    recording = getattr(logits.grad_fn, "recording", None)
    return recording if isinstance(recording, Recording) else None


def _gradient(ctx: Any, slopes: Sequence[Tensor | None]) -> Tensor:
    recording: Recording = ctx.recording
    if not recording.is_last(ctx):
        raise RuntimeError("a later forward has taken the memory of this one: its gradient was asked for too late")
    return recording.backward(slopes)


class Graphs:
    """Records forwards of a network that come again and again in one shape, and replays them.

    One recording at a time for each use. Another shape takes its place if it comes again and again while that of the
    recording does not come at all. A network that cannot be recorded runs as before.
    """

    def __init__(self, run: Run, views: Callable[[Tensor], dict[str, Tensor]]) -> None:
        self._run = run
        self._views = views
        self._recordings: dict[Use, tuple[Any, Recording]] = {}
        self._seen: dict[Use, Counter[Any]] = {use: Counter() for use in get_args(Use)}
        self._refused = False
        self._lock = threading.RLock()

    def run(
        self, inputs: Inputs, flat: Tensor, running: Tensor | None, grad: bool, same: Tensor | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor], Any] | None:
        """Logits, features, other tensors and what was recorded; None where the forward must be run as it is.

        `same` are logits of an earlier forward of the same inputs.
        """
        with self._lock:
            beside = None if grad or same is None else self._left_by(same)
            recording = self._recording(inputs, flat, running, grad, beside)
            if recording is None or not recording.fits():
                return None
            if not grad:
                return *recording.replay(inputs, flat, running), recording.recorded
            rest: list[Tensor] = []
            logits, features = _Replayed.apply(recording, inputs, running, rest, flat)
            return logits, features, rest, recording.recorded

    def _left_by(self, logits: Tensor) -> Recording | None:
        """The recording in whose memory the forward of these logits still is."""
        recording, (_, current) = _recording_of(logits), self._recordings.get("graph", (None, None))
        return (
            recording if recording is not None and recording is current and recording.is_last(logits.grad_fn) else None
        )

    def pull(self, logits: Tensor, slope: Tensor) -> Tensor | None:
        """The gradient of all adapted values, once, for a slope in the logits; None if they were not recorded."""
        if _recording_of(logits) is None:
            return None
        gradient = _gradient(logits.grad_fn, (slope, None))
        self.done()
        return gradient

    def done(self) -> None:
        """The gradient of the last forward was taken."""
        if "graph" in self._recordings:
            self._recordings["graph"][1].done()

    def _recording(
        self, inputs: Inputs, flat: Tensor, running: Tensor | None, grad: bool, beside: Recording | None
    ) -> Recording | None:
        use: Use = "graph" if grad else "plain" if beside is None else "beside"
        kind = (_shape(inputs), running is None)
        known = self._recordings.get(use)
        others = self._seen[use]
        if known is not None and known[0] == kind:
            others.clear()
            return known[1]
        if self._refused:
            return None
        if len(others) > _KINDS:
            others.clear()
        others[kind] += 1
        if others[kind] <= _PATIENCE or (known is not None and not known[1].fits()):
            return None
        # The old recording's memory is free before the new one takes its own, and so is that of one that reads it.
        self._recordings.pop(use, None)
        if use == "graph":
            self._recordings.pop("beside", None)
            self._seen["beside"].clear()
        del known
        try:
            recording = Recording(self._run, self._views, inputs, flat, running, grad, beside)
        except RuntimeError as error:
            self._refused = True
            _log.warning("the network cannot be recorded as a CUDA graph and runs without: %s", error)
            return None
        self._recordings[use] = (kind, recording)
        others.clear()
        return recording


def _shape(tree: Inputs) -> Any:
    """What tells one shape of inputs from another: the tree with shapes and dtypes for leaves."""
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.dtype
    if isinstance(tree, Mapping):
        return tuple((name, _shape(part)) for name, part in tree.items())
    return tuple(_shape(part) for part in tree)


def _gradients(
    outputs: Sequence[Tensor], tensors: dict[str, Tensor], slopes: Sequence[Tensor], retain_graph: bool = False
) -> tuple[Tensor, ...]:
    pairs = [(output, gradient) for output, gradient in zip(outputs, slopes, strict=True) if output.requires_grad]
    return torch.autograd.grad(
        [output for output, _ in pairs],
        list(tensors.values()),
        [gradient for _, gradient in pairs],
        retain_graph=retain_graph,
        allow_unused=True,
        materialize_grads=True,
    )


@contextlib.contextmanager
def _benchmarked() -> Iterator[None]:
    """Let cuDNN try its algorithms and keep the fastest: what is recorded is run very often."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
