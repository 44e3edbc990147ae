"""Source: the model as trained, its own running statistics. Nothing adapts; what every method has to beat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from wise_atta.reference.toy import toy


@torch.no_grad()
def run(model: nn.Module, stream: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields the logits of each batch.

    >>> made = toy()
    >>> made.error(run(made.model, made.stream))
    ''
    """
    model.eval()
    for x in stream:
        yield model(x)


if __name__ == "__main__":
    made = toy()
    print("source:", made.error(run(made.model, made.stream)))
