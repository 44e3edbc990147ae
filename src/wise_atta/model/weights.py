"""Weights: which tensors of a network adapt, their values, what BatchNorm layers normalise with, what is published."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointError

from wise_atta import errors
from wise_atta.engine import host
from wise_atta.engine.graphs import Graphs
from wise_atta.engine.layers import First
from wise_atta.model import checks
from wise_atta.model.layout import Gradients, Layout, Spec, Version
from wise_atta.model.network import Forward, Network, Pass
from wise_atta.model.replica import copy_whole
from wise_atta.model.statistics import FixedMode, Mode, Statistics, StatisticsMode, make_mode
from wise_atta.stream import Inputs, leaves, size, tree_map


@dataclass(frozen=True, eq=False)
class Published:
    """One moment of a set of weights: the values of its tensors, and its moving statistics, if any."""

    version: Version
    running: Tensor | None = None


class Weights:
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
        For ``"mixed"``: how many samples the source statistics are worth, 256 if not given.
    ema_weight
        For ``"ema"`` and ``"renorm"``: the weight of a new batch.
    mixture
        For ``"mixed"``, in place of `prior`: the source's share, from 0 (the batch alone) to 1 (the source alone), the
        same at every batch size. Gradients flow through the batch's part; with `prior` they do not.

    Attributes
    ----------
    model, head_name, classes, device, dtype, work, has_batch_norm, select
        Of the network.
    live
        The values of the adapted tensors that updates start from: what was published last, or, within `at_once`, will
        be.
    published
        What requests are answered from. Read it once for each.
    outputs
        How many classes the model itself has, where that can be told before its first forward.
    quick
        Whether it was asked to be fast, so that sums may be taken in another order than usual.
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
        prior: int | None = None,
        ema_weight: float = 0.1,
        mixture: float | None = None,
    ) -> None:
        self.network = network
        self.model, self.head_name, self.classes = network.model, network.head_name, network.classes
        options, self.work, self.select = network.options, network.work, network.select
        self.device, self.dtype, self.has_batch_norm = options.device, options.dtype, bool(network.norms.layers)
        outputs = getattr(self.model.get_submodule(self.head_name), "out_features", None)
        self.outputs = outputs if isinstance(outputs, int) else None
        self.quick = options.quick or options.graphs
        # A compiled or recorded network is the same for all forwards.
        self._always_keeps = not self.quick or options.compile or options.graphs
        self.statistics: StatisticsMode = statistics
        if mixture is not None and prior is not None:
            raise errors.BadConfig("prior and mixture both say how much the source's statistics count: give one")
        self.prior = 256 if prior is None else prior
        self.ema_weight, self.mixture = ema_weight, mixture
        self.mode: Mode = make_mode(statistics, self.prior, ema_weight, mixture)
        if self.has_batch_norm:
            checks.check_statistics(statistics, options)
        self._parameters = dict(self.model.named_parameters())
        self.layout = self._lay_out(adapt if isinstance(adapt, Mapping) else {"adapted": adapt})
        self.replicas = network.replicas(self.layout.shapes)
        self.repeats = False
        self.live = Version(self.source_flat(), self.layout)
        self._running = self.mode.start(network.norms)
        self._followed: Statistics | None = None
        self._withheld = False
        self.published = Published(self.live, self._running)
        self._graphs = Graphs(self._record, self.layout.views) if options.graphs else None

    def _lay_out(self, groups: Mapping[str, Spec]) -> Layout:
        taken, chosen = set[str](), dict[str, tuple[str, ...]]()
        for group, spec in groups.items():
            chosen[group] = tuple(name for name in self.select(spec) if name not in taken)
            taken.update(chosen[group])
        kinds = {(self._parameters[n].dtype, self._parameters[n].device) for n in taken}
        if len(kinds) > 1:
            raise errors.BadConfig(f"adapted tensors must share one dtype and device, found {sorted(map(str, kinds))}")
        return Layout(chosen, {name: self._parameters[name].shape for name in taken})

    @functools.cached_property
    def head_is_linear(self) -> bool:
        """Whether the logits are W·f + b of the features as they are, for all classes, with W and b the head's own."""
        head = self.model.get_submodule(self.head_name)
        plain = type(head) is nn.Linear and "forward" not in vars(head) and self.classes is None
        # A hook may change anything: weight_norm and spectral_norm make W anew in one.
        hooks = head._forward_pre_hooks, head._forward_hooks, head._backward_pre_hooks, head._backward_hooks
        own = {f"{self.head_name}.weight", f"{self.head_name}.bias"}
        return plain and not any(hooks) and own.issuperset(self.select("head"))

    def like(self, model: nn.Module, *, statistics: StatisticsMode) -> Weights:
        """Another model, seen as this one is: the same normalisation of inputs, the same subset of classes."""
        network = Network(model, **self.network.seen)
        mixture = self.mixture if statistics == "mixed" else None
        prior = self.prior if mixture is None else None
        return Weights(network, statistics=statistics, prior=prior, ema_weight=self.ema_weight, mixture=mixture)

    # -- their values -------------------------------------------------------------------------------------------

    def source_flat(self) -> Tensor:
        """The source values of the adapted tensors, read from the user's module, as a new vector."""
        return self.layout.flatten(self._parameters)

    def source(self) -> Version:
        """The adapted tensors as they were trained."""
        return Version(self.source_flat(), self.layout, grad=False)

    def publish(self, flat: Tensor) -> None:
        """Make these values the live version. The vector must not be written to afterwards."""
        self.live = Version(flat, self.layout)
        if not self._withheld:
            self.published = Published(self.live, self._running)

    @property
    def running(self) -> Tensor | None:
        """The moving statistics, where the mode has any."""
        return self._running

    @running.setter
    def running(self, values: Tensor | None) -> None:
        self._running = values
        if not self._withheld:
            self.published = Published(self.live, values)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Publish all changes made within this at its end, together."""
        if self._withheld:
            yield
            return
        self._withheld = True
        try:
            yield
        finally:
            self._withheld = False
            self.published = Published(self.live, self._running)

    def commit(self, used: Statistics | None) -> None:
        """Let a moving average follow the statistics of a batch, once."""
        if used is None or used is self._followed or not self.mode.moves:
            return
        self._followed = used
        before = self._running
        running = self.mode.commit(before, used)
        if before is not None and running is not None:
            # A variance that overflows can still give finite logits, and would stay in the average for ever.
            running = torch.where(running.isfinite().all(), running, before)
        self.running = running

    def reset_statistics(self) -> None:
        """Return the moving statistics to where they started."""
        if self._running is not None:
            self.running = self.mode.start(self.network.norms)

    def fingerprint(self) -> dict[str, Any]:
        """What tells this model's states from another's: names, shapes, and CRC-32 checksums.

        The first is of all source values that adapt, the second of a few values of every tensor of the model.
        """

        def some(tensor: Tensor) -> Tensor:
            while tensor.dim() > 1:
                tensor = tensor[..., 0]
            return tensor.reshape(-1)[:16].double()

        def checksum(values: Tensor) -> int:
            return zlib.crc32(values.view(torch.uint8).numpy().tobytes()) if values.numel() else 0

        values = self.source_flat().cpu().contiguous()
        few = [some(tensor.detach()) for tensor in (*self.model.parameters(), *self.model.buffers()) if tensor.numel()]
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
        count = size(inputs)
        if count == 0:
            raise errors.BadInput("the batch is empty: leave empty batches out of the stream")
        for leaf in leaves(inputs):
            if leaf.device != self.device:
                raise errors.BadInput(f"inputs are on {leaf.device}, the model is on {self.device}: move the inputs")
            if leaf.is_floating_point() and leaf.dtype != self.dtype:
                raise errors.BadInput(f"inputs are {leaf.dtype}, the model is {self.dtype}: convert the inputs")
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
        count: int | None = None,
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
        count
            How many samples the batch has, where `inputs` are a share of it.
        """
        version = self.live if version is None else version
        running = self._running if isinstance(running, str) else running
        self.work.forwards += 1
        self.work.gradient_forwards += grad
        with torch.inference_mode(False), torch.set_grad_enabled(grad), self.network.products():
            inputs = tree_map(outside_inference_mode, inputs)
            same, first = (beside.logits, beside.first) if beside and beside.inputs is inputs else (None, None)
            if statistics is None and self._graphs is not None and self.network.head_checked:
                outputs = self._graphs.run(inputs, version.whole if grad else version.flat, running, grad, same)
                if outputs is not None:
                    return _replayed(outputs, inputs, version, running)
            mode = self.mode if statistics is None else FixedMode(None if statistics == "source" else statistics)
            tensors, keep = version.tensors, keep or self._always_keeps
            done = self.network.run(
                self.replicas, inputs, tensors, mode, running, count=count, keep=keep, first=first, keeps=self.repeats
            )
        return Forward(inputs, done.logits, done.features, version, done.statistics, first=done.first)

    def _record(self, inputs: Inputs, tensors: dict[str, Tensor], running: Tensor | None, first: First | None) -> Pass:
        run, keeps = self.network.run, self.repeats
        with self.network.products():
            return run(self.replicas, inputs, tensors, self.mode, running, first=first, keeps=keeps)

    def head(self, features: Tensor, version: Version | None = None) -> Tensor:
        """Logits from features, with the head of a version (the live one if not given)."""
        network, tensors = self.network, (self.live if version is None else version).tensors
        with torch.inference_mode(False), network.products(), self.replicas.take(tensors) as replica:
            features = outside_inference_mode(features)
            if not torch.is_autocast_enabled(features.device.type):
                # Features of a forward under autocast may be used outside of it.
                features = features.to(next(replica.head.parameters(), features).dtype)
            return network.subset(replica.head(features))

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
        if not loss.requires_grad:
            raise errors.NothingToAdapt(
                f"the logits do not depend on the adapted tensors ({names[0]}, …): does the model run them under "
                "torch.no_grad(), or detach what they give? Leave that out, or adapt tensors that come after it, for "
                "example adapt='head' (for wise and hiltta norm='head')"
            )
        with self.network.products():
            if version._whole and not head:
                by_name = _gradients_of_whole(loss, version, names, slope, retain_graph)
            else:
                try:
                    tensors = [version.tensors[name] for name in names]
                    kept = {"retain_graph": retain_graph, "allow_unused": True, "materialize_grads": True}
                    by_name = dict(zip(names, torch.autograd.grad(loss, tensors, slope, **kept), strict=True))
                except CheckpointError as error:
                    raise errors.BadConfig(
                        "the model recomputes activations in the backward by itself, when its tensors may be others "
                        "already: turn that off in the model and use checkpointing=True, or name the blocks there"
                    ) from error
        if self._graphs is not None and not retain_graph and not head:
            self._graphs.done()
        return {group: [by_name[name] for name in self.layout.groups[group]] for group in groups}

    # -- giving them away ---------------------------------------------------------------------------------------

    def export(self, version: Version | None = None) -> nn.Module:
        """A plain module of its own with the adapted tensors, for the same inputs as the user's module.

        BatchNorm layers normalise as they do here: with the batch, the source, the moving average (with
        ``"renorm"`` the batch as long as there is none) or the mixture.
        """
        module, running = copy_whole(self.model).eval(), self._running
        tensors = (self.live if version is None else version).tensors
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in tensors:
                    parameter.copy_(tensors[name])
        norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        if norms:
            self.mode.export(module, norms, None if running is None else self.network.norms.pairs(running))
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({type(self.model).__name__}, head={self.head_name!r}, "
            f"statistics={self.statistics!r}, "
            f"adapted={ {group: len(names) for group, names in self.layout.groups.items()} })"
        )


class Classifier(Weights):
    """Any `nn.Module` seen as features and a head, with few tensors that adapt and all others shared.

    It is one set of weights on a network of its own, which is what most people need.

    Parameters
    ----------
    model
        A classifier: inputs → logits [n, C], or an object with `.logits`. It is never changed and never run.
    adapt, statistics, prior, ema_weight, mixture
        Which tensors adapt, and what BatchNorm layers normalise with: as for `Weights`.
    options
        How the model is seen and run: `head`, `classes`, `mean`, `std`, `precision`, `channels_last`, `compile`,
        `graphs`, `checkpointing`, as for `Network`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        adapt: Spec | Mapping[str, Spec] = "norm",
        statistics: StatisticsMode = "batch",
        prior: int | None = None,
        ema_weight: float = 0.1,
        mixture: float | None = None,
        **options: Any,
    ) -> None:
        network = Network(model, **options)
        super().__init__(
            network, adapt=adapt, statistics=statistics, prior=prior, ema_weight=ema_weight, mixture=mixture
        )


def outside_inference_mode(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that autograd can take."""
    return tensor.clone() if tensor.is_inference() else tensor


def _replayed(
    outputs: tuple[Tensor, Tensor, list[Tensor], Any], inputs: Inputs, version: Version, running: Tensor | None
) -> Forward:
    """The forward that a recording gave."""
    logits, features, rest, recorded = outputs
    used: Statistics | None = recorded.statistics
    if used is not None:
        values = rest[0] if used.moments is None else running
        before = used.before if running is None else running
        assert values is not None
        used = Statistics(values, used.batch, before, None if used.moments is None else rest[-1])
    return Forward(inputs, logits, features, version, used)


def _gradients_of_whole(
    loss: Tensor, version: Version, names: Sequence[str], slope: Tensor | None, retain_graph: bool
) -> dict[str, Tensor]:
    # A recorded network depends on the vector, what is computed beside it on the views.
    apart = [version.tensors[name] for name in names] if version._tensors else []
    leaves = [version.whole, *apart]
    whole, *gradients = torch.autograd.grad(loss, leaves, slope, retain_graph=retain_graph, allow_unused=True)
    by_name = version.layout.views(torch.zeros_like(version.flat) if whole is None else whole)
    for name, gradient in zip(names, gradients, strict=False):
        by_name[name] = by_name[name] if gradient is None else by_name[name] + gradient
    return by_name
