"""The labels of one batch: those of its own samples, read off its forward, and late ones, each with its own input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from wise_atta.how import Labels, Late
from wise_atta.model import Forward, Statistics
from wise_atta.stream import tree_map
from wise_atta.who import Asked, Questions, as_batch


def context(forward: Forward, questions: Questions) -> dict[str, Any] | None:
    """What a sample of this batch is normalised with if its label comes late."""
    used = forward.statistics if questions.context == "own" else None
    return None if used is None else {"values": used.values, "batch": used.batch}


def labels(todo: Sequence[Asked], forward: Forward, number: int, now: int, questions: Questions) -> Labels:
    """What is to be learned with batch `number` at batch `now`."""
    if not todo:
        return Labels()
    prompt = [item for item in todo if item.query.batch == number]
    late = [item for item in todo if item.query.batch != number]
    return Labels(
        rows=[item.query.index for item in prompt],
        labels=[item.label for item in prompt],
        weights=[item.answer.weight for item in prompt],
        places=[(item.query.batch, item.query.index) for item in (*prompt, *late)],
        late=[_late(item, forward, now, questions) for item in late],
    )


def _late(item: Asked, forward: Forward, now: int, questions: Questions) -> Late:
    device = forward.logits.device
    inputs = tree_map(lambda leaf: leaf.to(device), as_batch(item.query))
    statistics: Statistics | Literal["source"] | None = forward.statistics
    if questions.context == "source":
        statistics = "source"
    elif questions.context == "own" and item.context is not None:
        statistics = Statistics(item.context["values"].to(device), item.context["batch"])
    return Late(inputs, item.label, questions.weight_of(item, now), statistics)
