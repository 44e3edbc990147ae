"""How do gradients become a new version? `torch.optim` over private values, published when the step is done."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wise_atta import errors, signals
from wise_atta.model import Classifier, Gradients, Version, wide

Kind: TypeAlias = Literal["sgd", "adam"]


class Optimizer:
    """One optimizer for all adapted tensors of a classifier; each group of them is a single flat parameter.

    Values of half precision are kept in float32 here and rounded when they are published: a step of 1e-4 on a weight
    of 1 would vanish in bfloat16, every time.

    Parameters
    ----------
    kind
        ``"sgd"`` or ``"adam"``.
    lr, momentum, nesterov, weight_decay
        As in `torch.optim`; momentum and nesterov are SGD's.
    share
        Another optimizer of the same classifier. Both move the same values, each with momenta of its own.
    """

    def __init__(
        self,
        model: Classifier,
        *,
        kind: Kind = "sgd",
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        share: Optimizer | None = None,
    ) -> None:
        check_rate(lr)
        if not 0 <= momentum < 1 or not weight_decay >= 0:
            raise errors.BadConfig(
                f"momentum must be in [0, 1) and weight_decay at least 0, not {momentum}, {weight_decay}"
            )
        self.model = model
        self.lr = lr
        self._shares = share is not None
        self._flat: Tensor = wide(model.source_flat()) if share is None else share._flat
        self._source: Tensor | None = None
        # The values that were last published, where the network's own are rounded.
        self._published: Tensor | None = None if share is None else share._published
        if share is None and self._flat.dtype != model.live.flat.dtype:
            self._published = self._flat.clone()
        layout = model.layout
        self._parts = {group: nn.Parameter(self._flat[where]) for group, where in layout.slices.items()}
        self._gradient = torch.zeros_like(self._flat)
        self._gradient_views = layout.views(self._gradient)
        # A method that adapts nothing has an optimizer all the same, over no numbers.
        groups = [{"params": [part], "lr": lr} for part in self._parts.values() or [nn.Parameter(self._flat)]]
        self._torch: torch.optim.Optimizer
        if kind == "sgd":
            self._torch = torch.optim.SGD(
                groups, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0, weight_decay=weight_decay
            )
        elif kind == "adam":
            self._torch = torch.optim.Adam(groups, lr=lr, weight_decay=weight_decay)
        else:
            raise errors.unknown("optimizer", kind, ("sgd", "adam"))
        self._fresh = self._torch.state_dict()

    def step(self, gradients: Gradients, lr: float | None = None, *, publish: bool = True) -> None:
        """Take one step on the named groups and publish the result. Groups that are not named stay as they are.

        A gradient with NaN or Inf is taken as zero: one bad batch must not destroy the adapted tensors. With
        `publish=False` the step is seen by nobody until another, `move` or `publish` has completed it.
        """
        for settings in self._torch.param_groups:
            settings["lr"] = self.lr if lr is None else lr
        try:
            with torch.no_grad():
                self._take(gradients)
                self._torch.step()
        finally:
            # Also where it fails: a gradient that is left behind would move its group in the next step of others.
            self._torch.zero_grad(set_to_none=True)
        if publish:
            self.publish()

    def _take(self, gradients: Gradients) -> None:
        layout = self.model.layout
        for group, grads in gradients.items():
            if isinstance(grads, Tensor):
                part = grads.to(self._flat.dtype)
            elif grads:
                torch._foreach_copy_([self._gradient_views[name] for name in layout.groups[group]], list(grads))
                part = self._gradient[layout.slices[group]]
            else:
                continue
            self._parts[group].grad = torch.where(signals.all_finite(part), part, 0.0)

    @property
    def flat(self) -> Tensor:
        """The current values. Write to them only through `move`."""
        return self._flat

    @property
    def rounded(self) -> Tensor:
        """The current values as the network takes them; the very same tensor where nothing is to be rounded."""
        return self._flat.to(self.model.live.flat.dtype)

    @property
    def unseen(self) -> Version:
        """The current values, published or not, to run a forward with: its graph must be used before the next step."""
        return Version(self.rounded, self.model.layout)

    def move(self, flat: Tensor, *, publish: bool = True) -> None:
        """Put the adapted tensors somewhere else (a restore, an average) and publish; momenta stay."""
        with torch.no_grad():
            self._flat.copy_(flat)
        if publish:
            self.publish()

    def pull(self, share: float) -> None:
        """Take the values so much of the way back to the source, θ ← (1 − share)·θ + share·θ₀, and publish them."""
        if share:
            if self._source is None:
                self._source = self.model.source_flat().to(self._flat)
            self.move(self._flat.lerp(self._source, share))

    def publish(self) -> None:
        """Let everybody see the current values."""
        self.model.publish(self._flat.to(self.model.live.flat.dtype, copy=True))
        if self._published is not None:
            self._published.copy_(self._flat)

    def retract(self) -> None:
        """Take back steps that were not published; momenta stay. Makes nothing new: memory may have run out."""
        with torch.no_grad():
            self._flat.copy_(self.model.live.flat if self._published is None else self._published)

    def reset(self) -> None:
        """Back to the source, with no momentum."""
        self.forget()
        self.move(self.model.source_flat())

    def forget(self) -> None:
        """Drop momenta and other running quantities of the optimizer."""
        self._torch.state.clear()
        self._torch.load_state_dict(self._fresh)

    def state_dict(self) -> dict[str, Any]:
        state = self._torch.state_dict()["state"]
        momenta = {key: {name: _copied(v) for name, v in entry.items()} for key, entry in state.items()}
        values = {} if self._shares else {"flat": self._flat.detach().cpu().clone()}
        return values | {"optimizer": momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self._shares and state["flat"].shape != self._flat.shape:
            raise errors.StateMismatch(
                f"the state holds {state['flat'].numel()} adapted values, this model has {self._flat.numel()}"
            )
        fresh = self._torch.state_dict()
        # torch.optim takes tensors as they are and then writes to them: the caller's state must stay as it was.
        own = {key: {name: _copied(v) for name, v in entry.items()} for key, entry in state["optimizer"].items()}
        self._torch.load_state_dict({"state": own, "param_groups": fresh["param_groups"]})
        if not self._shares:
            self.move(state["flat"].to(self._flat))


def check_rate(lr: float) -> None:
    """Refuse a learning rate that no optimizer takes."""
    if not isinstance(lr, int | float) or not 0 <= lr < math.inf:
        raise errors.BadConfig(f"a learning rate must be a number from 0 on, not {lr!r}")


def check_pull(pull: float) -> None:
    """Refuse what is no share of the way back to the source."""
    if not 0 <= pull <= 1:
        raise errors.BadConfig(f"pull is a share of the way back to the source, in [0, 1], not {pull}")


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
