"""Statistics of BatchNorm layers, and the hooks that set them layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta.stream import size

StatisticsMode: TypeAlias = Literal["batch", "source", "mixed", "ema", "renorm"]


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


class Blend:
    """Normalise by (1 − w)·before + w·batch, layer by layer. Gradients take the statistics as constants."""

    def __init__(
        self,
        before: list[tuple[Tensor, Tensor]],
        weight: float,
        moments: Callable[[Tensor], tuple[Tensor, Tensor]],
        used: list[tuple[Tensor, Tensor]],
    ) -> None:
        self.before = before
        self.weight = weight
        self.moments = moments
        self.used = used

    def __call__(self, index: int, norm: _BatchNorm, x: Tensor) -> None:
        for name, before, own, used in zip(
            ("running_mean", "running_var"), self.before[index], self.moments(x), self.used[index], strict=True
        ):
            # Tensors of their own: a layer that is called again must not write over what its first call saved.
            norm._buffers[name] = blend = torch.lerp(before, own.to(before), self.weight)
            used.copy_(blend)


class Renorm:
    """Batch renormalisation, layer by layer: x̂ = (x − μ_B)/σ_B·r + d with r = σ_B/σ and d = (μ_B − μ)/σ.

    μ and σ are the running statistics, r and d constants: the value is that of μ and σ, the gradient goes through the
    batch. The layer itself normalises with μ and σ, whatever it does afterwards, so it is given an input of the same
    value whose gradient goes through μ_B and σ_B. The first batch has no running statistics, and nothing to do.
    """

    def __init__(self, running: bool, moments: list[tuple[Tensor, Tensor]]) -> None:
        self.running = running
        self.moments = moments

    def __call__(self, index: int, norm: _BatchNorm, x: Tensor) -> Tensor | None:
        var, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0, keepdim=True)
        self.moments[index][0].copy_(mean.detach().flatten())
        self.moments[index][1].copy_(var.detach().flatten())
        if not self.running:
            return None
        sigma = (var + norm.eps).sqrt()
        return (x - mean) / sigma * sigma.detach() + mean.detach()


class Rebias:
    """Turn the unbiased variances of a batch into the biased ones that it was normalised with.

    `times` is how many times more samples it had than the inputs at hand: a layer may see more rows than samples.
    """

    def __init__(self, times: float, unbiased: Sequence[Tensor]) -> None:
        self.times = times
        self.unbiased = unbiased

    def __call__(self, index: int, norm: _BatchNorm, x: Tensor) -> None:
        count = self.times * (x.numel() // x.shape[1])
        norm._buffers["running_var"] = self.unbiased[index] * ((count - 1) / count)


class Samples:
    """Notes how many samples an exported module is called with: a layer inside may see more rows than that."""

    count = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.count = size([*args, *kwargs.values()])


class Mixture:
    """The same mixture as `Blend` for an exported module: a hook that can be pickled."""

    def __init__(self, mean: Tensor, var: Tensor, prior: int, samples: Samples) -> None:
        self.mean, self.var, self.prior, self.samples = mean.clone(), var.clone(), prior, samples

    def __call__(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        mean, var = batch_moments(args[0])
        weight = self.samples.count / (self.samples.count + self.prior)
        assert isinstance(norm.running_mean, Tensor)
        kind = norm.running_mean  # device and precision are the module's, wherever it was moved
        norm.running_mean = torch.lerp(self.mean.to(kind), mean.to(kind), weight)
        norm.running_var = torch.lerp(self.var.to(kind), var.to(kind), weight)


@contextlib.contextmanager
def hooked(norms: Sequence[nn.Module], before: Callable[[int, Any, Tensor], Tensor | None] | None) -> Iterator[None]:
    """Run `before(index, layer, input)` before every layer's forward; what it gives, if anything, is the new input."""
    handles = []
    if before is not None:
        for index, norm in enumerate(norms):
            handles.append(norm.register_forward_pre_hook(lambda m, args, i=index: before(i, m, args[0])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
