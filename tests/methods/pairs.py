"""How is a method of the library played beside its slow reference? Same scenario, same chance, same record."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from references import REFERENCES, Step
from torch import Tensor, nn

import wise_atta as wa
from wise_atta import methods, what, when
from wise_atta.how import Distillation, balance, likelihood_ratio, optimizer, teacher
from wise_atta.view import View


class Granted(when.Policy):
    """Grants each batch the labels that a scenario says."""

    def __init__(self, grants: list[int]) -> None:
        super().__init__(when.Account(max(grants)))
        self.grants = grants

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        return self.grants[self.account.seen - 1], math.nan, 1.0

    def _check(self, want: int) -> None:
        """Most batches get less than the most."""


@dataclass
class Setup:
    """What a scenario means to the library: options, attributes of parts, and what is put in place of chance."""

    options: dict[str, Any] = field(default_factory=dict)
    classifier: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    in_place: list[tuple[Any, str, Any]] = field(default_factory=list)
    number: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    steps: int = 0

    def begin(self, number: int, adapter: wa.Adapter) -> None:
        """The next batch: what is counted per batch starts again."""
        self.number = number
        self.calls.clear()
        if isinstance(adapter.update, Distillation):
            self.steps = adapter.update.state_dict()["steps"]

    def call(self, name: str) -> int:
        """How often this was called in this batch before."""
        self.calls[name] += 1
        return self.calls[name] - 1


Translation = str | Callable[[Setup, Any], None]


def ignored(setup: Setup, value: Any) -> None:
    """The library finds this by itself."""


def views(setup: Setup, view: Callable[[int, int, Tensor], Tensor]) -> None:
    setup.options["augment"] = lambda x, generator: view(setup.number, setup.call("view"), x)


def one_view(setup: Setup, view: Callable[[int, Tensor], Tensor]) -> None:
    setup.options["augment"] = lambda x, generator: view(setup.number, x)


def restored(setup: Setup, uniforms: Callable[..., Tensor]) -> None:
    setup.options["draws"] = lambda shapes, generator: {
        name: uniforms(setup.number, name, shape) for name, shape in shapes.items()
    }


def share_back(module: ModuleType) -> Callable[[Setup, float], None]:
    """Another share of a symmetric cross-entropy; none of it: the option that turns it off."""

    def translate(setup: Setup, back: float) -> None:
        if back == 0:
            setup.options["symmetric"] = False
        else:
            other = partial(module.symmetric_cross_entropy, back=back)
            setup.in_place.append((module, "symmetric_cross_entropy", other))

    return translate


def centres(setup: Setup, pick: Callable[..., list[int]]) -> None:
    def start(points: np.ndarray, weights: np.ndarray, k: int) -> np.ndarray:
        return points[pick(setup.number, torch.from_numpy(points), torch.from_numpy(weights), k)]

    setup.options["start"] = start


def drawn_anchors(setup: Setup, uniforms: Callable[..., Tensor]) -> None:
    def draw(name: str, stored: int, count: int, counter: int) -> list[int]:
        return [int(u * stored) for u in uniforms(setup.number, setup.call(name), name, count).tolist()]

    for name in ("pseudo", "queried"):
        setup.attributes[f"update.{name}.draw"] = partial(draw, name)


def replayed(setup: Setup, pick: Callable[..., Tensor]) -> None:
    """A draw is named by its round in the batch: the steps that were taken since the batch began."""
    setup.options["draw"] = lambda stored, count, counter: pick(
        setup.number, counter - setup.steps, stored, count
    ).tolist()


def floor(setup: Setup, e_min: float) -> None:
    setup.options["above"] = e_min or None


def noise(setup: Setup, normals: Callable[..., Tensor]) -> None:
    def drawn(selector: what.Selector, view: View) -> Tensor:
        return normals(view.number, view.features.shape)

    setup.in_place.append((what.Perturbation, "noise", drawn))


def ties(setup: Setup, uniforms: Callable[..., Tensor]) -> None:
    def shuffled(selector: what.Selector, view: View) -> np.ndarray:
        return np.argsort(-uniforms(view.number, len(view)).numpy(), kind="stable")

    setup.in_place.append((what.Selector, "shuffled", shuffled))


def balanced_to(setup: Setup, total: float) -> None:
    setup.in_place.append((balance, "_SUM", total))


def tensors(option: str) -> dict[str, Translation]:
    """Norm tensors less those in `frozen`, and all of `whole`, as one specification."""

    def add(setup: Setup, terms: list[str]) -> None:
        setup.options[option] = [*setup.options.get(option, ["norm"]), *terms]

    return {
        "frozen": lambda setup, modules: add(setup, [f"!{name}" for name in modules]),
        "whole": lambda setup, modules: add(setup, list(modules)),
    }


SGD: dict[str, Translation] = {"lr": "lr", "momentum": "momentum", "nesterov": "nesterov"}
ADAM: dict[str, Translation] = {
    "optimizer": "optimizer",
    **{
        name: lambda setup, value, name=name: setup.in_place.append((optimizer, f"_{name.upper()}", value))
        for name in ("beta1", "beta2", "eps")
    },
}
ETA: dict[str, Translation] = {"fraction": "below", "redundancy": "epsilon", "average": "mean_momentum"}

# What each argument of a reference is called in the library: an option, an attribute of a part (.path), or more.
NAMES: dict[str, dict[str, Translation]] = {
    "source": {},
    "bn": {},
    "tent": {**SGD, **ADAM},
    "eta": {**SGD, **ADAM, **ETA},
    "eata": {**SGD, **ADAM, **ETA, "penalty": "fisher_weight", "samples": "fisher_samples", "source": "source"},
    "sar": {
        **SGD,
        "frozen": ignored,
        "fraction": "below",
        "rho": "rho",
        "average": "loss_momentum",
        "restore_below": "restore_below",
    },
    "cotta": {
        **SGD,
        **ADAM,
        "views": views,
        "uniforms": restored,
        "count": "views",
        "threshold": "threshold",
        "teacher": "teacher_momentum",
        "restore": "restore",
        "back": share_back(teacher),
    },
    "roid": {
        **SGD,
        **ADAM,
        "view": one_view,
        "clip": "clip",
        "floor": "eps",
        "temperature": "temperature",
        "average": "mean_momentum",
        "pull": "pull",
        "back": share_back(likelihood_ratio),
    },
    "simatta": {
        "lr": "lr",
        "momentum": "momentum",
        "head": ignored,
        "centres": centres,
        "uniforms": drawn_anchors,
        "low": "e_l",
        "high": "e_h",
        "most": "most",
        "training_steps": "steps",
        "size": "batch",
        "buffer": "size",
    },
    "hiltta": {
        **ADAM,
        "momentum": "momentum",
        "nesterov": "nesterov",
        "head": ignored,
        "candidates": "rates",
        "average": "score_momentum",
        "supervised_lr": "supervised_lr",
    },
    "cema": {
        "lr": "lr",
        "momentum": "momentum",
        "teacher": "teacher",
        "replay": replayed,
        "teacher_lr": "teacher_lr",
        **ETA,
        "e_min": floor,
        "queue": "queue",
        "replayed": "replayed",
        "replay_from": "ready",
        "replayed_alone": "alone",
        "buffer": "size",
        "entropy_weight": "entropy",
        "kl_weight": "kl",
        "ce_weight": "ce",
        "statistics_rate": lambda setup, rate: setup.classifier.update(ema_weight=rate),
    },
    "eatta": {
        **SGD,
        **tensors("adapt"),
        "head": ignored,
        "noise": noise,
        "fraction": "below",
        "sigma": "sigma",
        "average": "weight_momentum",
        "balance": balanced_to,
        "class_rule": "balance",
    },
    "wise": {
        **SGD,
        **tensors("norm"),
        "head": ignored,
        "ties": ties,
        "noise": noise,
        "fraction": ".update.objective.below",
        "mu": "anchor_momentum",
        "perturbed_first": "first",
        "sigma": "sigma",
        "class_rule": "balance",
        "entropy": "entropy",
        "head_part": "train_head",
        "supervise_norm": "supervise_norm",
        "only_selected": "only_selected",
        # the paper's
        "lambda_sup": "lambda_sup",
        "lambda_ent": "lambda_ent",
        "head_weight": "lambda_head",
        "block": "block",
        "pull": "pull",
        # the published code's
        "lr_second": "head_lr",
        "ent_unlabelled": ".update.unlabelled",
        "ent_labelled": ".update.ent",
        "sup_first": ".update.sup",
        "sup_second": ".update.sup",
    },
}

# What the library takes beside the scenario. Where the references have the published rates, so has a preset.
BESIDE: dict[str, dict[str, Any]] = {
    "paper": {"preset": "imagenet-c"},
    "authors": {"preset": "authors/imagenet-c", "norm": ["norm"], "length": 5},
}


@cache
def scenarios(name: str) -> dict[str, dict[str, Any]]:
    return dict(REFERENCES[name].scenarios())


@cache
def expected(name: str, scenario: str) -> list[Step]:
    """What the reference makes of a scenario."""
    return reference(name, scenarios(name)[scenario])


def reference(name: str, given: Mapping[str, Any]) -> list[Step]:
    """What the reference makes of its arguments. It changes the networks that it is given, so it gets copies."""
    return REFERENCES[name].run(**{k: deepcopy(v) if isinstance(v, nn.Module) else v for k, v in given.items()})


def played(name: str, given: Mapping[str, Any]) -> list[Step]:
    """What the library makes of the arguments of a reference."""
    given = dict(given)
    net, batches, grants, truth = (given.pop(key, None) for key in ("net", "batches", "grants", "labels"))
    setup = Setup(options=dict(BESIDE.get(given.pop("preset", "paper"), {})) if name == "wise" else {})
    ties(setup, lambda number, n: -torch.arange(n))
    for key, value in given.items():
        to = NAMES[name][key]
        if callable(to):
            to(setup, value)
        elif to.startswith("."):
            setup.attributes[to[1:]] = value
        else:
            setup.options[to] = value

    method = methods.get(name, **setup.options)
    for path, value in setup.attributes.items():
        *parts, last = path.split(".")
        owner: Any = method
        for part in parts:
            owner = getattr(owner, part)
        assert hasattr(owner, last), f"{name} has no {path}"
        setattr(owner, last, value)
    if grants is not None:
        method = replace(method, policy=Granted(grants), labels=None if name == "cema" else max(grants))
    with ExitStack() as stack:
        for owner, attribute, value in setup.in_place:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        adapter = wa.adapt(net, method, **setup.classifier)
        return [_step(adapter, setup, number, x, truth) for number, x in enumerate(batches, start=1)]


def _step(adapter: wa.Adapter, setup: Setup, number: int, x: Tensor, truth: Callable[[int, int], int] | None) -> Step:
    setup.begin(number, adapter)
    out = adapter.predict(x)
    answers = {} if truth is None else {query.id: truth(number, query.index) for query in out.queries}
    adapter.learn(out, answers)
    extra = {}
    if adapter.anchor is not None:
        kind = "teacher" if isinstance(adapter.update, teacher.TeacherStudent) else "anchor"
        extra |= {f"{kind}.{key}": value for key, value in adapter.anchor.version.tensors.items()}
    tutor = getattr(adapter.update, "tutor", None)
    if tutor is not None:
        extra |= {f"teacher.{key}": value for key, value in _values(tutor.model).items()}
    asked = [query.index for query in (*out.queries, *out.sent)]
    return Step(out.logits, _values(adapter.classifier), asked, extra=extra)


def _values(classifier: wa.Classifier) -> dict[str, Tensor]:
    """All parameters, those that adapt as they are now."""
    live = classifier.live.tensors
    return {name: live.get(name, p).detach() for name, p in classifier.model.named_parameters()}


def gap(ours: list[Step], theirs: list[Step]) -> float:
    """The largest difference after any batch: predictions, parameters, slow copies. Infinite if others were asked."""
    gaps = []
    for mine, other in zip(ours, theirs, strict=True):
        copies = [key for key in other.extra if key in mine.extra]
        gaps += [
            0.0 if mine.asked == other.asked else math.inf,
            _largest({"logits": mine.logits}, {"logits": other.logits}),
            _largest(mine.params, other.params),
            _largest({key: mine.extra[key] for key in copies}, {key: other.extra[key] for key in copies}),
        ]
    return max(gaps)


def final_gap(ours: list[Step], theirs: list[Step]) -> float:
    """The largest difference of any parameter after the last batch."""
    return _largest(ours[-1].params, theirs[-1].params)


def _largest(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((float((ours[key] - theirs[key]).abs().max()) for key in ours), default=0.0)
