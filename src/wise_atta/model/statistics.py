"""Statistics that BatchNorm layers normalise with: one class a mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta import errors
from wise_atta.model.batch_norms import BatchNorms, Hook, Mixture, Pairs, Samples

StatisticsMode: TypeAlias = Literal["batch", "source", "mixed", "ema", "renorm"]
Moments: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]


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
    """

    needs_batch: ClassVar[bool] = False

    def start(self, norms: BatchNorms) -> Tensor | None:
        """The moving statistics before the first batch."""
        return None

    def set_up(
        self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool
    ) -> contextlib.AbstractContextManager[Statistics | None]:
        """Set up the layers for a forward of `count` samples; gives the statistics that it fills in or uses.

        Without `keep` it may give none.
        """
        raise NotImplementedError

    def commit(self, running: Tensor | None, used: Statistics) -> Tensor | None:
        """The moving statistics after those of a batch."""
        return running

    def export(self, module: nn.Module, layers: Sequence[_BatchNorm], running: Pairs | None) -> None:
        """Let an exported module normalise by itself. Its layers, at least one, hold the source's statistics."""


class SourceMode(Mode):
    """The statistics that the layers came with."""

    @contextlib.contextmanager
    def set_up(self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool) -> Iterator[Statistics | None]:
        norms.bind(norms.buffers, training=False)
        yield None


class BatchMode(Mode):
    """Those of the batch at hand."""

    needs_batch = True

    @contextlib.contextmanager
    def set_up(self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool) -> Iterator[Statistics | None]:
        if not keep:
            norms.bind([(None, None)] * len(norms), training=True)
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
    """The source's, counted as `prior` samples, beside the batch's. `moments` of a batch may be taken otherwise."""

    prior: int = 256
    moments: Moments | None = None

    def set_up(
        self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool
    ) -> contextlib.AbstractContextManager[Statistics]:
        return _blended(norms, norms.source("mixed"), count / (count + self.prior), self.moments)

    def export(self, module: nn.Module, layers: Sequence[_BatchNorm], running: Pairs | None) -> None:
        samples = Samples()
        module.register_forward_pre_hook(samples, with_kwargs=True)
        for norm in layers:
            assert norm.running_mean is not None and norm.running_var is not None
            norm.register_forward_pre_hook(Mixture(norm.running_mean, norm.running_var, self.prior, samples))


@dataclass(frozen=True)
class EmaMode(Mode):
    """A moving average that starts at the source and is `weight` of the batch at hand already when that is used."""

    weight: float = 0.1
    moments: Moments | None = None

    def start(self, norms: BatchNorms) -> Tensor | None:
        return norms.source("ema") if norms else None

    def set_up(
        self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool
    ) -> contextlib.AbstractContextManager[Statistics]:
        assert running is not None
        return _blended(norms, running, self.weight, self.moments)

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
        with norms.hooked(_renormalise(running is not None, norms.pairs(moments))):
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
    """The statistics of another forward: those of a late sample's own batch, say."""

    statistics: Statistics

    @contextlib.contextmanager
    def set_up(self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool) -> Iterator[Statistics]:
        values, batch = self.statistics.values, self.statistics.batch
        pairs = norms.pairs(values.clone() if values.is_inference() else values)
        norms.bind(pairs, training=False)
        # Late samples are normalised as in the batch that asked: the kernel left unbiased variances there.
        rebias = None if batch is None else _rebias(batch / count, [var for _, var in pairs])
        with norms.hooked(rebias):
            yield self.statistics


def make_mode(name: str, *, prior: int = 256, ema_weight: float = 0.1) -> Mode:
    """A mode of statistics by its name."""
    if name not in get_args(StatisticsMode):
        raise errors.unknown("statistics", name, get_args(StatisticsMode))
    if prior < 0 or not 0 < ema_weight <= 1:
        raise errors.BadConfig(f"prior must be ≥ 0 and ema_weight in (0, 1], not {prior} and {ema_weight}")
    modes: dict[str, Mode] = {
        "batch": BatchMode(),
        "source": SourceMode(),
        "mixed": MixedMode(prior),
        "ema": EmaMode(ema_weight),
        "renorm": RenormMode(ema_weight),
    }
    return modes[name]


# -- BatchNorm hooks ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _blended(norms: BatchNorms, before: Tensor, weight: float, moments: Moments | None) -> Iterator[Statistics]:
    """Normalise by (1 − w)·before + w·batch, layer by layer. Gradients take the statistics as constants."""
    moments = norms.moments if moments is None else moments
    used = before.clone()
    old, new = norms.pairs(before), norms.pairs(used)

    def blend(index: int, norm: _BatchNorm, x: Tensor) -> None:
        names = ("running_mean", "running_var")
        for name, ours, own, place in zip(names, old[index], moments(x), new[index], strict=True):
            # Tensors of their own: a layer that is called again must not write over what its first call saved.
            norm._buffers[name] = value = torch.lerp(ours, own.to(ours), weight)
            place.copy_(value)

    norms.bind(new, training=False)
    with norms.hooked(blend):
        yield Statistics(used, before=before)


def _renormalise(running: bool, moments: Pairs) -> Hook:
    """Batch renormalisation of a layer that normalises with μ and σ, whatever it does afterwards.

    It is given an input of the same value whose gradient goes through μ_B and σ_B. The first batch has no running
    statistics, and nothing to do. The batch's own moments are written down.
    """

    def renormalise(index: int, norm: _BatchNorm, x: Tensor) -> Tensor | None:
        var, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0, keepdim=True)
        moments[index][0].copy_(mean.detach().flatten())
        moments[index][1].copy_(var.detach().flatten())
        if not running:
            return None
        sigma = (var + norm.eps).sqrt()
        return (x - mean) / sigma * sigma.detach() + mean.detach()

    return renormalise


def _rebias(times: float, unbiased: Sequence[Tensor]) -> Hook:
    """Turn the unbiased variances of a batch into the biased ones that it was normalised with.

    `times` is how many times more samples it had than the inputs at hand: a layer may see more rows than samples.
    """

    def rebias(index: int, norm: _BatchNorm, x: Tensor) -> None:
        count = times * (x.numel() // x.shape[1])
        norm._buffers["running_var"] = unbiased[index] * ((count - 1) / count)

    return rebias
