"""Tent: one step a batch on the mean entropy of its predictions (Wang et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from wise_atta.reference.common import Optimizers, descend, entropy, norm_tensors, use_batch_statistics
from wise_atta.reference.toy import toy

# The public configuration for ImageNet-C. For CIFAR-10-C it is Adam at 1e-3.
SGD = partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9, nesterov=True)


def run(model: nn.Module, stream: Iterable[Tensor], *, optimizer: Optimizers = SGD) -> Iterator[Tensor]:
    """Yields the logits of each batch, then minimises (1/n) Σᵢ H(pᵢ) over the normalisation tensors."""
    use_batch_statistics(model)
    steps = optimizer(norm_tensors(model))
    for x in stream:
        logits = model(x)
        yield logits.detach()
        descend(steps, entropy(logits).mean())


def example() -> str:
    """On the toy stream.

    >>> example()
    '13 % wrong, 0 labels'
    """
    made = toy()
    return made.error(run(made.model, made.stream, optimizer=partial(SGD, lr=0.01)))


if __name__ == "__main__":
    print(example())
