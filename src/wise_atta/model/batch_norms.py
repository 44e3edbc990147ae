"""BatchNorm layers of a network: how their statistics lie in one vector, and how a forward is given them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta import errors
from wise_atta.engine import moments
from wise_atta.model.run_options import RunOptions
from wise_atta.stream import size

Pairs: TypeAlias = list[tuple[Tensor, Tensor]]
Hook: TypeAlias = Callable[[int, _BatchNorm, Tensor], Tensor | None]


class BatchNorms:
    """The BatchNorm layers of one module, in its order. Their statistics are one vector: mean, variance, mean, …"""

    def __init__(self, module: nn.Module, options: RunOptions) -> None:
        self.layers = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        self.options = options
        # Layers without running statistics (None) always normalise by the batch.
        self.buffers = [(norm.running_mean, norm.running_var) for norm in self.layers]
        self._sizes = [norm.num_features for norm in self.layers for _ in range(2)]
        # They may be kept in another precision than the rest of the network.
        own = [t for norm in self.layers for t in (norm.running_mean, norm.weight) if t is not None]
        self.dtype = own[0].dtype if own else options.dtype

    def __len__(self) -> int:
        return len(self.layers)

    def zeros(self) -> Tensor:
        """A vector for statistics that a forward fills in."""
        return torch.zeros(sum(self._sizes), dtype=self.dtype, device=self.options.device)

    @property
    def have_source(self) -> bool:
        """Whether every layer keeps running statistics."""
        return all(buffer is not None for pair in self.buffers for buffer in pair)

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
        quick = moments.moments(x) if self.options.reorders else None
        return batch_moments(x) if quick is None else quick

    @contextlib.contextmanager
    def hooked(self, hook: Hook | None) -> Iterator[None]:
        """Call `hook(index, layer, input)` before every layer's forward; what it gives, if anything, is the input."""
        handles = []
        if hook is not None:
            for index, norm in enumerate(self.layers):
                handles.append(norm.register_forward_pre_hook(lambda m, args, i=index: hook(i, m, args[0])))
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
