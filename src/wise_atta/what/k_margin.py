"""Samples that are unsure and unlike each other: greedy k-centre, in features that count by their margin."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from wise_atta import signals
from wise_atta.view import View
from wise_atta.what.selector import Selector, check_count


@dataclass(kw_only=True, eq=False)
class KMargin(Selector):
    """Features scaled by 1 − (p₁ − p₂), greedy k-centre from the origin (HILTTA).

    A sample of which the model is sure lies at the origin, whatever its features. The first sample is the one furthest
    from there, each further one that which is furthest from the origin and all that were picked.

    Parameters
    ----------
    seed
        For ties.
    """

    balance: bool = field(default=False, init=False, repr=False)  # no option: it does not rank classes

    def pick(self, view: View, k: int = 1) -> list[int]:
        check_count(k)
        unsure = 1 - signals.margin(view.logits)
        points = (view.features.flatten(1) * unsure.unsqueeze(1)).double().cpu().numpy()
        order = self.shuffled(view)
        points = points[order]
        distance = np.linalg.norm(points, axis=1)
        picked: list[int] = []
        for _ in range(min(k, len(points))):
            best = int(np.argmax(distance))
            picked.append(int(order[best]))
            distance = np.minimum(distance, np.linalg.norm(points - points[best], axis=1))
            # Samples that coincide are as far apart as a picked one is from itself; none is picked twice.
            distance[best] = -1
        return picked
