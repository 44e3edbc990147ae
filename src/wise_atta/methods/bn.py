"""Batch statistics, and nothing else (Schneider et al., NeurIPS 2020; Nado et al., 2020)."""

from __future__ import annotations

from wise_atta.how import NoUpdate
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import imagenet_and_cifar, published


@published(imagenet_and_cifar(imagenet={}, cifar10={}))
def bn(*, preset: str | None = None) -> Method:
    """Normalise every BatchNorm layer by the batch at hand. No tensor adapts, so every `preset` is the same."""
    return Method("bn", NoUpdate())
