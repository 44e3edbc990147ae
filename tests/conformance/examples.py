"""Which parts are there, and how is one of each made and used?

Parts are found by themselves: every subclass in the package, every name in a registry. A part that cannot be made
without arguments needs an example here.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from core import nets
from torch import nn

from wise_atta import Adapter, Anchor, Batch, Classifier, adapt, how, methods, what, when, who
from wise_atta.view import View

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


def pictures(number: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return nets.batch(number=number, dtype=dtype).sigmoid()


def source_data() -> list[torch.Tensor]:
    return [pictures(100 + number) for number in range(3)]


def tutor() -> how.Tutor:
    return how.Tutor(nets.make(seed=5))


EXAMPLES: dict[str, Callable[[], Any]] = {
    "Exhaust": lambda: when.Exhaust(when.Random(0.4, seed=3), length=LENGTH),
    "Oracle": lambda: who.Oracle(Truth()),
    "Callback": lambda: who.Callback(Replying()),
    "Teacher": lambda: who.Teacher(nets.make(seed=5)),
    "Delayed": lambda: who.Delayed(who.Oracle(Truth()), who.Between(0, 4), seed=3),
    "Noisy": lambda: who.Noisy(who.Oracle(Truth()), rate=0.5, classes=nets.CLASSES, seed=3),
    "SourcePenalty": lambda: how.SourcePenalty(how.Entropy(), source_data()),
    "Distillation": lambda: how.Distillation(tutor(), queue=4, replayed=3, alone=3, ready=2),
}

# What a method cannot do without, and what brings its rarer parts into play on a short stream.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "eata": lambda: {"source": source_data()},
    "cema": lambda: {"teacher": nets.make(seed=5), "queue": 4, "replayed": 3, "alone": 3, "ready": 2, "below": 2.0},
    "cotta": lambda: {"views": 3, "threshold": 0.9},
    "wise": lambda: {"ratio": 0.5},
}


@dataclass(frozen=True)
class Case:
    """One part: how it is made, how it is put to use, and what it does with batches `first` to `last`."""

    make: Callable[[], Any]
    use: Callable[[Any, torch.dtype], Any]
    run: Callable[[Any, range], list[Any]]
    adapts: bool = False


# -- finding them -----------------------------------------------------------------------------------------------------


def found(base: type, package: Any) -> list[type]:
    """Every concrete subclass in the package."""
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)

    def below(kind: type) -> list[type]:
        return [one for sub in kind.__subclasses__() for one in (sub, *below(sub))]

    ours = [kind for kind in dict.fromkeys(below(base)) if kind.__module__.startswith("wise_atta.")]
    # A class with a leading underscore is a part of one room's own machinery, not one that users compose with.
    return [kind for kind in ours if not inspect.isabstract(kind) and not kind.__name__.startswith("_")]


def made(kind: type) -> Callable[[], Any]:
    if kind.__name__ in EXAMPLES:
        return EXAMPLES[kind.__name__]
    needed = [
        name
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    assert not needed, f"{kind.__name__} cannot be made without {', '.join(needed)}: give an example in {__file__}"
    return kind


def method(name: str) -> Callable[[], methods.Method]:
    return lambda: methods.get(name, **OPTIONS.get(name, dict)())


# -- using them -------------------------------------------------------------------------------------------------------


def as_it_is(part: Any, dtype: torch.dtype) -> Any:
    return part


def decide(policy: when.Policy, numbers: range) -> list[Any]:
    scores = torch.randint(0, 9, (100,), generator=torch.Generator().manual_seed(7)).tolist()
    return [(policy.decide(scores[t], want=1, samples=8), policy.spent, policy.allowed) for t in numbers]


def view_of(number: int) -> View:
    generator = torch.Generator().manual_seed(number)
    head = torch.randn(nets.CLASSES, 6, generator=torch.Generator().manual_seed(0))
    features = 3 * torch.randn(8, 6, generator=generator)
    logits = features @ head.T
    slow = logits + torch.randn(logits.shape, generator=generator)
    return View(number, logits, features, lambda f: f @ head.T, lambda: slow)


def pick(selector: what.Selector, numbers: range) -> list[Any]:
    return [selector.pick(view_of(number), 2) for number in numbers]


def score(utility: when.Utility, numbers: range) -> list[Any]:
    return [utility(view_of(number)) for number in numbers]


def reply(annotator: who.Annotator, numbers: range) -> list[Any]:
    results = []
    for now in numbers:
        logits = torch.zeros(8, nets.CLASSES, dtype=torch.float64)
        asked = [who.Query.of(Batch(pictures(now)), now, index, logits) for index in (now % 8, (now + 3) % 8)]
        annotator.ask(asked, now)
        if isinstance(annotator, who.Inbox):
            for query in annotator.open(limit=2):
                annotator.put(query.id, Replying()(query))
        answers = annotator.answers(now, last=[f"{now - 5}-{(now - 5) % 8}"])
        results.append([{name: (answer.label, answer.by) for name, answer in answers.items()}, annotator.shown(now)])
    return results


def step(adapter: Adapter, numbers: range) -> list[Any]:
    dtype = adapter.classifier.dtype
    results = []
    for number in numbers:
        out = adapter.step(Batch(pictures(number, dtype), ids=[f"{number}/{i}" for i in range(8)]))
        results.append([out.logits, [query.id for query in out.queries], out.utility, out.spent])
    return results


def loop(update: how.Update, dtype: torch.dtype, net: nn.Module | None = None) -> Adapter:
    net = nets.make(dtype=dtype) if net is None else net
    return Adapter(
        Classifier(net, adapt=update.adapts),
        update,
        policy=when.Uniform(0.5),
        questions=who.Questions(
            annotator=None
            if isinstance(update, how.Distillation)
            else who.Delayed(who.Oracle(Truth()), who.Between(0, 2))
        ),
        anchor=Anchor(),
    )


def minimise(objective: how.Objective, dtype: torch.dtype) -> Adapter:
    if isinstance(objective, how.SourcePenalty):
        objective.source = [x.to(dtype) for x in objective.source]
    return loop(how.Descend(objective, lr=0.01), dtype)


def around(chosen: methods.Method, dtype: torch.dtype) -> Adapter:
    if chosen.name == "eata":
        chosen.update.objective.source = [x.to(dtype) for x in source_data()]
    asks = not isinstance(chosen.policy, when.Never) and chosen.name != "cema"
    annotator = who.Delayed(who.Oracle(Truth()), who.Between(0, 2)) if asks else None
    return adapt(nets.make(dtype=dtype), chosen, annotator=annotator)


def cases() -> dict[str, Case]:
    every = {}
    for kind in found(when.Policy, when):
        every[f"policy {kind.__name__}"] = Case(made(kind), as_it_is, decide)
    for name, kind in when.UTILITIES.items():
        every[f"utility {name}"] = Case(made(kind), as_it_is, score)
    for kind in found(what.Selector, what):
        every[f"selector {kind.__name__}"] = Case(made(kind), as_it_is, pick)
    for kind in found(who.Annotator, who):
        every[f"annotator {kind.__name__}"] = Case(made(kind), as_it_is, reply)
    found(how.Update, methods)
    for kind in (kind for kind in found(how.Update, how) if kind is not how.GradientUpdate):
        every[f"update {kind.__name__}"] = Case(made(kind), loop, step, adapts=True)
    for kind in found(how.Objective, how):
        every[f"objective {kind.__name__}"] = Case(made(kind), minimise, step, adapts=True)
    for name in methods.METHODS:
        every[f"method {name}"] = Case(method(name), around, step, adapts=True)
    return every


CASES = cases()
