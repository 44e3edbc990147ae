"""How is a `learn` that failed taken back? Parts replace what they hold and never write to it, so references do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from wise_atta.model import Classifier

# What moves of a classifier; the rest of it are caches and counters.
_MOVES = ("live", "running", "_followed")


def remember(*parts: object) -> Callable[[], None]:
    """Note what these parts, and those that they are made of, hold; what is given puts it back.

    A part is what has a `state_dict`, or a `Classifier`. Nothing is copied, here or there: memory may have run out.
    """
    found = list(_parts(parts, set()))
    models = [(part, [getattr(part, name) for name in _MOVES]) for part in found if isinstance(part, Classifier)]
    others = [(part, dict(vars(part))) for part in found if not isinstance(part, Classifier)]

    def undo() -> None:
        for model, values in models:
            for name, value in zip(_MOVES, values, strict=True):
                setattr(model, name, value)
        for part, held in others:
            for name in vars(part).keys() - held.keys():
                delattr(part, name)
            vars(part).update(held)

    return undo


def _parts(candidates: Iterable[object], seen: set[int]) -> Iterator[object]:
    for part in candidates:
        if id(part) in seen or not _is_part(part):
            continue
        seen.add(id(part))
        yield part
        if not isinstance(part, Classifier):
            yield from _parts(vars(part).values(), seen)


def _is_part(value: object) -> bool:
    has_state = hasattr(type(value), "state_dict") and hasattr(value, "__dict__") and not isinstance(value, nn.Module)
    return has_state or isinstance(value, Classifier)
