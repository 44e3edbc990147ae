"""Batch statistics, and nothing else."""

from __future__ import annotations

from wise_atta.how import NoUpdate
from wise_atta.methods.method import Method


def bn() -> Method:
    """Normalise every BatchNorm layer by the batch at hand. No tensor adapts."""
    return Method("bn", NoUpdate())
