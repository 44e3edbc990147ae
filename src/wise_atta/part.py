"""Parts: dataclasses whose options are fields, and whose running quantities are saved, loaded and reset by name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from torch import Tensor

from wise_atta import errors

T = TypeVar("T")
# In the metadata of a field: the key of its value in a saved state.
SAVED_AS = "saved as"


def running(start: Any = None, *, key: str) -> Any:
    """A field for what a part has gathered so far: no argument, in no repr, and in the state under `key`.

    Parameters
    ----------
    start
        What it is at first and after a reset.
    key
        Its name in a saved state.
    """
    return field(default_factory=lambda: copy.copy(start), init=False, repr=False, metadata={SAVED_AS: key})


@dataclass(kw_only=True, eq=False)
class Part:
    """Options, which are fields, and running quantities, which are fields made by `running`.

    A running quantity is a plain value, a tensor or another part, and is replaced, not written to. So is an option with
    `SAVED_AS` in its metadata. Parts are neither frozen nor slotted: what failed is taken back through `vars`.

    Examples
    --------
    >>> @dataclass(eq=False)
    ... class Counter(Part):
    ...     step: int = 1
    ...     count: int = running(0, key="count")
    >>> counter = Counter(step=2)
    >>> counter.count += counter.step
    >>> counter, counter.state_dict()
    (Counter(step=2), {'count': 2})
    """

    def reset(self) -> None:
        """Forget the running quantities."""
        for name, _, start in _quantities(self):
            value = getattr(self, name)
            if hasattr(value, "reset"):
                value.reset()
            else:
                setattr(self, name, start())

    def state_dict(self) -> dict[str, Any]:
        """The running quantities, to be saved."""
        return {key: saved(getattr(self, name)) for name, key, _ in _quantities(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up running quantities that were saved."""
        for name, key, _ in _quantities(self):
            value = getattr(self, name)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(state[key])
            else:
                setattr(self, name, saved(state[key]))


def _quantities(part: Part) -> list[tuple[str, str, Callable[[], Any]]]:
    """Attribute, key and start of every running quantity."""
    return [(f.name, f.metadata[SAVED_AS], f.default_factory) for f in fields(part) if SAVED_AS in f.metadata]  # type: ignore[misc]  # made by `running`


def saved(value: Any) -> Any:
    """A value as it is saved: a tensor on the host, the state of a part, or a copy."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return value.state_dict() if hasattr(value, "state_dict") else copy.copy(value)


def at_least(bound: float, **options: float | None) -> None:
    """Refuse options below a bound; None is no number and passes.

    >>> at_least(1, samples=4, size=None)
    """
    for name, value in options.items():
        if value is not None and not value >= bound:
            raise errors.BadConfig(f"{name}={value} must be at least {bound}")


def above(bound: float, **options: float | None) -> None:
    """Refuse options at or below a bound."""
    for name, value in options.items():
        if value is not None and not value > bound:
            raise errors.BadConfig(f"{name}={value} must be above {bound}")


def share(**options: float) -> None:
    """Refuse options outside [0, 1]."""
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise errors.BadConfig(f"{name}={value} must be in [0, 1]")


def make(kind: str, registry: Mapping[str, Callable[..., T]], name: str, options: Mapping[str, Any]) -> T:
    """The part that a registry has under that name, with these options."""
    if name not in registry:
        raise errors.unknown(kind, name, registry)
    signature = inspect.signature(registry[name])
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "no options"
        raise errors.BadConfig(f"{kind} {name!r}: {error}. It takes {takes}") from error
    return registry[name](**options)
