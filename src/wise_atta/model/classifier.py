"""Classifier: one set of weights on a network of its own, which is what most people need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from wise_atta.model.network import Network
from wise_atta.model.selection import Spec
from wise_atta.model.statistics import StatisticsMode
from wise_atta.model.weights import Weights


class Classifier(Weights):
    """Any `nn.Module` seen as features and a head, with few tensors that adapt and all others shared.

    Parameters
    ----------
    model
        A classifier: inputs → logits [n, C], or an object with `.logits`. It is never changed and never run.
    adapt, statistics, prior, ema_weight
        Which tensors adapt, and what BatchNorm layers normalise with: as for `Weights`.
    options
        How the model is seen and run: `head`, `classes`, `mean`, `std`, `precision`, `channels_last`, `compile`,
        `graphs`, `checkpointing`, as for `Network`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        adapt: Spec | Mapping[str, Spec] = "norm",
        statistics: StatisticsMode = "batch",
        prior: int = 256,
        ema_weight: float = 0.1,
        **options: Any,
    ) -> None:
        network = Network(model, **options)
        super().__init__(network, adapt=adapt, statistics=statistics, prior=prior, ema_weight=ema_weight)
