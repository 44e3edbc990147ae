"""Weights: which tensors of a network adapt, their values, what its BatchNorm layers normalise with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta import errors
from wise_atta.engine import host
from wise_atta.engine.first_layer import First
from wise_atta.engine.graphs import Graphs
from wise_atta.model import checks
from wise_atta.model.copies import copy_whole
from wise_atta.model.forward import Forward, Pass
from wise_atta.model.gradients import gradients_of
from wise_atta.model.layout import Gradients, Layout, Version, checksum, some_values
from wise_atta.model.network import Network, SetUp, outside_inference_mode
from wise_atta.model.published import Publisher
from wise_atta.model.selection import Spec
from wise_atta.model.statistics import FixedMode, Mode, SourceMode, Statistics, StatisticsMode, make_mode
from wise_atta.stream import Inputs, size, tree_map


class Weights(Publisher):
    """Some tensors of a network, with values of their own. Every other tensor is the user's.

    Before a forward a replica of the network is bound to one `Version`, so the live model, the anchor and the source
    are the same replica bound to three versions. A change is published by one reference swap, and a replica is used by
    one thread at a time: a forward sees one version and its statistics, in any thread.

    Parameters
    ----------
    network
        What is run. Others may have weights of their own on it.
    adapt
        Which tensors adapt: one specification, or groups of them by name. A specification is ``"norm"`` (affine
        tensors of normalisation layers), ``"last-norm"`` (those of the last stage: of `layer4`, in nets without one of
        the last quarter of the normalisation layers, rounded up), ``"head"``, ``"head.bias"``, ``"all"``, the name of a
        block, a glob over parameter names, or a list of these; ``"!…"`` takes away.
    statistics
        What BatchNorm layers normalise with: the ``"batch"``, the ``"source"`` statistics, ``"mixed"`` (the source
        counted as `prior` samples beside the batch), ``"ema"`` (a moving average that starts at the source), or
        ``"renorm"`` (batch renormalisation: a moving average that starts at the first batch, used before it follows
        the batch at hand; gradients flow as if the batch had been used).
    prior
        For ``"mixed"``: how many samples the source statistics are worth.
    ema_weight
        For ``"ema"`` and ``"renorm"``: the weight of a new batch.

    Attributes
    ----------
    model, head_name, classes, device, dtype, work, outputs, quick, has_batch_norm, select
        Of the network.
    mode
        What `statistics` names.
    repeats
        Whether forwards of the same inputs will follow one another, so that it pays to keep what they share.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        network: Network,
        *,
        adapt: Spec | Mapping[str, Spec] = "norm",
        statistics: StatisticsMode = "batch",
        prior: int = 256,
        ema_weight: float = 0.1,
    ) -> None:
        self.network = network
        self.model, self.head_name, self.classes = network.model, network.head_name, network.classes
        self.device, self.dtype, self.work = network.options.device, network.options.dtype, network.work
        self.outputs, self.quick, self.has_batch_norm = network.outputs, network.quick, bool(network.norms)
        self.select = network.select
        self.statistics: StatisticsMode = statistics
        self.prior = prior
        self.ema_weight = ema_weight
        self.mode: Mode = make_mode(statistics, prior=prior, ema_weight=ema_weight)
        if self.has_batch_norm:
            checks.check_statistics(statistics, network.options)
        self._parameters = dict(self.model.named_parameters())
        self.layout = self._lay_out(adapt if isinstance(adapt, Mapping) else {"adapted": adapt})
        self.replicas = network.replicas(self.layout.shapes)
        self.repeats = False
        super().__init__(Version(self.source_flat(), self.layout), self.mode.start(network.norms))
        self._followed: Statistics | None = None
        self._graphs = Graphs(self._record, self.layout.views) if network.options.graphs else None

    def _lay_out(self, groups: Mapping[str, Spec]) -> Layout:
        taken: set[str] = set()
        chosen: dict[str, tuple[str, ...]] = {}
        for group, spec in groups.items():
            chosen[group] = tuple(name for name in self.select(spec) if name not in taken)
            taken.update(chosen[group])
        kinds = {(self._parameters[n].dtype, self._parameters[n].device) for n in taken}
        if len(kinds) > 1:
            raise errors.BadConfig(f"adapted tensors must share one dtype and device, found {sorted(map(str, kinds))}")
        return Layout.of(chosen, {name: self._parameters[name].shape for name in taken})

    @property
    def head_is_linear(self) -> bool:
        """Whether the logits are W·f + b of the features as they are, for all classes, with W and b the head's own."""
        return self.network.head_is_linear

    def like(self, model: nn.Module, *, statistics: StatisticsMode) -> Weights:
        """Another model, seen as this one is: the same normalisation of inputs, the same subset of classes."""
        network = self.network.like(model)
        return Weights(network, statistics=statistics, prior=self.prior, ema_weight=self.ema_weight)

    # -- their values -------------------------------------------------------------------------------------------

    def source_flat(self) -> Tensor:
        """The source values of the adapted tensors, read from the user's module, as a new vector."""
        if not self.layout.shapes:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        return self.layout.flatten({name: self._parameters[name] for name in self.layout.shapes})

    def source(self) -> Version:
        """The adapted tensors as they were trained."""
        return Version(self.source_flat(), self.layout, grad=False)

    def commit(self, used: Statistics | None) -> None:
        """Let a moving average follow the statistics of a batch, once."""
        if used is None or used is self._followed:
            return
        self._followed = used
        before = self.running
        running = self.mode.commit(before, used)
        if before is not None and running is not None:
            # A variance that overflows can still give finite logits, and would stay in the average for ever.
            running = torch.where(running.isfinite().all(), running, before)
        self.running = running

    def reset_statistics(self) -> None:
        """Return the moving statistics to where they started."""
        if self.running is not None:
            self.running = self.mode.start(self.network.norms)

    def fingerprint(self) -> dict[str, Any]:
        """What tells this model's states from another's: names, shapes, and checksums.

        The first is of all source values that adapt, the second of a few values of every tensor of the model.
        """
        values = self.source_flat().cpu().contiguous()
        few = [some_values(tensor) for tensor in (*self.model.parameters(), *self.model.buffers()) if tensor.numel()]
        return {
            "groups": {group: list(names) for group, names in self.layout.groups.items()},
            "shapes": {name: list(shape) for name, shape in self.layout.shapes.items()},
            "dtype": str(values.dtype),
            "classes": None if self.classes is None else self.classes.tolist(),
            "source": checksum(values),
            "network": checksum(torch.cat(few).cpu()) if few else 0,
        }

    # -- running them -------------------------------------------------------------------------------------------

    def check(self, inputs: Inputs) -> int:
        """Refuse inputs that cannot be predicted on; otherwise the number of samples."""
        count = checks.check_inputs(inputs, self.network.options)
        if count == 1 and self.mode.needs_batch and self.has_batch_norm:
            raise errors.SingleSample(
                "one sample has no batch statistics to normalise with: use larger batches, or "
                "statistics='ema' (or 'mixed', 'source')"
            )
        return count

    def send(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Set a few numbers of a batch on their way to the host: the first tells whether all of it is finite.

        What is given waits for them.
        """
        if not numbers.is_cuda:
            return numbers.tolist
        (places,), wait = host.send([numbers])

        def arrived() -> list[float]:
            wait()
            values: list[float] = places.tolist()
            return values

        return arrived

    def samples(self, inputs: Inputs) -> int:
        """How many samples the batch has."""
        return size(inputs)

    def forward(
        self,
        inputs: Inputs,
        *,
        version: Version | None = None,
        statistics: Statistics | Literal["source"] | None = None,
        running: Tensor | Literal["now"] | None = "now",
        grad: bool = False,
        keep: bool = True,
        beside: Forward | None = None,
    ) -> Forward:
        """Run the network once.

        Parameters
        ----------
        inputs
            A batch, already checked by `check`.
        version
            Which values the adapted tensors take; the live ones if not given.
        statistics
            What to normalise with instead of the classifier's own way: given statistics, or the source's.
        running
            The moving average of another moment, for the classifier's own way; None where there was none yet.
        grad
            Whether to keep the graph. Works inside the caller's `no_grad` and `inference_mode`.
        keep
            Whether the batch's own statistics will be wanted; without them the forward may give none.
        beside
            An earlier forward of the very same inputs. What the first layer gave there is not computed again.
        """
        current = self.current
        version = current.version if version is None else version
        running = current.running if isinstance(running, str) else running
        count = self.samples(inputs) if statistics is None else size(inputs)
        self.work.forwards += 1
        self.work.gradient_forwards += grad
        with torch.inference_mode(False), torch.set_grad_enabled(grad), self.network.products():
            inputs = tree_map(outside_inference_mode, inputs)
            if statistics is None and self._graphs is not None and self.network.head_checked:
                replayed = self._replay(self._graphs, inputs, version, running, grad, beside)
                if replayed is not None:
                    return replayed
            keep = keep or not self.quick or self.network.options.compile or self._graphs is not None
            first = beside.first if beside is not None and beside.inputs is inputs else None
            set_up = self._set_up(statistics, count, running, keep)
            done = self._run(inputs, version.tensors, set_up, first)
        return Forward(inputs, done.logits, done.features, version, done.statistics, first=done.first)

    def _set_up(
        self, statistics: Statistics | Literal["source"] | None, count: int, running: Tensor | None, keep: bool = True
    ) -> SetUp:
        mode = self.mode
        if statistics is not None:
            mode = FixedMode(statistics) if isinstance(statistics, Statistics) else SourceMode()
        return functools.partial(mode.set_up, count=count, running=running, keep=keep)

    def _run(self, inputs: Inputs, tensors: Mapping[str, Tensor], set_up: SetUp, first: First | None) -> Pass:
        return self.network.run(self.replicas, inputs, tensors, set_up, first=first, keeps=self.repeats)

    def _record(self, inputs: Inputs, tensors: dict[str, Tensor], running: Tensor | None, first: First | None) -> Pass:
        with self.network.products():
            return self._run(inputs, tensors, self._set_up(None, size(inputs), running), first)

    def _replay(
        self,
        graphs: Graphs,
        inputs: Inputs,
        version: Version,
        running: Tensor | None,
        grad: bool,
        beside: Forward | None,
    ) -> Forward | None:
        same = beside.logits if beside is not None and beside.inputs is inputs else None
        outputs = graphs.run(inputs, version.whole if grad else version.flat, running, grad, same)
        if outputs is None:
            return None
        logits, features, rest, recorded = outputs
        used: Statistics | None = recorded.statistics
        if used is not None:
            values = rest[0] if used.moments is None else running
            before = used.before if running is None else running
            assert values is not None
            used = Statistics(values, used.batch, before, None if used.moments is None else rest[-1])
        return Forward(inputs, logits, features, version, used)

    def head(self, features: Tensor, version: Version | None = None) -> Tensor:
        """Logits from features, with the head of a version (the live one if not given)."""
        return self.network.head(self.replicas, features, (self.live if version is None else version).tensors)

    # -- their gradients ----------------------------------------------------------------------------------------

    def pull(self, forward: Forward, slope: Tensor, groups: Sequence[str]) -> Gradients:
        """The gradients of a loss whose slope in the logits is known: the network's backward and nothing else."""
        whole = None if self._graphs is None else self._graphs.pull(forward.logits, slope)
        if whole is None:
            return self.gradients(forward.logits, forward.version, groups, slope=slope)
        self.work.backwards += 1
        return {group: whole[self.layout.slices[group]] for group in groups}

    def gradients(
        self,
        loss: Tensor,
        version: Version,
        groups: Sequence[str],
        *,
        slope: Tensor | None = None,
        retain_graph: bool = False,
        head: bool = False,
    ) -> dict[str, list[Tensor]]:
        """∂loss/∂tensor for the tensors of each group; zeros where the loss does not depend on one.

        With a `slope`, `loss` stands for tensors that the loss depends on, and the slope for how. `head` says that the
        loss comes from cached features through the head alone: that is no backward of the network.
        """
        names = [name for group in groups for name in self.layout.groups[group]]
        if not names:
            return {group: [] for group in groups}
        self.work.backwards += not head
        with self.network.products():
            by_name = gradients_of(loss, version, names, slope, retain_graph, whole=not head)
        if self._graphs is not None and not retain_graph and not head:
            self._graphs.done()
        return {group: [by_name[name] for name in self.layout.groups[group]] for group in groups}

    # -- giving them away ---------------------------------------------------------------------------------------

    def export(self, version: Version | None = None) -> nn.Module:
        """A plain module of its own with the adapted tensors, for the same inputs as the user's module.

        BatchNorm layers normalise as they do here: with the batch, the source, the moving average (with
        ``"renorm"`` the batch as long as there is none) or the mixture.
        """
        current = self.current
        module = copy_whole(self.model).eval()
        tensors = (current.version if version is None else version).tensors
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in tensors:
                    parameter.copy_(tensors[name])
        norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        if norms:
            running = current.running
            self.mode.export(module, norms, None if running is None else self.network.norms.pairs(running))
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.model).__name__}, head={self.head_name!r}, "
            f"statistics={self.statistics!r}, "
            f"adapted={ {group: len(names) for group, names in self.layout.groups.items()} })"
        )
