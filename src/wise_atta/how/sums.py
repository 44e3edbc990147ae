"""The losses of one batch and their gradients: L_ent, L_sup, and any weighted sum of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wise_atta.how.labels import Labels
from wise_atta.how.objective import Objective
from wise_atta.model import Forward, Gradients, Weights


@dataclass(eq=False)
class Loss:
    """One loss of a batch.

    Parameters
    ----------
    graph
        A number that gradients can be taken of.
    """

    graph: Tensor

    @property
    def value(self) -> Tensor:
        """The number alone, for the record."""
        return self.graph.detach()


@dataclass(eq=False)
class Sums:
    """The losses of one forward, differentiated by autograd.

    An engine may give its own, which come to the same sooner.

    Parameters
    ----------
    model, objective
        Whose losses.
    forward, labels
        A batch, and what is known of its classes.
    """

    model: Weights
    objective: Objective
    forward: Forward
    labels: Labels
    _features: Tensor | None = None

    def unlabelled(self) -> Loss | None:
        """The objective (L_ent); None if nothing in the batch is worth a step."""
        graph = self.objective(self.model, self.forward, self.labels)
        return None if graph is None else Loss(graph)

    def supervised(self) -> Loss | None:
        """L_sup over the labels, late ones included; None without any."""
        if not self.labels:
            return None
        logits, self._features = self.labels.outputs(self.model, self.forward)
        return Loss(self.labels.loss(logits))

    def gradients(self, group: str, *weighted: tuple[float, Loss | None]) -> Gradients:
        """∂(Σ weight·loss)/∂θ for the tensors of a group; nothing where there is no loss."""
        total: Tensor | None = None
        for weight, loss in weighted:
            if loss is not None:
                term = loss.graph if weight == 1 else weight * loss.graph
                total = term if total is None else total + term
        return {} if total is None else self.model.gradients(total, self.forward.version, [group])

    def of_head(self, group: str, weight: float = 1.0) -> Gradients:
        """∂(weight·L_sup)/∂θ for a group of the head's tensors, from the features of the same forward."""
        assert self._features is not None, "supervised() came first"
        with torch.enable_grad():
            loss = weight * self.labels.loss(self.model.head(self._features.detach()))
        return self.model.gradients(loss, self.model.live, [group], head=True)
