"""Configurations whose bits are kept: groups of cases, built with the names that users type and nothing else."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from golden import nets

import wise_atta as wa

Make = Callable[[], wa.Adapter]
# What happens before batch `number`: it gives the adapter that goes on.
Between = Callable[[wa.Adapter, int, Make], wa.Adapter]
Turn = Callable[[wa.Adapter, Any, int], wa.Prediction]
Options = Mapping[str, Any]


def step(adapter: wa.Adapter, inputs: Any, number: int) -> wa.Prediction:
    return adapter.step(inputs)


def by_hand(adapter: wa.Adapter, inputs: Any, number: int) -> wa.Prediction:
    """`predict`, then `learn` with the answers at once."""
    out = adapter.predict(inputs)
    adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
    return out


@dataclass(frozen=True)
class Case:
    """One adapter on one stream. `options` makes them anew: parts of an adapter belong to it."""

    net: str
    method: str | Callable[[], Any]
    options: Callable[[], Options]
    length: int = 9
    size: Callable[[int], int] = lambda number: 8
    between: Between | None = None
    turn: Turn = step
    double: bool = False
    wrap: Callable[[Any, int], Any] = lambda inputs, number: inputs

    def make(self) -> wa.Adapter:
        net = nets.make(self.net, dtype=torch.float64 if self.double else torch.float32)
        method = self.method if isinstance(self.method, str) else self.method()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # preset="paper" warns that it may overspend
            return wa.adapt(net, method, **self.options())

    def batch(self, number: int) -> Any:
        inputs = nets.batch(self.net, number, self.size(number))
        return self.wrap(nets.double(inputs) if self.double else inputs, number)


def oracle(late: Any = 0) -> wa.who.Annotator:
    annotator = wa.who.Oracle(nets.truth)
    return wa.who.Delayed(annotator, late) if late else annotator


GROUPS: dict[str, dict[str, Case]] = {}


def group(name: str) -> Callable[[Callable[[], dict[str, Case]]], Callable[[], dict[str, Case]]]:
    def add(cases: Callable[[], dict[str, Case]]) -> Callable[[], dict[str, Case]]:
        GROUPS[name] = cases()
        return cases

    return add


def fixed(net: str, method: str, /, late: Any = 0, **options: Any) -> Case:
    """A case whose options hold nothing that an adapter would change; questions are answered by the oracle."""
    free = method in UNLABELLED or method == "cema"
    answered: Options = {} if free else {"annotator": oracle(late)}
    return Case(net, method, lambda: {**copy.deepcopy(answered), **options})


UNLABELLED = ("source", "bn", "tent", "eta", "eata", "sar", "cotta", "roid")
FAST: dict[str, Options] = {
    "plain": {},
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "channels last": {"channels_last": True},
}
HALF: Options = {"ratio": 0.5, "lr": 0.02}
# Asks on most batches, where the default slack would save labels until the short stream is over.
ASKS: Options = {"ratio": 0.7, "lr": 0.02, "slack": 1}


def source_batches(net: str) -> list[Any]:
    return [nets.batch(net, 100 + number) for number in range(3)]


def needed(method: str, net: str) -> Options:
    """The options without which a method does nothing on a short stream of small batches."""
    every: dict[str, Callable[[], Options]] = {
        "source": dict,
        "bn": dict,
        "tent": lambda: {"lr": 0.02},
        "eta": lambda: {"lr": 0.05, "epsilon": 0.8},
        "eata": lambda: {"lr": 0.05, "epsilon": 0.8, "source": source_batches(net), "fisher_weight": 3.0},
        "sar": lambda: {"lr": 0.02},
        "cotta": lambda: {"lr": 0.01, "views": 2, "threshold": 0.6, "restore": 0.05},
        "roid": lambda: {"lr": 0.02},
        "simatta": lambda: {"lr": 0.002, "e_l": 0.4, "e_h": 0.3, "steps": 2, "batch": 8, "size": 20},
        "hiltta": lambda: {"labels": 2, "ratio": 2.0, "supervised_lr": 1e-3},
        "cema": lambda: {
            "teacher": nets.make(net, seed=5),
            "queue": 6,
            "replayed": 6,
            "alone": 6,
            "ready": 4,
            "size": 16,
            "lr": 0.02,
            "teacher_lr": 0.01,
            "epsilon": 0.9,
            "below": 0.9,
        },
        "eatta": lambda: {"lr": 0.02},
        "wise": lambda: {**ASKS, "statistics": "batch"},
    }
    return every[method]()


METHODS = ("source", "bn", "tent", "eta", "eata", "sar", "cotta", "roid", "simatta", "hiltta", "cema", "eatta", "wise")


def method_case(method: str, net: str, late: Any = 0, **options: Any) -> Case:
    free = method in UNLABELLED or method == "cema"
    answered: Options = {} if free else {"annotator": oracle(late)}
    return Case(net, method, lambda: {**copy.deepcopy(answered), **needed(method, net), **options}, length=7)


@group("methods on every kind of network")
def _methods() -> dict[str, Case]:
    cases = {}
    for method, net in itertools.product(METHODS, ("batch-norm", "layer-norm", "group-norm", "residual", "tied")):
        if net == "tied" and method in ("cotta", "roid", "cema"):
            continue  # views and teachers are for pictures
        cases[f"{method}, {net}"] = method_case(method, net)
    return cases


@group("methods in every precision")
def _fast() -> dict[str, Case]:
    cases = {}
    for method, net, (fast, options) in itertools.product(METHODS, ("batch-norm", "layer-norm"), FAST.items()):
        if fast != "plain" and not (net == "layer-norm" and fast == "channels last"):
            cases[f"{method}, {net}, {fast}"] = method_case(method, net, **options)
    for method, net in itertools.product(
        ("tent", "sar", "eatta", "wise", "simatta"), ("group-norm", "residual", "tied")
    ):
        for fast in ("fp32", "bf16"):
            cases[f"{method}, {net}, {fast}"] = method_case(method, net, precision=fast)
    for method in ("tent", "cotta", "wise", "eatta"):
        cases[f"{method}, fp32, channels last"] = method_case(method, "residual", precision="fp32", channels_last=True)
        cases[f"{method}, bf16, channels last"] = method_case(method, "residual", precision="bf16", channels_last=True)
        cases[f"{method}, blocks recomputed"] = method_case(method, "residual", checkpointing=["layer2", "layer3"])
        cases[f"{method}, fp32, blocks recomputed"] = method_case(
            method, "residual", checkpointing=["layer1", "layer4"], precision="fp32"
        )
    for method in METHODS:
        double = method_case(method, "batch-norm")
        if method != "eata" and method != "cema":  # their own data is in float32
            cases[f"{method}, float64"] = Case(double.net, double.method, double.options, length=6, double=True)
    return cases


@group("methods whose answers come late")
def _late() -> dict[str, Case]:
    cases = {}
    for method, fast, delay in itertools.product(
        ("simatta", "hiltta", "eatta", "wise"), ("plain", "fp32", "bf16"), (1, 3)
    ):
        for net in ("batch-norm", "layer-norm"):
            name = f"{method}, {net}, {fast}, up to {delay} late"
            cases[name] = method_case(method, net, wa.who.Between(0, delay), **FAST[fast])
    return cases


@group("statistics of BatchNorm")
def _statistics() -> dict[str, Case]:
    cases = {}
    modes = ("batch", "source", "mixed", "ema", "renorm")
    for method, mode, fast in itertools.product(
        ("bn", "tent", "roid", "eatta", "wise", "cema"), modes, ("plain", "fp32", "bf16")
    ):
        cases[f"{method}, {mode}, {fast}"] = method_case(method, "batch-norm", statistics=mode, **FAST[fast])
    for mode, fast, context in itertools.product(modes, ("plain", "fp32"), ("own", "current", "source")):
        cases[f"late in its {context} context, {mode}, {fast}"] = method_case(
            "wise", "batch-norm", 2, statistics=mode, context=context, **FAST[fast]
        )
    for net, mode in itertools.product(("tabular", "folded", "pair", "residual"), modes):
        cases[f"wise, {net}, {mode}"] = method_case("wise", net, wa.who.Between(0, 2), statistics=mode)
    for prior in (0, 8, 1000):
        cases[f"mixed, prior {prior}"] = method_case("wise", "batch-norm", statistics="mixed", prior=prior)
    for weight, mode in itertools.product((0.5, 1.0), ("ema", "renorm")):
        cases[f"{mode}, weight {weight}"] = method_case("wise", "batch-norm", 2, statistics=mode, ema_weight=weight)
    return cases


@group("late labels")
def _late_labels() -> dict[str, Case]:
    cases = {}
    for context, fast in itertools.product(("own", "current", "source"), ("plain", "fp32", "bf16")):
        for delay in (1, 4):
            cases[f"{delay} late, {context} context, {fast}"] = fixed(
                "batch-norm", "wise", delay, **ASKS, context=context, **FAST[fast]
            )
    rules: dict[str, Options] = {
        "weighted by age": {"late_weight": 1.5},
        "limited": {"late_limit": 2},
        "limited to none": {"late_limit": 0},
        "expiring": {"expires_after": 2},
        "expiring at once": {"expires_after": 0},
        "all of these": {"late_weight": 0.7, "late_limit": 3, "expires_after": 5, "context": "current"},
    }
    for (name, options), fast, net in itertools.product(rules.items(), ("plain", "fp32"), ("batch-norm", "layer-norm")):
        cases[f"{name}, {fast}, {net}"] = fixed(net, "wise", wa.who.Between(0, 5), **ASKS, **options, **FAST[fast])
    many: Options = {"ratio": 4.0, "labels": 4, "policy": "uniform", "lr": 0.01}
    cases["more at once than one batch learns"] = fixed("batch-norm", "wise", 3, **many)
    cases["more at once than one batch learns, fp32"] = fixed("batch-norm", "wise", 3, **many, precision="fp32")
    for method in ("eatta", "hiltta", "simatta"):
        cases[f"{method}, limited and weighted"] = method_case(
            method, "batch-norm", wa.who.Between(0, 3), late_limit=2, late_weight=2.0
        )
    for rule in ("published", "paper"):
        cases[f"{rule} rule"] = fixed("batch-norm", "wise", wa.who.Between(0, 4), **ASKS, rule=rule)
    return cases


@group("policies and budgets")
def _budgets() -> dict[str, Case]:
    options: dict[str, Options] = {
        "paced": {},
        "paced at 1": {"ratio": 1.0},
        "paced at 0": {"ratio": 0.0},
        "paced above 1": {"ratio": 1.7, "labels": 3},
        "credit": {"credit": 3},
        "slack": {"slack": 0},
        "credit and slack": {"credit": 2, "slack": 2, "ratio": 0.3},
        "total": {"total": 2},
        "per sample": {"ratio": 0.1, "per": "sample", "labels": 2},
        "short window": {"window": 3, "warmup": 2},
        "short horizon": {"horizon": 2, "ratio": 0.3},
        "ties shared": {"ties": "share"},
        "ties accepted": {"ties": "accept"},
        "seed": {"seed": 3, "warmup": 4},
        "uniform": {"policy": "uniform"},
        "uniform 2": {"policy": "uniform", "labels": 2, "ratio": 1.0},
        "uniform, total": {"policy": "uniform", "total": 3},
        "uniform per sample": {"policy": "uniform", "per": "sample", "ratio": 0.125},
        "uniform, all the selector picks": {"policy": "uniform", "labels": None, "ratio": None, "selector": "k-margin"},
        "random": {"policy": "random", "seed": 5},
        "random, exact": {"policy": "random", "exact": True, "length": 9},
        "random, credit": {"policy": "random", "credit": 2, "ratio": 0.3},
        "always": {"policy": "always", "labels": 2, "ratio": 2},
        "always, total": {"policy": "always", "labels": 1, "ratio": 1, "total": 4},
        "never": {"policy": "never"},
        "three labels a batch": {"labels": 3, "ratio": 1.5},
        "a budget that a stream cannot take": {"labels": 2, "ratio": 2.0, "policy": "uniform"},
    }
    cases = {}
    for (name, given), fast in itertools.product(options.items(), ("plain", "fp32")):
        cases[f"{name}, {fast}"] = fixed("batch-norm", "wise", **{**HALF, **given}, **FAST[fast])
    objects: dict[str, Callable[[], wa.when.Policy]] = {
        "object": lambda: wa.when.BudgetPaced(0.5, total=3, credit=2),
        "object per sample": lambda: wa.when.BudgetPaced(0.07, per="sample"),
        "exhausted": lambda: wa.when.Exhaust(wa.when.Random(0.4, seed=3), length=9),
        "exhausted, paced": lambda: wa.when.Exhaust(wa.when.BudgetPaced(0.4), length=9),
        "early": lambda: wa.when.early(wa.when.Uniform(0.5), length=9, delay=3),
        "early, paced": lambda: wa.when.early(wa.when.BudgetPaced(0.5), length=9, delay=2),
    }
    for (name, policy), fast in itertools.product(objects.items(), ("plain", "fp32")):
        cases[f"policy {name}, {fast}"] = Case(
            "batch-norm",
            "wise",
            lambda policy=policy, fast=fast: {"lr": 0.02, "policy": policy(), "annotator": oracle(), **FAST[fast]},
        )
    for method in ("eatta", "hiltta", "simatta"):
        for given in ({"ratio": 0.5, "labels": 1}, {"policy": "paced", "ratio": 1.0}, {"policy": "always"}):
            cases[f"{method}, {given}"] = method_case(method, "batch-norm", **given)
    for given in ({"ratio": 2.0, "labels": 3}, {"cost": 0}, {"policy": "paced", "ratio": 0.5, "labels": 1}):
        cases[f"cema, {given}"] = method_case("cema", "batch-norm", **given)
    return cases


@group("utilities and selectors")
def _what() -> dict[str, Case]:
    cases = {}
    utilities = ("count", "mean-entropy", "topk-entropy", "lowk-entropy", "mean-drift", "topk-drift")
    selectors = ("drift", "perturbation", "max-entropy", "margin", "random", "k-margin", "clusters", "band")
    for utility, fast in itertools.product(utilities, ("plain", "fp32", "bf16")):
        cases[f"{utility}, {fast}"] = fixed("batch-norm", "wise", **HALF, utility=utility, **FAST[fast])
    parts: dict[str, Callable[[], wa.when.Utility]] = {
        "MeanEntropy(1)": lambda: wa.when.MeanEntropy(1),
        "TopKDrift(3, -1)": lambda: wa.when.TopKDrift(3, -1),
        "LowKEntropy(2)": lambda: wa.when.LowKEntropy(2),
        "Count(0.7)": lambda: wa.when.Count(threshold_fraction=0.7),
    }
    for name, made in parts.items():
        cases[name] = Case("layer-norm", "wise", lambda made=made: {**HALF, "utility": made(), "annotator": oracle()})
    for selector, fast, labels in itertools.product(selectors, ("plain", "fp32"), (1, 3)):
        if selector != "clusters":
            cases[f"{selector}, {labels}, {fast}"] = fixed(
                "batch-norm", "wise", lr=0.02, ratio=0.5 * labels, labels=labels, selector=selector, **FAST[fast]
            )
    for selector in ("drift", "perturbation", "max-entropy", "margin", "random"):
        cases[f"{selector}, always"] = fixed("layer-norm", "wise", lr=0.02, policy="always", ratio=1, selector=selector)
        cases[f"{selector}, always, fp32"] = fixed(
            "layer-norm", "wise", lr=0.02, policy="always", ratio=1, selector=selector, precision="fp32"
        )
    chosen: dict[str, Callable[[], wa.what.Selector]] = {
        "Drift(first=3, balance)": lambda: wa.what.Drift(first=3, balance=True, seed=4),
        "Perturbation(0.3)": lambda: wa.what.Perturbation(sigma=0.3, seed=2),
        "Perturbation(balance)": lambda: wa.what.Perturbation(balance=True),
        "Margin(balance)": lambda: wa.what.Margin(balance=True),
        "MaxEntropy(seed=9)": lambda: wa.what.MaxEntropy(seed=9),
        "RandomSample(balance)": lambda: wa.what.RandomSample(balance=True, seed=1),
    }
    for (name, selector), fast in itertools.product(chosen.items(), ("plain", "fp32")):
        cases[f"{name}, {fast}"] = Case(
            "batch-norm",
            "wise",
            lambda selector=selector, fast=fast: {
                "lr": 0.02,
                "policy": "uniform",
                "ratio": 1.0,
                "selector": selector(),
                "annotator": oracle(),
                **FAST[fast],
            },
        )
    for method, selector in itertools.product(("eatta", "hiltta", "simatta"), ("drift", "margin", "random")):
        cases[f"{method} asks by {selector}"] = method_case(method, "batch-norm", selector=selector)
    return cases


@group("presets")
def _presets() -> dict[str, Case]:
    cases = {}
    benchmarks = ("imagenet-c", "imagenet-r", "imagenet-k", "imagenet-a", "cifar10-c")
    for preset in (*benchmarks, "paper", *(f"paper/{name}" for name in benchmarks[:4])):
        cases[f"wise, {preset}"] = fixed("residual", "wise", ratio=0.5, preset=preset)
        cases[f"wise, {preset}, fp32"] = fixed("batch-norm", "wise", ratio=0.5, preset=preset, precision="fp32")
    for preset in ("authors", *(f"authors/{name}" for name in benchmarks[:4])):
        cases[f"wise, {preset}"] = fixed("residual", "wise", ratio=0.5, preset=preset, length=9)
        cases[f"wise, {preset}, late"] = fixed("residual", "wise", 2, ratio=0.5, preset=preset, length=9, lr=0.01)
        cases[f"wise, {preset}, fp32"] = fixed("residual", "wise", ratio=0.4, preset=preset, length=5, precision="fp32")
    cases["wise, authors, by uniform"] = fixed(
        "residual", "wise", ratio=0.5, preset="authors", policy="uniform", length=9
    )
    cases["wise, authors, paper's rule"] = fixed(
        "residual", "wise", ratio=0.5, preset="authors", rule="paper", length=9
    )
    cases["wise, authors without a length"] = fixed("residual", "wise", ratio=0.5, preset="authors")
    cases["wise, unknown preset"] = fixed("residual", "wise", ratio=0.5, preset="imagenet")
    for method, preset in itertools.product(METHODS[:-1], ("imagenet-c", "cifar10-c")):
        given = {
            key: value for key, value in needed(method, "residual").items() if key in ("source", "teacher", "views")
        }
        cases[f"{method}, {preset}"] = Case(
            "residual",
            method,
            lambda method=method, given=given, preset=preset: {
                **({} if method in UNLABELLED or method == "cema" else {"annotator": oracle()}),
                **copy.deepcopy(given),
                "preset": preset,
            },
            length=5,
        )
    return cases


@group("rules of wise")
def _rules() -> dict[str, Case]:
    options: dict[str, Options] = {
        "entropy of all": {"entropy": "all"},
        "head's bias": {"train_head": "bias"},
        "no head": {"train_head": "none"},
        "norm unsupervised": {"supervise_norm": False},
        "selected batches only": {"only_selected": True},
        "selected only, no head": {"only_selected": True, "train_head": "none"},
        "published": {"rule": "published"},
        "published, selected only": {"rule": "published", "only_selected": True},
        "published, full head": {"rule": "published", "train_head": "full"},
        "published, no head": {"rule": "published", "train_head": "none"},
        "published, norm unsupervised": {"rule": "published", "supervise_norm": False},
        "published, labels withheld": {"rule": "published", "published": {"sup": 0.0}},
        "published, other weights": {"rule": "published", "published": {"unlabelled": 0.3, "ent": 1.0, "sup": 0.5}},
        "published, roid": {"rule": "published", "objective": "roid"},
        "pulled back": {"pull": 0.1},
        "prior corrected": {"correct_prior": True},
        "roid": {"objective": "roid", "pull": 0.01, "lambda_ent": 1.0, "correct_prior": True},
        "roid, selected only": {"objective": "roid", "only_selected": True},
        "block": {"block": "body.3"},
        "block with norm": {"block": "body"},
        "block, selected only": {"block": "body.3", "only_selected": True},
        "other rates": {"lr": 0.03, "head_lr": 0.001},
        "other weights": {"lambda_sup": 0.3, "lambda_ent": 0.7, "lambda_head": 0.5},
        "no entropy": {"lambda_ent": 0.0},
        "no supervision": {"lambda_sup": 0.0, "lambda_head": 0.0},
        "some norm tensors": {"norm": ["norm", "!body.1"]},
        "everything as norm": {"norm": ["all", "!head"]},
        "no momentum": {"momentum": 0.0, "nesterov": False},
        "no nesterov": {"nesterov": False, "momentum": 0.5},
        "slow anchor": {"anchor_momentum": 0.99, "utility": "mean-drift"},
        "two labels": {"labels": 2, "ratio": 1.0, "policy": "uniform", "slack": None},
        "shadow": {"shadow": True},
    }
    cases = {}
    for (name, given), fast, late in itertools.product(options.items(), ("plain", "fp32", "bf16"), (0, 2)):
        if not (fast == "bf16" and late):
            cases[f"{name}, {fast}{', late' if late else ''}"] = fixed(
                "batch-norm", "wise", late, **{**ASKS, "statistics": "batch", **given}, **FAST[fast]
            )
    for name in ("entropy of all", "selected batches only", "published", "roid", "pulled back", "head's bias"):
        for net in ("layer-norm", "group-norm", "residual", "tied"):
            if not (net in ("tied", "layer-norm") and name == "roid"):
                cases[f"{name}, {net}"] = fixed(net, "wise", wa.who.Between(0, 1), **{**ASKS, **options[name]})
    return cases


@group("options of wise in combination")
def _combinations() -> dict[str, Case]:
    """Options drawn at random: what one-at-a-time cases leave out."""
    values: dict[str, list[Any]] = {
        "ratio": [0.3, 0.5, 1.0],
        "policy": ["paced", "paced", "uniform", "random"],
        "utility": ["count", "mean-entropy", "topk-drift"],
        "selector": ["drift", "perturbation", "margin", "k-margin"],
        "labels": [1, 1, 2],
        "train_head": [None, None, "full", "bias", "none"],
        "objective": ["entropy", "entropy", "roid"],
        "entropy": ["filtered", "all"],
        "supervise_norm": [True, True, False],
        "only_selected": [False, False, True],
        "pull": [0.0, 0.0, 0.05],
        "correct_prior": [False, False, True],
        "rule": [None, None, "published"],
        "block": [None, None, None, "body.3"],
        "momentum": [0.9, 0.0],
        "nesterov": [True, False],
        "statistics": [None, "batch", "mixed", "ema", "source", "renorm"],
        "context": ["own", "current", "source"],
        "late_weight": [None, 2.0],
        "late_limit": [None, 2],
        "expires_after": [None, 3],
        "precision": [None, None, "fp32", "fp32", "bf16"],
        "channels_last": [False, False, True],
        "shadow": [False, False, False, True],
        "guard": [False, False, True],
        "seed": [0, 1],
        "slack": [None, 0, 1],
    }
    cases = {}
    for number in range(120):
        generator = np.random.default_rng([11, number])
        options = {name: choices[int(generator.integers(len(choices)))] for name, choices in values.items()}
        if options["rule"] == "published":
            options |= {"block": None, "pull": 0.0, "correct_prior": False}
        if options["policy"] != "paced":
            options["slack"] = None
        if options["nesterov"] and options["momentum"] == 0.0:
            options["nesterov"] = False
        if options["policy"] != "paced" and options["ratio"] > options["labels"]:
            options["ratio"] = 0.5
        late = [0, 1, wa.who.Between(0, 4)][int(generator.integers(3))]
        options = {name: value for name, value in options.items() if value is not None}
        cases[f"number {number}"] = fixed("batch-norm", "wise", late, lr=0.02, **options)
    return cases


@group("inputs of every shape")
def _inputs() -> dict[str, Case]:
    cases = {}
    for net, fast in itertools.product(("text", "pair", "tabular", "folded", "tied"), ("plain", "fp32", "bf16")):
        cases[f"{net}, {fast}"] = fixed(net, "wise", wa.who.Between(0, 2), **ASKS, **FAST[fast])
        cases[f"{net}, {fast}, tent"] = fixed(net, "tent", lr=0.02, **FAST[fast])
    sizes: dict[str, Callable[[int], int]] = {
        "one sample": lambda number: 1,
        "sizes that change": lambda number: 2 + 3 * number % 7,
        "two samples": lambda number: 2,
    }
    for (name, size), fast, mode in itertools.product(
        sizes.items(), ("plain", "fp32"), ("mixed", "ema", "source", "batch")
    ):
        single = name == "one sample"
        if not (single and mode == "batch"):
            case = fixed("batch-norm", "wise", 1, **ASKS, statistics=mode, **FAST[fast])
            cases[f"{name}, {mode}, {fast}"] = Case(case.net, case.method, case.options, size=size)
    for net, size in itertools.product(("layer-norm", "group-norm"), sizes):
        case = fixed(net, "wise", **ASKS)
        cases[f"{size}, {net}"] = Case(case.net, case.method, case.options, size=sizes[size])
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    for fast in ("plain", "fp32", "bf16"):
        kept: Options = {**ASKS, **FAST[fast]}
        # Labels are over the classes that are left, in this order.
        three = Case(
            "batch-norm",
            "wise",
            lambda kept=kept: {
                **kept,
                "classes": [4, 1, 3],
                "annotator": wa.who.Oracle(lambda query: nets.truth(query) % 3),
            },
        )
        cases[f"three of the classes, {fast}"] = three
        cases[f"mean and std, {fast}"] = fixed("batch-norm", "wise", 2, **kept, mean=mean, std=std)
        cases[f"head by name, {fast}"] = fixed("residual", "wise", **kept, head="fc")
    for method in ("tent", "eatta", "roid", "cotta", "cema"):
        cases[f"mean and std, {method}"] = method_case(method, "batch-norm", mean=mean, std=std)
        if method != "eatta":
            cases[f"three of the classes, {method}"] = method_case(method, "batch-norm", classes=[4, 1, 3])
    named = fixed("batch-norm", "wise", 1, **ASKS)
    cases["batches with ids and facts"] = Case(
        "batch-norm",
        "wise",
        named.options,
        wrap=lambda x, number: wa.Batch(x, ids=[f"{number}/{i}" for i in range(len(x))], meta={"domain": number // 3}),
    )
    cases["answers by hand"] = Case("batch-norm", "wise", lambda: {**ASKS}, turn=by_hand)
    cases["answers by hand, fp32"] = Case("batch-norm", "wise", lambda: {**ASKS, "precision": "fp32"}, turn=by_hand)
    return cases


@group("annotators")
def _annotators() -> dict[str, Case]:
    def moody(query: wa.Query) -> Any:
        mood = nets.truth(query)
        return {0: wa.CANT_TELL, 1: wa.SKIP, 2: None}.get(mood, wa.Answer(mood, by="me", weight=0.5))

    def sure(query: wa.Query) -> Any:
        return wa.CANT_TELL if nets.truth(query) == 2 else nets.truth(query)

    kinds: dict[str, Callable[[], wa.who.Annotator]] = {
        "geometric delays": lambda: wa.who.Delayed(oracle(), wa.who.Geometric(2.0), seed=3),
        "poisson delays": lambda: wa.who.Delayed(oracle(), wa.who.Poisson(1.5)),
        "noise": lambda: wa.who.Noisy(oracle(), rate=0.5, classes=nets.CLASSES, seed=2),
        "late noise": lambda: wa.who.Delayed(wa.who.Noisy(oracle(), rate=0.5, classes=nets.CLASSES), 2),
        "a function that cannot always tell": lambda: wa.who.Callback(sure),
        "a function that skips, waits and weighs": lambda: wa.who.Callback(moody),
        "a teacher": lambda: wa.who.Teacher(nets.make("batch-norm", seed=5)),
        "a teacher that is free": lambda: wa.who.Teacher(nets.make("batch-norm", seed=5), cost=0),
    }
    cases = {}
    for (name, annotator), fast in itertools.product(kinds.items(), ("plain", "fp32")):
        for expires in (None, 0):
            cases[f"{name}, {fast}, {expires}"] = Case(
                "batch-norm",
                "wise",
                lambda annotator=annotator, fast=fast, expires=expires: {
                    **ASKS,
                    "annotator": annotator(),
                    "expires_after": expires,
                    **FAST[fast],
                },
            )

    def people(adapter: wa.Adapter, inputs: Any, number: int) -> wa.Prediction:
        """Somebody looks at one question a batch and answers every second one, late."""
        out = adapter.step(inputs)
        inbox = adapter.annotator
        assert isinstance(inbox, wa.who.Inbox)
        for query in inbox.open(limit=1):
            if number % 2:
                inbox.put(query.id, nets.truth(query))
        return out

    def others(adapter: wa.Adapter, inputs: Any, number: int) -> wa.Prediction:
        """Answers, looks and questions that are given up, between the batches."""
        out = adapter.predict(inputs)
        adapter.show([query.id for query in out.queries if number % 3 == 0])
        adapter.learn(out)
        waiting = [query for query in adapter.open if not query.id.startswith(f"{number}-")]
        if number % 4 == 0:
            adapter.give_up([query.id for query in waiting[:1]])
        elif waiting:
            adapter.answer({waiting[-1].id: nets.truth(waiting[-1])})
        return out

    for fast, expires in itertools.product(("plain", "fp32"), (None, 2)):
        given: Options = {**ASKS, "expires_after": expires, **FAST[fast]}
        cases[f"an inbox, {fast}, {expires}"] = Case(
            "batch-norm", "wise", lambda given=given: {**given, "annotator": wa.who.Inbox()}, turn=people
        )
        cases[f"answers in between, {fast}, {expires}"] = Case(
            "batch-norm", "wise", lambda given=given: dict(given), turn=others
        )
    return cases


@group("guard, shadow and freezing")
def _guarded() -> dict[str, Case]:
    cases = {}
    tight: Options = {"window": 16, "every": 2, "share": 0.1, "classes": 0.9, "entropy": 0.5, "agree": 0.95}
    for method, fast in itertools.product(("tent", "roid", "eatta", "wise"), ("plain", "fp32")):
        fierce = {"lr": 0.5} if method != "roid" else {"lr": 0.3}
        for name, guard in {"by default": {}, "tight": tight}.items():
            free = method in UNLABELLED
            cases[f"{method}, guard {name}, {fast}"] = Case(
                "batch-norm",
                method,
                lambda method=method, fast=fast, guard=guard, fierce=fierce, free=free: {
                    **needed(method, "batch-norm"),
                    **fierce,
                    **FAST[fast],
                    "guard": wa.Guard(**guard),
                    **({} if free else {"annotator": oracle(1)}),
                },
                length=14,
            )
        cases[f"{method}, guard is True, ema, {fast}"] = method_case(
            method, "batch-norm", guard=True, statistics="ema", **FAST[fast]
        )
        cases[f"{method}, shadow, {fast}"] = method_case(method, "batch-norm", shadow=True, **FAST[fast])

    def frozen(adapter: wa.Adapter, number: int, make: Make) -> wa.Adapter:
        if number in (4, 7):
            adapter.freeze(number == 4)
        return adapter

    def back(adapter: wa.Adapter, number: int, make: Make) -> wa.Adapter:
        if number == 4:
            adapter.reset()
        if number == 6:
            adapter.reset(policy=True, account=True)
        return adapter

    def anew(adapter: wa.Adapter, number: int, make: Make) -> wa.Adapter:
        if number in (4, 7):
            adapter.restart(account=number == 4)
        return adapter

    def beside(adapter: wa.Adapter, number: int, make: Make) -> wa.Adapter:
        inputs = nets.batch("batch-norm", 50 + number, 2 + number % 3)
        adapter.predict(inputs, ask=False, learn=False)
        if number % 3 == 0:
            adapter.predict(nets.batch("batch-norm", 70 + number))  # never learned
        return adapter

    def audited(adapter: wa.Adapter, number: int, make: Make) -> wa.Adapter:
        if adapter.guard is not None:
            for right in (number < 5, True):
                adapter.guard.audit(right)
        return adapter

    happenings: dict[str, Between] = {
        "frozen for a while": frozen,
        "reset": back,
        "restarted": anew,
        "plain inference beside it": beside,
        "audited": audited,
    }
    for (name, between), fast, mode in itertools.product(
        happenings.items(), ("plain", "fp32"), ("batch", "mixed", "ema", "renorm")
    ):
        guard = {"guard": True} if name == "audited" else {}
        case = fixed("batch-norm", "wise", wa.who.Between(0, 3), **ASKS, statistics=mode, **FAST[fast])
        cases[f"{name}, {mode}, {fast}"] = Case(
            case.net,
            case.method,
            lambda case=case, guard=guard: {
                **case.options(),
                **({"guard": wa.Guard(audits=4, window=16)} if guard else {}),
            },
            between=between,
        )
    for method, (name, between) in itertools.product(
        ("tent", "roid", "sar", "eatta", "hiltta", "simatta"), happenings.items()
    ):
        if name in ("frozen for a while", "reset", "plain inference beside it"):
            case = method_case(method, "batch-norm")
            cases[f"{name}, {method}"] = Case(case.net, case.method, case.options, length=7, between=between)
    return cases


@group("states saved and loaded")
def _resumed() -> dict[str, Case]:
    """Goes on, from batch 5 on, in a second adapter that has loaded the state of the first."""

    def resumed(adapter: wa.Adapter, number: int, make: Make) -> wa.Adapter:
        if number != 5:
            return adapter
        other = make()
        other.load_state_dict(adapter.state_dict())
        return other

    cases = {}

    def add(name: str, case: Case) -> None:
        cases[name] = Case(case.net, case.method, case.options, length=9, between=resumed, turn=case.turn)

    for method, fast in itertools.product(METHODS, ("plain", "fp32")):
        add(f"{method}, {fast}", method_case(method, "batch-norm", wa.who.Between(0, 3), **FAST[fast]))
    for mode, fast, context in itertools.product(
        ("batch", "mixed", "ema", "renorm"), ("plain", "bf16"), ("own", "current")
    ):
        add(
            f"wise, {mode}, {context}, {fast}",
            fixed("batch-norm", "wise", 3, **ASKS, statistics=mode, context=context, **FAST[fast]),
        )
    more: dict[str, Options] = {
        "guard": {"guard": True},
        "published": {"rule": "published"},
        "roid": {"objective": "roid"},
        "block": {"block": "body.3"},
        "selected only": {"only_selected": True},
        "authors": {"preset": "authors", "length": 9},
        "balanced": {"policy": "uniform", "ratio": 1.0, "selector": "k-margin", "slack": None},
        "random": {"policy": "random", "slack": None},
        "weighted and limited": {"late_weight": 2.0, "late_limit": 3, "expires_after": 6},
    }
    for name, options in more.items():
        case = fixed("batch-norm", "wise", wa.who.Between(0, 4), **{**ASKS, **options})
        if "guard" in options:
            case = Case("batch-norm", "wise", lambda case=case: {**case.options(), "guard": wa.Guard(window=16)})
        add(name, case)
    for net in ("layer-norm", "text", "pair", "tied"):
        add(net, fixed(net, "wise", wa.who.Between(0, 3), **ASKS))
    return cases


@group("methods composed by hand")
def _composed() -> dict[str, Case]:
    m, how, when, what = wa.methods, wa.how, wa.when, wa.what
    made: dict[str, Callable[[], Any]] = {
        "tent with adam": lambda: m.tent(lr=0.01, optimizer="adam"),
        "eta with adam": lambda: m.eta(lr=0.01, optimizer="adam", epsilon=0.9),
        "sar that restores": lambda: m.sar(lr=0.2, restore_below=0.6),
        "cotta, one way": lambda: m.cotta(
            lr=0.01, optimizer="adam", threshold=0.92, views=2, symmetric=False, restore=0.1
        ),
        "roid without consistency": lambda: m.roid(lr=0.02, consistency=False),
        "roid without a prior": lambda: m.roid(lr=0.02, correct_prior=False, pull=0.0),
        "eatta on stages": lambda: m.eatta(lr=0.02, adapt=["norm", "layer1", "!layer4"]),
        "eatta without balance": lambda: m.eatta(lr=0.02, balance=False, optimizer="adam"),
        "hiltta on ratios": lambda: m.hiltta(objective=how.LikelihoodRatio(consistency=False), rates=(1e-3, 0.1)),
        "simatta that keeps all": lambda: m.simatta(size=None, steps=2, batch=6, lr=0.002, e_l=0.5, e_h=0.3),
        "wise, an update": lambda: m.Method(
            "mine", how.TwoStep(lr=0.02), policy=when.BudgetPaced(ratio=0.5), anchor=wa.Anchor(0.8)
        ),
        "published update": lambda: m.Method(
            "mine", how.PublishedTwoStep(lr=0.02, second_lr=0.01), policy=when.Uniform(0.5), selector=what.Margin()
        ),
        "descend on all": lambda: m.Method("mine", how.Descend(how.Entropy(), adapt="all", lr=0.01)),
        "descend on the head": lambda: m.Method("mine", how.Descend(how.Entropy(below=0.8), adapt="head", lr=0.01)),
        "descend, pulled": lambda: m.Method("mine", how.Descend(how.ReliableEntropy(epsilon=0.9), lr=0.05, pull=0.1)),
        "nothing but questions": lambda: m.Method("mine", how.NoUpdate(), policy=when.Uniform(0.5)),
        "mixed statistics": lambda: m.Method("mine", how.Descend(lr=0.02), statistics="mixed"),
    }
    cases = {}
    for name, method in made.items():
        for fast in ("plain", "fp32"):
            cases[f"{name}, {fast}"] = Case(
                "residual",
                method,
                lambda method=method, fast=fast: {
                    **FAST[fast],
                    **({} if isinstance(method().policy, wa.when.Never) else {"annotator": oracle(1)}),
                },
                length=6,
            )
    return cases


SHARED = "batches that threads share"


@group(SHARED)
def _wide() -> dict[str, Case]:
    cases = {}
    for method in ("bn", "tent", "eatta", "wise"):
        for fast in FAST:
            case = method_case(method, "wide", 1, **FAST[fast])
            cases[f"{method}, {fast}"] = Case(case.net, case.method, case.options, length=3, size=lambda number: 32)
    for mode in ("mixed", "ema", "renorm"):
        case = method_case("wise", "wide", 1, statistics=mode)
        cases[f"wise, {mode}"] = Case(case.net, case.method, case.options, length=3, size=lambda number: 32)
    return cases
