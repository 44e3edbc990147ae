"""Taking back a `learn` that failed: parts replace what they hold and never write to it, so references do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from wise_atta.model import Weights

# What moves of a set of weights; the rest of it are caches and counters. The last publishes what it is put back to.
_MOVES = ("live", "_followed", "running")


def remember(*parts: object) -> Callable[[], None]:
    """Note what these parts, and those that they are made of, hold; what is given puts it back.

    A part is what has a `state_dict`, or `Weights`, also in a list, a tuple or a dict. Nothing is copied, here or
    there: memory may have run out.
    """
    every = list(_parts(parts, set()))
    models = [(part, [getattr(part, name) for name in _MOVES]) for part in every if isinstance(part, Weights)]
    others = [(part, dict(vars(part))) for part in every if not isinstance(part, Weights)]

    def undo() -> None:
        for model, values in models:
            for name, value in zip(_MOVES, values, strict=True):
                setattr(model, name, value)
        for part, held in others:
            for name in vars(part).keys() - held.keys():
                vars(part).pop(name, None)
            vars(part).update(held)

    return undo


def _parts(values: Iterable[object], seen: set[int]) -> Iterator[object]:
    # A list first, in one go: another thread may add to it while it is walked.
    for value in list(values):
        if isinstance(value, list | tuple | dict):
            within: Iterable[object] = value.values() if isinstance(value, dict) else value
        elif isinstance(value, Weights):
            within = ()
        elif hasattr(type(value), "state_dict") and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
            within = vars(value).values()
        else:
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, list | tuple | dict):
            yield value
        yield from _parts(within, seen)
