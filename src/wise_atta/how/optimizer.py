"""The optimizer: the rules of `torch.optim`, into new values that are published when done."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from wise_atta import errors, signals
from wise_atta.model import Gradients, Version, Weights, wide
from wise_atta.part import saved

Kind: TypeAlias = Literal["sgd", "adam"]
Momenta: TypeAlias = dict[str, Tensor]
_MOMENTA = {"sgd": {"momentum_buffer"}, "adam": {"step", "exp_avg", "exp_avg_sq"}}
# Of Adam, as `torch.optim` has them.
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8


@dataclass(eq=False, repr=False)
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

    model: Weights
    _: KW_ONLY
    kind: Kind = "sgd"
    lr: float = 1e-3
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.0
    share: InitVar[Optimizer | None] = None

    def __post_init__(self, share: Optimizer | None) -> None:
        check_rate(self.lr)
        if not 0 <= self.momentum < 1 or not self.weight_decay >= 0:
            raise errors.BadConfig(
                f"momentum must be in [0, 1) and weight_decay at least 0, not {self.momentum}, {self.weight_decay}"
            )
        if self.kind not in _MOMENTA:
            raise errors.unknown("optimizer", self.kind, _MOMENTA)
        self._shared: Optimizer | None = None if share is None else share._shared or share
        self._sharing: list[Optimizer] = []
        if self._shared is not None:
            self._shared._sharing.append(self)
        else:
            # What was published is never written to again: those who saw it may still look at it.
            self._flat = self._published = wide(self.model.source_flat())
        self._source: Tensor | None = None
        self._momenta: dict[str, Momenta] = {}
        self._gradient = torch.zeros_like(self.flat)
        self._gradient_views = self.model.layout.views(self._gradient)

    def step(self, gradients: Gradients, lr: float | None = None, *, publish: bool = True) -> None:
        """Take one step on the named groups and publish the result. Groups that are not named stay as they are.

        A gradient with NaN or Inf is taken as zero: one bad batch must not destroy the adapted tensors. With
        `publish=False` the step is seen by nobody until another, `move` or `publish` has completed it.
        """
        owner, lr, layout = self._shared or self, self.lr if lr is None else lr, self.model.layout
        rule = self._sgd if self.kind == "sgd" else self._adam
        # New momenta in place of the old: a step that is taken back finds them as they were.
        momenta = dict(self._momenta)
        with torch.no_grad():
            values = owner._flat.clone() if owner._flat is owner._published else owner._flat
            for group, grads in gradients.items():
                if isinstance(grads, Tensor):
                    gradient = grads.to(self._gradient.dtype)
                elif grads:
                    torch._foreach_copy_([self._gradient_views[name] for name in layout.groups[group]], list(grads))
                    gradient = self._gradient[layout.slices[group]]
                else:
                    continue
                gradient = torch.where(signals.all_finite(gradient), gradient, 0.0)
                own = values[layout.slices[group]]
                if self.weight_decay:
                    gradient = gradient.add(own, alpha=self.weight_decay)
                momenta[group] = rule(own, gradient, momenta.get(group, {}), lr)
        owner._flat = values
        self._momenta = {group: own for group, own in momenta.items() if own}
        if publish:
            self.publish()

    def _sgd(self, values: Tensor, gradient: Tensor, momenta: Momenta, lr: float) -> Momenta:
        """`torch.optim.SGD` on one tensor, to the bit, but for momenta that are new tensors."""
        if not self.momentum:
            values.add_(gradient, alpha=-lr)
            return {}
        before = momenta.get("momentum_buffer")
        buffer = gradient if before is None else before.mul(self.momentum).add_(gradient)
        values.add_(gradient.add(buffer, alpha=self.momentum) if self.nesterov else buffer, alpha=-lr)
        return {"momentum_buffer": buffer}

    def _adam(self, values: Tensor, gradient: Tensor, momenta: Momenta, lr: float) -> Momenta:
        """`torch.optim.Adam` likewise."""
        if momenta:
            step = momenta["step"] + 1
            mean = momenta["exp_avg"].lerp(gradient, 1 - _BETA1)
            square = momenta["exp_avg_sq"].mul(_BETA2)
        else:
            step = torch.ones((), dtype=torch.float32, device="cpu")
            mean = torch.zeros_like(values).lerp_(gradient, 1 - _BETA1)
            square = torch.zeros_like(values)
        # The kernels that torch.optim takes on an accelerator, where the plain ones round otherwise.
        torch._foreach_addcmul_([square], [gradient], [gradient], 1 - _BETA2)
        count = step.item()
        root = torch._foreach_sqrt([square])
        torch._foreach_div_(root, [(1 - _BETA2**count) ** 0.5])
        torch._foreach_add_(root, _EPS)
        torch._foreach_addcdiv_([values], [mean], root, [lr / (1 - _BETA1**count) * -1])
        return {"step": step, "exp_avg": mean, "exp_avg_sq": square}

    @property
    def flat(self) -> Tensor:
        """The current values. Nobody writes to them: see `move`."""
        return (self._shared or self)._flat

    @property
    def unseen(self) -> Version:
        """The current values, published or not, to run a forward with: its graph must be used before the next step."""
        return Version(self.flat.to(self.model.live.flat.dtype), self.model.layout)

    def move(self, flat: Tensor, *, publish: bool = True) -> None:
        """Put the adapted tensors somewhere else (a restore, an average) and publish; momenta stay.

        The vector must not be written to afterwards.
        """
        (self._shared or self)._flat = flat.detach().to(self.flat)
        if publish:
            self.publish()

    def publish(self, pull: float = 0.0) -> None:
        """Go so much of the way back to the source, θ ← (1 − pull)·θ + pull·θ₀, and let everybody see the values."""
        owner = self._shared or self
        if pull:
            if owner._source is None:
                owner._source = self.model.source_flat().to(owner._flat)
            owner._flat = owner._flat.lerp(owner._source, pull)
        # As the network takes them; the very same tensor where nothing is to be rounded.
        self.model.publish(owner._flat.to(self.model.live.flat.dtype))
        owner._published = owner._flat

    def reset(self) -> None:
        """Back to the source, with no momentum; values that are shared go there with their owner."""
        self.forget()
        if self._shared is None:
            self.move(self.model.source_flat())

    def forget(self) -> None:
        """Drop momenta and other running quantities, also of optimizers that move the same values."""
        for optimizer in (self, *self._sharing):
            optimizer._momenta = {}

    def state_dict(self) -> dict[str, Any]:
        # Momenta go by the number of their group, as in `torch.optim`.
        number = {group: index for index, group in enumerate(self.model.layout.slices)}
        momenta = {
            number[group]: {name: saved(value) for name, value in own.items()} for group, own in self._momenta.items()
        }
        return ({"flat": saved(self.flat)} if self._shared is None else {}) | {"optimizer": momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._shared is None and state["flat"].shape != self.flat.shape:
            raise errors.StateMismatch(
                f"the state holds {state['flat'].numel()} adapted values, this model has {self.flat.numel()}"
            )
        known = _MOMENTA[self.kind]
        if any(own.keys() - known for own in state["optimizer"].values()):
            raise errors.StateMismatch(
                f"the state is not of the optimizer {self.kind!r}: load it into an adapter with the same optimizer"
            )
        groups = list(self.model.layout.slices)
        self._momenta = {
            groups[index]: {
                name: value.clone() if name == "step" else value.to(self.flat, copy=True)
                for name, value in own.items()
                if value is not None
            }
            for index, own in state["optimizer"].items()
        }
        if self._shared is None:
            self.move(state["flat"].to(self.flat, copy=True))


def check_rate(lr: float) -> None:
    """Refuse a learning rate that no optimizer takes."""
    if not isinstance(lr, int | float) or not 0 <= lr < math.inf:
        raise errors.BadConfig(f"a learning rate must be a number from 0 on, not {lr!r}")
