"""Statistics that BatchNorm layers normalise with: how they lie in one vector, and one class a mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta import errors
from wise_atta.engine import moments as quick
from wise_atta.engine.precision import RunOptions
from wise_atta.stream import size

StatisticsMode: TypeAlias = Literal["batch", "source", "mixed", "ema", "renorm"]
Pairs: TypeAlias = list[tuple[Tensor, Tensor]]
SetUp: TypeAlias = contextlib.AbstractContextManager["Statistics | None"]


class BatchNorms:
    """The BatchNorm layers of one module, in its order. Their statistics are one vector: mean, variance, mean, …

    `zeros` makes a vector for statistics that a forward fills in.
    """

    def __init__(self, module: nn.Module, options: RunOptions) -> None:
        self.layers = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        self.options = options
        # Layers without running statistics (None) always normalise by the batch.
        self.buffers = [(norm.running_mean, norm.running_var) for norm in self.layers]
        self.have_source = all(buffer is not None for pair in self.buffers for buffer in pair)
        self._sizes = [norm.num_features for norm in self.layers for _ in range(2)]
        # They may be kept in another precision than the rest of the network.
        own = [t.dtype for norm in self.layers for t in (norm.running_mean, norm.weight) if t is not None]
        kind = {"dtype": own[0] if own else options.dtype, "device": options.device}
        self.zeros: Callable[[], Tensor] = functools.partial(torch.zeros, sum(self._sizes), **kind)

    def source(self, mode: str) -> Tensor:
        """The running statistics that the layers came with, which a mode of statistics needs."""
        if not self.have_source:
            raise errors.BadConfig(
                f"statistics={mode!r} needs the running statistics of the source, and some BatchNorm layers "
                "of this model keep none: use statistics='batch'"
            )
        return torch.cat([buffer.detach() for pair in self.buffers for buffer in pair if buffer is not None])

    def pairs(self, values: Tensor) -> Pairs:
        """Mean and variance of each layer, as views of a vector of statistics."""
        # `.data` gives each view a version counter of its own: a later layer's write must not look to autograd like a
        # change of what an earlier layer saved.
        parts = [part.data for part in torch.split_with_sizes(values, self._sizes)]
        return list(zip(parts[::2], parts[1::2], strict=True))

    def bind(self, pairs: Sequence[tuple[Tensor | None, ...]], training: bool) -> None:
        """Let every layer normalise with its pair; in training with its batch, whose statistics it leaves there."""
        for norm, (mean, var) in zip(self.layers, pairs, strict=True):
            # Past nn.Module's own bookkeeping, which costs as much as a kernel for each of four values a layer.
            norm.__dict__["training"], norm.__dict__["momentum"] = training, 1.0
            norm._buffers["running_mean"], norm._buffers["running_var"] = mean, var

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of a layer's input."""
        if self.options.moments is not None:
            return self.options.moments(x)
        known = quick.moments(x) if self.options.reorders else None
        return batch_moments(x) if known is None else known

    @contextlib.contextmanager
    def hooked(self, hook: Callable[[int, _BatchNorm, Tensor], Tensor | None]) -> Iterator[None]:
        """Call `hook(index, layer, input)` before every layer's forward; what it gives, if anything, is the input."""
        handles = [
            norm.register_forward_pre_hook(lambda m, args, i=index: hook(i, m, args[0]))
            for index, norm in enumerate(self.layers)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over everything but the channels, outside the graph."""
    x = x.detach()
    if x.dtype in (torch.bfloat16, torch.float16):
        if x.is_cuda:
            mean, inverse = torch.batch_norm_stats(x, 0.0)  # float32, without a copy of x in float32
            return mean, inverse.square().reciprocal()
        x = x.float()
    var, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0)
    return mean, var


@dataclass(frozen=True)
class Statistics:
    """Mean and variance of every BatchNorm layer in one vector, layer after layer.

    `batch` is the number of samples if the variances are the unbiased ones of a batch, as the BatchNorm kernel
    leaves them; None if they are to be used as they are. `before` is the moving average that they follow, if any.
    `moments` are those of the batch itself where it was normalised by a moving average that has yet to follow it.
    """

    values: Tensor
    batch: int | None = None
    before: Tensor | None = None
    moments: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values.detach().cpu().clone(), "batch": self.batch}


class Mode:
    """What BatchNorm layers normalise with. Moving statistics, if any, are kept by who uses the mode.

    Attributes
    ----------
    needs_batch
        Whether one sample alone cannot be normalised.
    moves
        Whether statistics move with the batches.
    """

    needs_batch: ClassVar[bool] = False
    moves: ClassVar[bool] = False

    def start(self, norms: BatchNorms) -> Tensor | None:
        """The moving statistics before the first batch."""
        return None

    def set_up(self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool) -> SetUp:
        """Set up the layers for a forward of `count` samples; gives the statistics that it fills in or uses.

        Without `keep` it may give none.
        """
        raise NotImplementedError

    def commit(self, running: Tensor | None, used: Statistics) -> Tensor | None:
        """The moving statistics after those of a batch."""
        return running

    def export(self, module: nn.Module, layers: Sequence[_BatchNorm], running: Pairs | None) -> None:
        """Let an exported module normalise by itself. Its layers, at least one, hold the source's statistics."""


class BatchMode(Mode):
    """Those of the batch at hand."""

    needs_batch = True

    @contextlib.contextmanager
    def set_up(self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool) -> Iterator[Statistics | None]:
        if not keep:
            norms.bind([(None, None)] * len(norms.layers), training=True)
            yield None
            return
        # In training mode with momentum 1 the kernel writes the statistics it uses into the running buffers, at no
        # cost. The buffers are scratch; the user's are not bound.
        scratch = norms.zeros()
        pairs = norms.pairs(scratch)
        if not norms.options.compile:
            norms.bind(pairs, training=True)
            yield Statistics(scratch, batch=count)
            return
        # A compiled layer may not write into memory that it shares with others, nor a later forward into what the
        # graph of an earlier one keeps. A product copies all of them in one kernel.
        apart = torch._foreach_mul([part for pair in pairs for part in pair], 1.0)
        norms.bind(list(zip(apart[::2], apart[1::2], strict=True)), training=True)
        yield Statistics(scratch, batch=count)
        torch.cat(apart, out=scratch)

    def export(self, module: nn.Module, layers: Sequence[_BatchNorm], running: Pairs | None) -> None:
        for norm in layers:
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None


@dataclass(frozen=True)
class MixedMode(Mode):
    """The source's, counted as `prior` samples, beside the batch's."""

    prior: int = 256

    def set_up(self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool) -> SetUp:
        return _blended(norms, norms.source("mixed"), count / (count + self.prior))

    def export(self, module: nn.Module, layers: Sequence[_BatchNorm], running: Pairs | None) -> None:
        samples = Samples()
        module.register_forward_pre_hook(samples, with_kwargs=True)
        for norm in layers:
            assert norm.running_mean is not None and norm.running_var is not None
            norm.register_forward_pre_hook(Mixture(norm.running_mean, norm.running_var, self.prior, samples))


@dataclass(frozen=True)
class EmaMode(Mode):
    """A moving average that starts at the source and is `weight` of the batch at hand already when that is used."""

    moves = True
    weight: float = 0.1

    def start(self, norms: BatchNorms) -> Tensor | None:
        return norms.source("ema") if norms.layers else None

    def set_up(self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool) -> SetUp:
        assert running is not None
        return _blended(norms, running, self.weight)

    def commit(self, running: Tensor | None, used: Statistics) -> Tensor | None:
        if running is None or used.before is None:
            return running
        if used.before is running:
            return used.values
        # Another batch was learned since this one's forward: its moments move the average from where it is now.
        moments = used.before + (used.values - used.before) / self.weight
        return torch.lerp(running, moments, self.weight)

    def export(self, module: nn.Module, layers: Sequence[_BatchNorm], running: Pairs | None) -> None:
        assert running is not None
        for norm, (mean, var) in zip(layers, running, strict=True):
            norm.running_mean, norm.running_var = mean.clone(), var.clone()


@dataclass(frozen=True)
class RenormMode(EmaMode):
    """Batch renormalisation: a moving average that starts at the first batch, used before it follows the batch.

    x̂ = (x − μ_B)/σ_B·r + d with r = σ_B/σ and d = (μ_B − μ)/σ. μ and σ are the moving statistics, r and d constants:
    the value is that of μ and σ, the gradient goes through the batch.
    """

    needs_batch = True

    def start(self, norms: BatchNorms) -> Tensor | None:
        return None

    @contextlib.contextmanager
    def set_up(self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool) -> Iterator[Statistics]:
        if running is not None:
            moments = running.clone()
        else:  # layers that a forward leaves out keep what they had
            moments = norms.source("renorm") if norms.have_source else norms.zeros()
        norms.bind(norms.pairs(norms.zeros() if running is None else running), training=running is None)
        own = norms.pairs(moments)

        def renormalise(index: int, norm: _BatchNorm, x: Tensor) -> Tensor | None:
            # An input of the same value whose gradient goes through μ_B and σ_B. The first batch has no running
            # statistics, and needs none.
            var, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0, keepdim=True)
            own[index][0].copy_(mean.detach().flatten())
            own[index][1].copy_(var.detach().flatten())
            if running is None:
                return None
            sigma = (var + norm.eps).sqrt()
            return (x - mean) / sigma * sigma.detach() + mean.detach()

        with norms.hooked(renormalise):
            yield Statistics(moments if running is None else running, moments=moments)

    def commit(self, running: Tensor | None, used: Statistics) -> Tensor | None:
        if running is None or used.moments is None:
            return used.moments if running is None else running
        return running.lerp(used.moments, self.weight)

    def export(self, module: nn.Module, layers: Sequence[_BatchNorm], running: Pairs | None) -> None:
        if running is None:
            BatchMode().export(module, layers, None)
        else:
            super().export(module, layers, running)


@dataclass(frozen=True)
class FixedMode(Mode):
    """The statistics that the layers came with, or those of another forward: of a late sample's own batch, say."""

    statistics: Statistics | None = None

    @contextlib.contextmanager
    def set_up(self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool) -> Iterator[Statistics | None]:
        used = self.statistics
        if used is None:
            norms.bind(norms.buffers, training=False)
            yield None
            return
        pairs = norms.pairs(used.values.clone() if used.values.is_inference() else used.values)
        norms.bind(pairs, training=False)
        times = 0 if used.batch is None else used.batch / count

        def rebias(index: int, norm: _BatchNorm, x: Tensor) -> None:
            # Late samples are normalised as in the batch that asked: the kernel left unbiased variances there. A layer
            # may see more rows than samples.
            rows = times * (x.numel() // x.shape[1])
            norm._buffers["running_var"] = pairs[index][1] * ((rows - 1) / rows)

        with norms.hooked(rebias) if times else contextlib.nullcontext():
            yield used


def make_mode(name: str, prior: int, ema_weight: float) -> Mode:
    """A mode of statistics by its name."""
    if name not in get_args(StatisticsMode):
        raise errors.unknown("statistics", name, get_args(StatisticsMode))
    if prior < 0 or not 0 < ema_weight <= 1:
        raise errors.BadConfig(f"prior must be ≥ 0 and ema_weight in (0, 1], not {prior} and {ema_weight}")
    moving = {"mixed": MixedMode(prior), "ema": EmaMode(ema_weight), "renorm": RenormMode(ema_weight)}
    return {"batch": BatchMode(), "source": FixedMode(), **moving}[name]


@contextlib.contextmanager
def _blended(norms: BatchNorms, before: Tensor, weight: float) -> Iterator[Statistics]:
    """Normalise by (1 − w)·before + w·batch, layer by layer. Gradients take the statistics as constants."""
    used = before.clone()
    old, new = norms.pairs(before), norms.pairs(used)

    def blend(index: int, norm: _BatchNorm, x: Tensor) -> None:
        names = ("running_mean", "running_var")
        for name, ours, own, place in zip(names, old[index], norms.moments(x), new[index], strict=True):
            # Tensors of their own: a layer that is called again must not write over what its first call saved.
            norm._buffers[name] = value = torch.lerp(ours, own.to(ours), weight)
            place.copy_(value)

    norms.bind(new, training=False)
    with norms.hooked(blend):
        yield Statistics(used, before=before)


# -- hooks of exported modules, which can be pickled -----------------------------------------------------------------


class Samples:
    """Notes how many samples an exported module is called with: a layer inside may see more rows than that."""

    count = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.count = size([*args, *kwargs.values()])


class Mixture:
    """Normalise a layer by the source's statistics and those of the batch, as ``statistics="mixed"`` does."""

    def __init__(self, mean: Tensor, var: Tensor, prior: int, samples: Samples) -> None:
        self.mean, self.var, self.prior, self.samples = mean.clone(), var.clone(), prior, samples

    def __call__(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        mean, var = batch_moments(args[0])
        weight = self.samples.count / (self.samples.count + self.prior)
        assert isinstance(norm.running_mean, Tensor)
        kind = norm.running_mean  # device and precision are the module's, wherever it was moved
        norm.running_mean = torch.lerp(self.mean.to(kind), mean.to(kind), weight)
        norm.running_var = torch.lerp(self.var.to(kind), var.to(kind), weight)
