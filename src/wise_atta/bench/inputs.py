"""Weights and pictures that a run rests on, compared with those that a card or a checkpoint tells of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HASHES = {
    ("model", "weights_hash"): "weights",
    ("stream", "fingerprint"): "pictures",
    ("stream", "pixels"): "pixels",
    ("teacher", "weights_hash"): "teacher's weights",
    ("source_data", "fingerprint"): "source pictures",
    ("source_data", "pixels"): "source pixels",
}


def other_inputs(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is other now than it was then, in words; of what either does not tell, nothing is said."""
    others = []
    for (part, key), name in _HASHES.items():
        a, b = then.get(part, {}).get(key), now.get(part, {}).get(key)
        if a is not None and b is not None and a != b:
            others.append(f"the {name} here are others ({b[:12]}, not {a[:12]})")
    a, b = then["stream"].get("frost"), now["stream"].get("frost")
    if a is not None and a != b:
        others.append(
            f"the textures of frost here are others ({b}, not {a}): the package imagecorruptions brings photographs, "
            "without it they are procedural"
        )
    return others
