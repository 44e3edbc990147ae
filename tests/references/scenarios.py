"""Scenarios: five batches each, on which together every constant of a method matters.

Arguments are those of the reference, except that networks, labels and optimizers are described: `grants` lists the
labels of each batch, `lr`, `momentum`, `nesterov`, `optimizer` and the like say what the optimizer is.
"""

from __future__ import annotations

from typing import Any

from references import nets
from wise_atta.reference import sar as sar_reference

Scenarios = list[tuple[str, dict[str, Any]]]


def source() -> Scenarios:
    return [
        ("cnn", {"net": nets.cnn(), "batches": nets.batches()}),
        ("vit", {"net": nets.vit(), "batches": nets.batches()}),
    ]


def bn() -> Scenarios:
    return [("cnn", {"net": nets.cnn(), "batches": nets.batches()})]


def tent() -> Scenarios:
    return [
        ("defaults", {"net": nets.cnn(), "batches": nets.batches()}),
        ("vit", {"net": nets.vit(), "batches": nets.batches()}),
        ("adam", {"net": nets.cnn(), "batches": nets.batches(), "optimizer": "adam", "lr": 1e-3, "eps": 1e-3}),
    ]


def eta() -> Scenarios:
    ten = {"net": nets.cnn(), "batches": nets.batches(seed=1), "redundancy": 0.4}
    return [
        ("defaults", {"net": nets.cnn(classes=1000, scale=10.0), "batches": nets.batches(n=64)}),
        ("ten classes", ten),
        ("vit", {"net": nets.vit(seed=19), "batches": nets.batches(seed=19), "redundancy": 0.4}),
        ("adam", {**ten, "optimizer": "adam", "lr": 1e-3, "eps": 1e-3}),
    ]


def eata() -> Scenarios:
    source = nets.batches(seed=1000, count=3, n=16, shift=0.0)
    ten = {"net": nets.cnn(), "batches": nets.batches(seed=1), "source": source, "redundancy": 0.4}
    return [
        ("defaults", {"net": nets.cnn(classes=1000, scale=10.0), "batches": nets.batches(n=64), "source": source}),
        ("ten classes", ten),
        ("adam", {**ten, "optimizer": "adam", "lr": 1e-3, "eps": 1e-3, "penalty": 1.0}),
    ]


def sar() -> Scenarios:
    return [
        ("defaults", {"net": nets.cnn(), "batches": nets.batches()}),
        ("vit", {"net": nets.vit(), "batches": nets.batches(), "frozen": sar_reference.VIT_LAST, "lr": 1e-3}),
        ("restores at 0.2", {"net": nets.cnn(scale=31.0), "batches": nets.batches(seed=71)}),
        ("nearly restores", {"net": nets.cnn(scale=34.0), "batches": nets.batches(seed=4)}),
    ]


def cotta() -> Scenarios:
    random = {"views": nets.view(), "uniforms": nets.uniforms()}
    cifar = {"threshold": 0.92, "restore": 0.01, "back": 0.0, "optimizer": "adam", "lr": 1e-3, "eps": 1e-3}
    # Both begin on a batch that needs views: a student that is its own teacher has no gradient but rounding.
    return [
        (
            "defaults",
            {"net": nets.cnn(classes=1000, scale=2.7), "batches": nets.batches(seed=9, n=12, size=4), **random},
        ),
        (
            "ten classes, adam",
            {"net": nets.cnn(scale=30.0), "batches": nets.batches(seed=2, n=12, size=4), **random, **cifar},
        ),
        ("vit", {"net": nets.vit(), "batches": nets.batches(n=4), **random, "threshold": 0.92, "count": 8}),
    ]


def roid() -> Scenarios:
    augment = nets.view()
    common = {"net": nets.cnn(), "batches": nets.batches(), "view": lambda number, x: augment(number, 1, x)}
    return [
        ("defaults", common),
        ("vit", {**common, "net": nets.vit()}),
        ("large steps", {**common, "lr": 2.5e-3}),
        # Fewer samples than classes: the prior is smoothed by 1/n.
        ("few samples", {**common, "batches": nets.batches(n=6)}),
        ("adam", {**common, "optimizer": "adam", "lr": 1e-3, "eps": 1e-3}),
    ]


def simatta() -> Scenarios:
    pick = nets.picks()
    common = {
        "labels": nets.truth(),
        "uniforms": nets.uniforms(),
        "centres": lambda number, points, weights, k: pick(number, len(points), k).tolist(),
        "grants": [3] * 5,
    }
    small = {**common, "net": nets.cnn(width=3, scale=40.0), "batches": nets.batches(seed=6, n=24, size=4), "size": 10}
    return [
        ("small", small),
        ("defaults", {**common, "net": nets.cnn(width=2, scale=150.0), "batches": nets.batches(n=130, size=4)}),
        # Here it decides what is asked for that a candidate weighs 1 beside the anchors, and not less.
        ("light candidates", {**small, "batches": nets.batches(seed=1, n=24, size=4)}),
        ("budgeted", {**small, "grants": [0, 10, 0, 1, 2]}),
        ("small buffer", {**small, "buffer": 10}),
        (
            "vit",
            {
                **common,
                "net": nets.vit(scale=6.0),
                "head": "head",
                "batches": nets.batches(n=8),
                "size": 4,
                "training_steps": 2,
            },
        ),
    ]


def hiltta() -> Scenarios:
    common = {"batches": nets.batches(), "labels": nets.truth(), "grants": [3] * 5}
    sharp = {**common, "labels": nets.truth(2)}
    return [
        ("defaults", {**common, "net": nets.cnn()}),
        ("vit", {**common, "net": nets.vit(), "head": "head"}),
        ("budgeted", {**common, "net": nets.cnn(), "grants": [0, 2, 0, 3, 0]}),
        # Between them these two keep each candidate once.
        ("sharp", {**sharp, "net": nets.cnn(scale=48.0), "batches": nets.batches(seed=131)}),
        ("sharper", {**sharp, "net": nets.cnn(scale=96.0), "batches": nets.batches(seed=65)}),
        ("large eps", {**common, "net": nets.cnn(), "eps": 1e-3}),
    ]


def cema() -> Scenarios:
    replay = nets.picks()
    many, ten = nets.cnn(classes=1000, width=8, scale=16.0), nets.cnn(scale=8.0)
    # Nobody wants the fourth batch: it repeats one picture seen before, and so the student learns from memory alone.
    long = nets.batches(n=288, size=4, kinds=100, shift=0.1)
    long = [long[0], long[1][:128], long[2][:128], long[1][1:2].repeat(8, 1, 1, 1), long[4][:96]]
    short = nets.batches(seed=359, n=48, size=4, kinds=20)
    short[3] = short[0][:1].repeat(6, 1, 1, 1)
    small = {
        "net": ten,
        "teacher": nets.relative(ten),
        "batches": short,
        "replay": replay,
        "redundancy": 0.5,
        "e_min": 0.03,
        "queue": 4,
        "replayed": 10,
        "replay_from": 20,
        "replayed_alone": 12,
        "buffer": 26,
    }
    # Default sizes on a tiny net call for smaller steps, or the run is chaotic; `small` has the default learning rates.
    gentle = {"lr": 2.5e-4, "teacher_lr": 2.5e-5}
    return [
        ("small", small),
        ("small, later replay", {**small, "replay_from": 22}),
        ("small, budgeted", {**small, "grants": [9, 0, 5, 4, 20]}),
        (
            "default sizes",
            {"net": many, "teacher": nets.relative(many, amount=0.02), "batches": long, "replay": replay, **gentle},
        ),
    ]


def eatta() -> Scenarios:
    common = {"labels": nets.truth(), "noise": nets.normals(), "batches": nets.batches(seed=1), "grants": [1] * 5}
    return [
        ("defaults", {**common, "net": nets.cnn()}),
        ("vit", {**common, "net": nets.vit(), "head": "head"}),
        ("budgeted", {**common, "net": nets.cnn(), "grants": [0, 3, 0, 1, 2]}),
        ("published tensors", {**common, "net": nets.cnn(), "frozen": ("layer4",), "whole": ("layer1",)}),
        # Only a sharp head makes the order of the scores depend on how strong the noise is.
        ("sharp head", {**common, "net": nets.cnn(scale=100.0), "batches": nets.batches(seed=5)}),
        ("nothing sure", {**common, "net": nets.cnn(), "grants": [0, 1, 0, 1, 1], "fraction": 1e-9}),
    ]


def wise() -> Scenarios:
    common = {"labels": nets.truth(), "ties": nets.uniforms(), "noise": nets.normals(), "grants": [1, 0, 2, 3, 2]}
    paper = {**common, "net": nets.cnn(), "batches": nets.batches(seed=28)}
    authors = {**paper, "preset": "authors", "grants": [1, 0, 1, 1, 1]}
    several = {**authors, "grants": [1, 1, 0, 2, 1], "batches": nets.batches(seed=41)}
    return [
        ("paper", paper),
        ("paper, vit", {**paper, "net": nets.vit(), "head": "head"}),
        ("paper, entropy of all", {**paper, "entropy": "all"}),
        ("paper, head bias", {**paper, "head_part": "bias"}),
        ("paper, no head", {**paper, "head_part": "none"}),
        ("paper, norm unsupervised", {**paper, "supervise_norm": False}),
        ("paper, only selected batches", {**paper, "only_selected": True}),
        ("paper, block", {**paper, "block": "layer3"}),
        ("paper, pulled to the source", {**paper, "pull": 0.2}),
        ("paper, block pulled to the source", {**paper, "block": "layer3", "pull": 0.2}),
        ("paper, nothing sure, no head, pulled", {**paper, "fraction": 1e-9, "head_part": "none", "pull": 0.2}),
        ("paper, published tensors", {**paper, "frozen": ("layer4",), "whole": ("layer1",)}),
        ("paper, class rule", {**paper, "batches": nets.batches(seed=1), "class_rule": True}),
        ("paper, nothing sure", {**paper, "fraction": 1e-9}),
        (
            "paper, perturbed first",
            {
                **paper,
                "net": nets.cnn(scale=80.0),
                "batches": nets.batches(seed=34),
                "grants": [1, 2, 1, 1, 1],
                "perturbed_first": 2,
            },
        ),
        ("authors", authors),
        ("authors, vit", {**authors, "net": nets.vit(), "head": "head"}),
        ("authors, drift early", {**several, "perturbed_first": 1}),
        (
            "authors, sharp head",
            {**authors, "net": nets.cnn(scale=250.0), "batches": nets.batches(seed=28), "grants": [1] * 5},
        ),
        ("authors, entropy of all", {**authors, "entropy": "all"}),
        ("authors, full head", {**authors, "head_part": "full"}),
        ("authors, no head", {**authors, "head_part": "none"}),
        ("authors, norm unsupervised", {**authors, "supervise_norm": False}),
        ("authors, only selected batches", {**authors, "only_selected": True}),
        ("authors, no class rule", {**authors, "batches": nets.batches(), "class_rule": False}),
        ("authors, published tensors", {**authors, "frozen": ("layer4",), "whole": ("layer1",)}),
        ("authors, nothing sure", {**authors, "fraction": 1e-9}),
    ]


SCENARIOS = {
    function.__name__: function
    for function in (source, bn, tent, eta, eata, sar, cotta, roid, simatta, hiltta, cema, eatta, wise)
}

# Which scenarios show a constant that the first, of its preset if there are several, does not.
SHOWN_BY: dict[str, dict[str, Any]] = {
    "tent": {"beta1": ("adam",), "beta2": ("adam",), "eps": ("adam",)},
    "eta": {"beta1": ("adam",), "beta2": ("adam",), "eps": ("adam",)},
    "eata": {"beta1": ("adam",), "beta2": ("adam",), "eps": ("adam",)},
    "sar": {
        "average": ("nearly restores", "restores at 0.2"),
        "restore_below": ("restores at 0.2",),
    },
    "cotta": dict.fromkeys(("beta1", "beta2", "eps"), ("ten classes, adam",)),
    "roid": {
        "floor": ("large steps",),
        "beta1": ("adam",),
        "beta2": ("adam",),
        "eps": ("adam",),
    },
    "simatta": {"high": ("defaults",), "most": ("defaults",), "buffer": ("defaults",)},
    "hiltta": {
        "candidates": ("sharp", "sharper"),
        "average": ("sharp",),
        "eps": ("large eps",),
    },
    "cema": {"replay_from": ("small, later replay", "small")},
    "eatta": {"sigma": ("sharp head",)},
    "wise": {
        "paper": {
            "perturbed_first": ("paper, perturbed first",),
            "sigma": ("paper, perturbed first",),
            "pull": ("paper, pulled to the source",),
        },
        "authors": {"mu": ("authors, drift early",), "sigma": ("authors, sharp head",)},
    },
}
