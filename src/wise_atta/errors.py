"""What can go wrong, each with what to do about it.

Every error of the library is a `WiseAttaError`. Its message says which input was wrong and what to do, and the
object that raised it is as it was before the call.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WiseAttaError(Exception):
    """Anything this library raises on purpose."""


class BadInput(WiseAttaError, ValueError):
    """An input that cannot be predicted on: empty, wrong shape, dtype or device."""


class NotFinite(BadInput):
    """NaN or Inf in the inputs or in the logits."""


class SingleSample(BadInput):
    """One sample has no batch statistics."""


class HeadNotFound(WiseAttaError):
    """No layer was found that turns features into the logits."""


class NothingToAdapt(WiseAttaError):
    """The model has no tensor of the kind that was to be adapted."""


class BadConfig(WiseAttaError, ValueError):
    """An option outside its range, or options that exclude each other."""


class UnknownName(BadConfig):
    """A method, policy, selector, data set … of that name does not exist."""


class BadLabel(WiseAttaError, ValueError):
    """A label that is not a class of the model."""


class UnknownQuery(WiseAttaError, KeyError):
    """An answer to a question that was never asked, or that has expired."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class Conflict(WiseAttaError):
    """A second, different answer to a question that has one."""


class Overdraft(WiseAttaError):
    """More labels were to be spent than the account allows."""


class AlreadyLearned(WiseAttaError):
    """`learn` was called twice with the same prediction."""


class StateMismatch(WiseAttaError):
    """A saved state that belongs to another model, method or version."""


class MissingExtra(WiseAttaError, ImportError):
    """A feature needs packages that are not installed."""


class DataError(WiseAttaError):
    """A data file that is missing, broken or not what its name says."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UnknownName:
    """The error for a name that does not exist, with the nearest ones that do.

    >>> print(unknown("method", "wize", ["wise", "tent"]))
    unknown method 'wize'. Did you mean 'wise'? Known: tent, wise
    >>> print(unknown("domain", 3, ["fog"]))
    unknown domain 3. Known: fog
    """
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UnknownName(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}")
