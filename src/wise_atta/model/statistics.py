"""Statistics that BatchNorm layers normalise with: how they lie in one vector, and one class a mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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


def kernel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same in about the time that BatchNorm's own kernel takes for them: a quarter or less on a CPU."""
    known = quick.moments(x)
    if known is not None or x.device.type != "cpu":
        return batch_moments(x) if known is None else known
    x = x.detach()
    # Buffers in float32 beside inputs in less, so that what comes back is in float32, too. They are not read.
    buffers = torch.zeros(2, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    mean, var = torch.batch_norm_update_stats(x, buffers[0], buffers[1], 1.0)
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

    needs_batch: bool = False
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
class ShareMode(Mode):
    """The source's at a share, whatever the size of the batch; gradients flow through the batch's part.

    They are those of a sample of which `mixture` comes from the source, and the share α = 1 − mixture from the batch:
    μ = α·μ_B + (1 − α)·μ₀ and σ² = α·σ_B² + (1 − α)·σ₀² + α(1 − α)·(μ_B − μ₀)². `add` sums a tensor over all processes
    that share a batch.
    """

    mixture: float
    add: Callable[[Tensor], Tensor] | None = None
    needs_batch: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_batch", self.mixture == 0)

    @contextlib.contextmanager
    def set_up(self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool) -> Iterator[Statistics]:
        source = norms.source("mixed")
        used = source.clone()
        old, new = norms.pairs(source), norms.pairs(used)
        moments = norms.options.moments or kernel_moments

        def mix(index: int, norm: _BatchNorm, x: Tensor) -> Tensor | None:
            pair, x = share(x, old[index], moments(x), 1 - self.mixture, norm.eps, self.add)
            norm._buffers["running_mean"], norm._buffers["running_var"] = pair
            for place, value in zip(new[index], pair, strict=True):
                place.copy_(value)
            return x

        norms.bind(new, training=False)
        with norms.hooked(mix):
            yield Statistics(used)

    def export(self, module: nn.Module, layers: Sequence[_BatchNorm], running: Pairs | None) -> None:
        for norm in layers:
            assert norm.running_mean is not None and norm.running_var is not None
            norm.register_forward_pre_hook(Share(norm.running_mean, norm.running_var, self.mixture))


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


def make_mode(name: str, prior: int, ema_weight: float, mixture: float | None = None) -> Mode:
    """A mode of statistics by its name; with a `mixture` the source counts as that share, not as `prior` samples."""
    if name not in get_args(StatisticsMode):
        raise errors.unknown("statistics", name, get_args(StatisticsMode))
    if mixture is not None:
        if name != "mixed":
            raise errors.BadConfig(f"mixture counts under statistics='mixed', not {name!r}: give statistics='mixed'")
        if not 0 <= mixture <= 1:
            raise errors.BadConfig(f"mixture is the source's share, from 0 to 1, not {mixture}")
        return ShareMode(mixture)
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


class _Through(torch.autograd.Function):
    """The input of a layer as it is, with the gradient that flows through the share's statistics, too.

    The layer takes mean m and variance v as constants, so what comes back is G = ∂L/∂x for fixed ones. Over N rows,
    with ∂L/∂m = −Σ G and ∂L/∂v = −Σ G·(x − m) / 2(v + ε):
    ∂L/∂x = G + α/N·∂L/∂m + 2α/N·∂L/∂v·(x − μ_B + (1 − α)(μ_B − μ₀)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        apart: Tensor,
        width: Tensor,
        weight: float,
        add: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, apart, width)
        ctx.weight, ctx.add = weight, add
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, apart, width = ctx.saved_tensors
        direct, ones = grads[0], torch.ones_like(mean)
        # One pass for both sums: the kernel's gradients of a layer's weight, Σ G·(x − μ_B), and of its bias, Σ G.
        _, products, total = torch.ops.aten.native_batch_norm_backward(
            direct, x, ones, None, None, mean, ones, True, 0.0, [False, True, True]
        )
        rows = torch.full_like(total, x.numel() // x.shape[1])
        if ctx.add is not None:
            products, total, rows = ctx.add(torch.stack([products, total, rows]))
        distance = (1 - ctx.weight) * apart  # m = μ_B − (1 − α)(μ_B − μ₀)
        slope = (products + distance * total) / width * (-ctx.weight / rows)  # α/N·2·∂L/∂v
        shift = slope * distance - total * (ctx.weight / rows)
        per_channel = 1, -1, *[1] * (x.dim() - 2)
        start = (shift - mean * slope).view(per_channel)
        through = torch.addcmul(start, x.to(slope), slope.view(per_channel))
        return through.add_(direct).to(x.dtype), None, None, None, None, None


def share(
    x: Tensor,
    source: tuple[Tensor, Tensor],
    batch: tuple[Tensor, Tensor],
    weight: float,
    eps: float,
    add: Callable[[Tensor], Tensor] | None = None,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Mean and variance of which the batch has the share `weight`, and the input that carries their gradient."""
    kind = source[0]
    own, apart = batch[0], batch[0] - source[0]
    mean = torch.lerp(source[0], own.to(kind), weight)
    var = torch.lerp(source[1], batch[1].to(kind), weight).addcmul_(*[apart.to(kind)] * 2, value=weight * (1 - weight))
    if torch.is_grad_enabled() and x.requires_grad:
        x = _Through.apply(x, own, apart, (var + eps).to(own), weight, add)
    return (mean, var), x


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


class Share:
    """Normalise a layer by the source's statistics at a share and those of the batch, as a `mixture` does."""

    def __init__(self, mean: Tensor, var: Tensor, mixture: float) -> None:
        self.mean, self.var, self.mixture = mean.clone(), var.clone(), mixture

    def __call__(self, norm: _BatchNorm, args: tuple[Any, ...]) -> tuple[Any, ...]:
        assert norm.running_mean is not None
        source = self.mean.to(norm.running_mean), self.var.to(norm.running_mean)
        pair, x = share(args[0], source, kernel_moments(args[0]), 1 - self.mixture, norm.eps)
        norm.running_mean, norm.running_var = pair
        return x, *args[1:]
