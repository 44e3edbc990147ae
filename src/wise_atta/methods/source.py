"""The model as trained, with its own running statistics."""

from __future__ import annotations

from wise_atta.how import NoUpdate
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import imagenet_and_cifar, published


@published(imagenet_and_cifar(imagenet={}, cifar10={}))
def source(*, preset: str | None = None) -> Method:
    """Predict only. What every method must beat. It has no constants, so every `preset` is the same."""
    return Method("source", NoUpdate(), statistics="source")
