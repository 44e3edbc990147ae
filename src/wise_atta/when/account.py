"""The account: how many labels may be spent by now. It cannot be overdrawn."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, get_args

from wise_atta import errors

Per = Literal["batch", "sample"]

# A ratio as a user writes it: 0.29, "0.29", "1/3", or an exact fraction.
Ratio = float | str | Fraction

_VERSION = 1


class Account:
    """Labels earned and spent: spent ≤ ⌊ratio · seen⌋ + credit and spent ≤ total, at every moment.

    All arithmetic is in whole numbers. A float is read as the decimal number that it prints, so 0.29 labels a batch are
    29 labels after 100 batches, although 0.29 · 100 is 28.999999999999996 in floats.

    Parameters
    ----------
    ratio
        Labels per unit.
    per
        The unit: "batch" (the paper) or "sample" (where a batch is whatever has arrived).
    credit
        How many labels may be spent ahead of ratio · seen. `math.inf` lifts that limit, as Algorithm 1 does.
    total
        A limit for the whole stream, or None.

    Examples
    --------
    >>> account = Account(0.29)
    >>> account.earn(100)
    >>> account.allowed
    29
    >>> account.spend(28)
    >>> account.available
    1
    >>> account.spend(2)
    Traceback (most recent call last):
        ...
    wise_atta.errors.Overdraft: 2 labels asked for, 1 available: 28 of 29 are spent after 100 batches. ...
    """

    def __init__(self, ratio: Ratio, *, per: Per = "batch", credit: float = 0, total: int | None = None) -> None:
        self.rate = exact(ratio)
        self._labels, self._units = self.rate.as_integer_ratio()
        if per not in get_args(Per):
            raise errors.BadConfig(f"per={per!r}: a ratio counts labels per 'batch' or per 'sample'")
        if per == "sample" and self.rate > 1:
            raise errors.BadConfig(f"ratio={ratio} labels per sample: a sample takes one label at most, so give 0 to 1")
        self.ratio = ratio
        self.per: Per = per
        self.credit = credit if credit == math.inf else whole("credit", credit)
        self.total = None if total is None else whole("total", total)
        self.reset()

    @classmethod
    def for_length(cls, ratio: Ratio, length: int) -> Account:
        """The account of a stream of known length: round(ratio · length) labels, wherever in it they fall.

        >>> account = Account.for_length(0.1, 782)
        >>> account.rate, account.allowed
        (Fraction(39, 391), 78)
        """
        length = whole("length", length, least=1)
        total = round(exact(ratio) * length)
        return cls(Fraction(total, length), credit=total, total=total)

    def units(self, samples: int) -> int:
        """How many units a batch of that many samples is."""
        return 1 if self.per == "batch" else samples

    def earned(self, seen: int) -> int:
        """⌊ratio · seen⌋, what a stream of that length pays for."""
        return self._labels * seen // self._units

    @property
    def allowed(self) -> float:
        """How many labels may have been spent by now. A whole number, or infinity under unlimited credit."""
        allowed = self.earned(self.seen) + self.credit
        return allowed if self.total is None else min(allowed, self.total)

    @property
    def available(self) -> float:
        """How many labels may be spent now."""
        return self.allowed - self.spent

    def earn(self, units: int) -> None:
        """Some more of the stream was seen."""
        self.seen += whole("units", units, errors.BadInput)

    def spend(self, labels: int) -> None:
        """Charge labels, or raise `Overdraft` and charge none."""
        labels = whole("labels", labels, errors.BadInput)
        if labels > self.available:
            raise errors.Overdraft(
                f"{labels} labels asked for, {self.available} available: {self.spent} of {self.allowed} are spent "
                f"after {self.seen} {'batches' if self.per == 'batch' else 'samples'}. Ask for fewer, or give the "
                "account a larger ratio, credit or total"
            )
        self.spent += labels

    def refund(self, labels: int) -> None:
        """Return labels whose query expired before anyone was shown it."""
        self.take_back(0, whole("labels", labels, errors.BadInput))

    def take_back(self, units: int, labels: int) -> None:
        """Undo one `earn(units)` and one `spend(labels)`."""
        if units > self.seen or labels > self.spent:
            raise errors.BadInput(
                f"{units} units and {labels} labels to take back of {self.seen} and {self.spent}: they were taken back "
                "or refunded before; refund each query once"
            )
        self.seen -= units
        self.spent -= labels

    def reset(self) -> None:
        """Nothing seen, nothing spent."""
        self.seen = self.spent = 0

    def _terms(self) -> dict[str, Any]:
        terms = {"ratio": str(self.rate), "per": self.per, "credit": self.credit, "total": self.total}
        return {"version": _VERSION, **terms}

    def state_dict(self) -> dict[str, Any]:
        return {**self._terms(), "seen": self.seen, "spent": self.spent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        matching("an account", self._terms(), state)
        fresh = Account(self.rate, per=self.per, credit=self.credit, total=self.total)
        try:
            fresh.earn(state["seen"])
            fresh.spend(state["spent"])
        except (KeyError, errors.WiseAttaError) as error:
            raise errors.StateMismatch(f"the state of the account is damaged: {error}") from error
        self.seen, self.spent = fresh.seen, fresh.spent

    def __repr__(self) -> str:
        return f"Account({self.ratio!r}, per={self.per!r}, credit={self.credit!r}, total={self.total!r})"


def exact(ratio: Ratio) -> Fraction:
    """The ratio as the decimal number that was written down.

    >>> exact(0.1)
    Fraction(1, 10)
    """
    try:
        rate = Fraction(str(ratio))
    except (ValueError, ZeroDivisionError) as error:
        raise errors.BadConfig(f"ratio={ratio!r} is not a number of labels per batch or sample, such as 0.2") from error
    if rate < 0:
        raise errors.BadConfig(f"ratio={ratio}: labels are spent, not earned, so give 0 or more")
    return rate


def whole(name: str, value: float, error: type[errors.WiseAttaError] = errors.BadConfig, least: int = 0) -> int:
    """The value as an int, or `error` where it is no whole number or below `least`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # it is the test
    except TypeError:
        raise error(f"{name}={value!r} must be a whole number") from None
    if number < least:
        raise error(f"{name}={value!r} must be at least {least}")
    return number


def matching(what: str, expected: Mapping[str, object], state: Mapping[str, Any]) -> None:
    """Raise `StateMismatch` at the first entry in which a saved state differs from the object that is to load it."""
    if not isinstance(state, Mapping):
        raise errors.StateMismatch(f"{what} loads what its state_dict() gave, not {type(state).__name__}")
    for name, value in expected.items():
        if name not in state or state[name] != value:
            raise errors.StateMismatch(
                f"the state of {what} was saved with {name}={state.get(name)!r} and is loaded where {name}={value!r}: "
                "load it into an object with the same options"
            )
