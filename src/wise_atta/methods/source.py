"""The model as trained, with its own running statistics."""

from __future__ import annotations

from wise_atta.how import NoUpdate
from wise_atta.methods.method import Method


def source() -> Method:
    """Predict only. What every method must beat."""
    return Method("source", NoUpdate(), statistics="source")
