"""Every part of the package as a case of `wise_atta.conformance`.

Parts are found by themselves: every subclass in the package, every name in a registry. A part that cannot be made
without arguments needs an example here.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from core import nets

from wise_atta import how, methods, what, when, who
from wise_atta.conformance import Case

LENGTH = 8


class Replying:
    """A function that can be pickled and printed: answers some questions at once, some later, some never."""

    def __call__(self, query: who.Query) -> who.AnswerLike:
        if query.index % 4 == 3:
            return who.CANT_TELL
        return None if query.index % 4 == 2 else nets.truth(query)

    def __repr__(self) -> str:
        return "Replying()"


class Truth(Replying):
    """Knows all answers."""

    def __call__(self, query: who.Query) -> int:
        return nets.truth(query)

    def __repr__(self) -> str:
        return "Truth()"


def pictures(number: int, dtype: torch.dtype) -> torch.Tensor:
    return nets.batch(number=number, dtype=dtype).sigmoid()


def source_data(dtype: torch.dtype) -> list[torch.Tensor]:
    return [pictures(100 + number, dtype) for number in range(3)]


def tutor(dtype: torch.dtype) -> how.Tutor:
    return how.Tutor(nets.make(seed=5, dtype=dtype))


EXAMPLES: dict[str, Callable[[torch.dtype], Any]] = {
    "Exhaust": lambda _: when.Exhaust(when.Random(0.4, seed=3), length=LENGTH),
    "Oracle": lambda _: who.Oracle(Truth()),
    "Callback": lambda _: who.Callback(Replying()),
    "Teacher": lambda dtype: who.Teacher(nets.make(seed=5, dtype=dtype)),
    "Delayed": lambda _: who.Delayed(who.Oracle(Truth()), who.Between(0, 4), seed=3),
    "Noisy": lambda _: who.Noisy(who.Oracle(Truth()), rate=0.5, classes=nets.CLASSES, seed=3),
    "SourcePenalty": lambda dtype: how.SourcePenalty(how.Entropy(), source_data(dtype)),
    "Distillation": lambda dtype: how.Distillation(tutor(dtype), queue=4, replayed=3, alone=3, ready=2),
}

# What a method cannot do without, and what brings its rarer parts into play on a short stream.
OPTIONS: dict[str, Callable[[torch.dtype], dict[str, Any]]] = {
    "eata": lambda dtype: {"source": source_data(dtype)},
    "cema": lambda dtype: {
        "teacher": nets.make(seed=5, dtype=dtype),
        "queue": 4,
        "replayed": 3,
        "alone": 3,
        "ready": 2,
        "below": 2.0,
    },
    "cotta": lambda _: {"views": 3, "threshold": 0.9},
    "wise": lambda _: {"ratio": 0.5},
}


def subclasses(base: type, package: Any) -> list[type]:
    """Every concrete subclass in the package."""
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)

    def below(kind: type) -> list[type]:
        return [one for sub in kind.__subclasses__() for one in (sub, *below(sub))]

    ours = [kind for kind in dict.fromkeys(below(base)) if kind.__module__.startswith("wise_atta.")]
    # A class with a leading underscore is a part of one room's own machinery, not one that users compose with.
    return [kind for kind in ours if not inspect.isabstract(kind) and not kind.__name__.startswith("_")]


def factory(kind: type, dtype: torch.dtype) -> Callable[[], Any]:
    if kind.__name__ in EXAMPLES:
        return partial(EXAMPLES[kind.__name__], dtype)
    needed = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    assert not needed, f"{kind.__name__} cannot be made without {', '.join(needed)}: give an example in {__file__}"
    return kind


def method(name: str, dtype: torch.dtype) -> methods.Method:
    return methods.get(name, **OPTIONS[name](dtype) if name in OPTIONS else {})


def cases(dtype: torch.dtype) -> dict[str, Case]:
    """A case for every part, on a network of that dtype."""
    factories: dict[str, Callable[[], Any]] = {}
    for room, base in ((when, when.Policy), (what, what.Selector), (who, who.Annotator), (how, how.Objective)):
        for kind in subclasses(base, room):
            factories[f"{base.__name__.lower()} {kind.__name__}"] = factory(kind, dtype)
    subclasses(how.Update, methods)
    for kind in subclasses(how.Update, how):
        if kind is not how.GradientUpdate:  # what the rules have in common
            factories[f"update {kind.__name__}"] = factory(kind, dtype)
    for name, utility in when.UTILITIES.items():
        factories[f"utility {name}"] = factory(utility, dtype)
    for name in methods.METHODS:
        factories[f"method {name}"] = partial(method, name, dtype)
    model, inputs = partial(nets.make, dtype=dtype), partial(pictures, dtype=dtype)
    return {name: Case(make, model, inputs) for name, make in factories.items()}


CASES = cases(torch.float64)
