"""Which methods are run the fast ways, and with which options do they learn at every batch of a small net?"""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "tent": {},
    "eta": {"epsilon": 0.9},
    "sar": {"adapt": "norm"},
    "roid": {"augment": lambda inputs, generator: inputs},
    "eatta": {"ratio": 0.5},
    "wise": {"ratio": 0.5, "policy": "uniform", "statistics": "batch"},
}
