"""Are the methods listed as they are, and do presets fill in what was not given?"""

from __future__ import annotations

import inspect
import sys
import types
from importlib.metadata import EntryPoint
from operator import attrgetter
from typing import Any

import pytest
from methods import small

import wise_atta as wa
from wise_atta import how, what, when
from wise_atta.anchor import Anchor

BENCHMARKS = ("imagenet-c", "imagenet-r", "imagenet-k", "imagenet-a", "cifar10-c")
ORDER = ["source", "bn", "tent", "eta", "eata", "sar", "cotta", "roid", "simatta", "hiltta", "cema", "eatta", "wise"]


def test_the_list_names_every_registered_method_in_order() -> None:
    names = [row.name for row in wa.methods.list()]
    assert names == [name for name in ORDER if name in wa.methods.METHODS]
    assert set(names) == set(wa.methods.METHODS)


def test_rows_say_what_a_method_takes_and_adapts() -> None:
    rows = {row.name: row for row in wa.methods.list()}
    assert (rows["eata"].needs, rows["tent"].needs) == ("source", "")
    assert rows["cotta"].adapts == "all"
    with pytest.raises(AttributeError):
        rows["eta"].name = "other"


@pytest.mark.parametrize(
    ("method", "preset", "expected"),
    [
        ("tent", "imagenet-c", {"lr": 2.5e-4, "kind": "sgd"}),
        ("tent", "cifar10-c", {"lr": 1e-3, "kind": "adam"}),
        ("eta", "imagenet-r", {"lr": 2.5e-4, "kind": "sgd", "objective.redundancy.epsilon": 0.05}),
        ("eta", "cifar10-c", {"lr": 1e-3, "kind": "adam", "objective.redundancy.epsilon": 0.4}),
        (
            "eata",
            "imagenet-k",
            {"objective.weight": 2000, "objective.objective.redundancy.epsilon": 0.05, "lr": 2.5e-4},
        ),
        ("eata", "cifar10-c", {"objective.weight": 1, "objective.objective.redundancy.epsilon": 0.4, "lr": 1e-3}),
        ("eata", "cifar10-c", {"objective.samples": 2000, "kind": "adam"}),
        ("sar", "cifar10-c", {"lr": 1e-3, "nesterov": False}),
        ("roid", "imagenet-a", {"lr": 2.5e-4, "kind": "sgd"}),
        ("roid", "cifar10-c", {"lr": 1e-3, "kind": "adam"}),
        ("cotta", "imagenet-c", {"lr": 0.01, "kind": "sgd", "threshold": 0.1, "returning.probability": 0.001}),
        ("cotta", "cifar10-c", {"lr": 1e-3, "kind": "adam", "threshold": 0.92, "returning.probability": 0.01}),
    ],
)
def test_a_preset_fills_in_published_constants(method: str, preset: str, expected: dict[str, Any]) -> None:
    needs = {"source": small.batches(1)} if method == "eata" else {}
    update = wa.methods.get(method, preset=preset, **needs).update
    for path, value in expected.items():
        found: Any = update
        for part in path.split("."):
            found = getattr(found, part)
        assert found == value, path


@pytest.mark.parametrize(
    ("method", "preset", "expected"),
    [
        ("simatta", None, {"policy.account.ratio": 3, "labels": 3}),
        ("hiltta", None, {"policy.account.ratio": 3, "labels": 3, "update.kind": "sgd"}),
        ("hiltta", "cifar10-c", {"update.kind": "adam"}),
        ("cema", None, {"update.teacher_cost": 1, "update.ready": 256, "selector.redundancy.epsilon": 0.05}),
        ("cema", "cifar10-c", {"selector.redundancy.epsilon": 0.4}),
        ("eatta", None, {"policy.account.ratio": 1, "labels": 1}),
        ("eatta", "cifar10-c", {"update.lr": 1e-3, "update.kind": "adam"}),
        ("wise", None, {"policy.account.ratio": 0.2, "labels": 1, "update.lr": 2.5e-4, "statistics": "mixed"}),
        ("wise", "imagenet-c", {"update.lr": 2.5e-4, "update.head_lr": 2.5e-4, "statistics": "batch"}),
        ("wise", "imagenet-r", {"update.lr": 1e-3}),
        ("wise", "imagenet-k", {"update.lr": 1e-3}),
        ("wise", "imagenet-a", {"update.lr": 5e-3}),
        ("wise", "cifar10-c", {"update.lr": 1e-3, "policy.account.credit": 0, "statistics": "batch"}),
        ("wise", "paper/imagenet-a", {"update.lr": 5e-3}),
        ("wise", "authors", {"update.lr": 5e-4, "update.second_lr": 2e-4}),
        ("wise", "authors/imagenet-r", {"update.lr": 1e-3, "update.second_lr": 1e-3}),
        ("wise", "authors/imagenet-k", {"update.lr": 6e-4, "update.second_lr": 3e-4}),
        ("wise", "authors/imagenet-a", {"update.lr": 1e-3, "update.second_lr": 4e-3}),
    ],
)
@pytest.mark.filterwarnings("ignore:preset='paper'")
def test_an_active_method_has_its_published_constants(
    method: str, preset: str | None, expected: dict[str, Any]
) -> None:
    needs = {"teacher": small.net()} if method == "cema" else {}
    if str(preset).startswith("authors"):
        needs["length"] = 10
    made = wa.methods.get(method, preset=preset, **needs)
    for path, value in expected.items():
        assert attrgetter(path)(made) == value, path


PARTS: list[tuple[str, Any, dict[str, str]]] = [
    ("eta", how.ReliableEntropy, {}),
    ("eta", how.Redundancy, {"momentum": "mean_momentum"}),
    ("eata", how.SourcePenalty, {"weight": "fisher_weight", "samples": "fisher_samples"}),
    ("eata", how.fisher, {"samples": "fisher_samples"}),
    ("sar", how.SharpnessAware, {}),
    ("cotta", how.TeacherStudent, {"restore": ""}),
    ("cotta", how.Restore, {"probability": "restore"}),
    ("roid", how.LikelihoodRatio, {}),
    ("simatta", how.Anchored, {}),
    ("simatta", what.Clusters, {}),
    ("hiltta", how.Candidates, {}),
    ("cema", how.Distillation, {}),
    ("cema", how.Tutor, {"lr": "teacher_lr"}),
    ("cema", what.Band, {}),
    ("eatta", how.Balanced, {}),
    ("eatta", what.Perturbation, {"balance": ""}),
    ("wise", how.TwoStep, {"lr": "", "objective": "", "train_head": ""}),
    ("wise", Anchor, {"momentum": "anchor_momentum"}),
]


@pytest.mark.parametrize(("method", "part", "names"), PARTS)
def test_a_part_by_itself_has_the_constants_of_its_method(method: str, part: Any, names: dict[str, str]) -> None:
    theirs = inspect.signature(wa.methods.METHODS[method]).parameters
    own = {
        names.get(name, name): p.default
        for name, p in inspect.signature(part).parameters.items()
        if p.default is not p.empty
    }
    shared = own.keys() & theirs.keys()
    assert shared and {name: own[name] for name in shared} == {name: theirs[name].default for name in shared}


def test_cotta_is_symmetric_on_imagenet_alone() -> None:
    assert wa.methods.cotta(preset="imagenet-c").update.symmetric
    assert not wa.methods.cotta(preset="cifar10-c").update.symmetric


def test_the_defaults_are_those_of_imagenet_c() -> None:
    for name in ("tent", "eta", "sar", "roid", "cotta"):
        assert repr(wa.methods.get(name).update) == repr(wa.methods.get(name, preset="imagenet-c").update)


def test_what_is_given_wins_over_the_preset() -> None:
    update = wa.methods.eta(preset="cifar10-c", epsilon=0.1).update
    assert (update.objective.redundancy.epsilon, update.lr) == (0.1, 1e-3)


@pytest.mark.parametrize("preset", ["paper", "paper/imagenet-c", "authors", "authors/imagenet-r"])
@pytest.mark.parametrize("policy", ["uniform", "random", "always", "never", when.Uniform(0.2)])
def test_another_policy_wins_over_that_of_a_preset(policy: Any, preset: str) -> None:
    length = {"length": 10} if preset.startswith("authors") else {}
    made, plain = (
        wa.methods.wise(preset=name, policy=policy, **given) for name, given in ((preset, length), (None, {}))
    )
    assert repr(made.policy) == repr(plain.policy)
    assert made.restarts is preset.startswith("authors") and made.statistics == "batch"


def test_a_length_with_another_policy_is_taken_where_it_draws_by_it() -> None:
    assert wa.methods.wise(preset="authors", policy="random", exact=True, length=10).policy.length == 10
    with pytest.raises(wa.errors.BadConfig, match="length"):
        wa.methods.wise(policy="uniform", length=10)
    with pytest.raises(wa.errors.BadConfig, match="policy object itself"):
        wa.methods.wise(preset="paper", policy=when.BudgetPaced(0.2))


@pytest.mark.parametrize("name", ORDER)
def test_every_method_has_every_preset_and_refuses_others(name: str) -> None:
    needs = {"eata": {"source": small.batches(1)}, "cema": {"teacher": small.net()}}.get(name, {})
    for preset in BENCHMARKS:
        assert wa.methods.get(name, preset=preset, **needs).name == name
    with pytest.raises(wa.errors.UnknownName, match="imagenet-c"):
        wa.methods.get(name, preset="imagenet", **needs)


def test_signatures_are_those_of_the_methods_themselves() -> None:
    assert {"preset", "lr", "epsilon"} <= set(inspect.signature(wa.methods.eta).parameters)
    assert "seed" in wa.methods.options("roid")
    assert {"lr", "horizon"} <= set(wa.methods.options("wise")) and "pacing" not in wa.methods.options("wise")


def test_a_misspelt_option_is_named_with_the_nearest_of_method_and_policy() -> None:
    with pytest.raises(wa.errors.UnknownName, match="option of method 'wise': 'lrr'"):
        wa.methods.get("wise", lrr=1)
    with pytest.raises(wa.errors.UnknownName, match="Did you mean 'horizon'"):
        wa.methods.get("eatta", horizn=3)
    with pytest.raises(wa.errors.BadInput, match="not a str"):
        wa.adapt("resnet50", "wise")  # type: ignore[arg-type]


def test_a_ratio_that_always_would_not_keep_is_refused() -> None:
    for options in ({"ratio": 0.3}, {"ratio": 1, "labels": 3}):
        with pytest.raises(wa.errors.BadConfig, match=r"'always' asks for . \(labels\) of every batch"):
            wa.methods.get("wise", policy="always", **options)
    with pytest.raises(wa.errors.BadConfig, match="all that its selector picks"):
        wa.methods.get("cema", policy="always", ratio=0.3, teacher=small.net())
    for options in ({}, {"ratio": 1}, {"ratio": 2.0, "labels": 2}):
        assert type(wa.methods.get("wise", policy="always", **options).policy).__name__ == "Always"


# -- methods of parts, and of one's own -------------------------------------------------------------------------------


def test_a_method_takes_its_parts_as_objects() -> None:
    update, policy = how.TwoStep(lr=1e-3), when.BudgetPaced(ratio=0.3)
    made = wa.methods.wise(update=update, policy=policy, selector=what.Margin(), anchor=Anchor(0.5), seed=3)
    assert made.update is update and made.policy is policy and made.anchor.momentum == 0.5
    assert type(made.selector) is what.Margin
    assert wa.methods.wise(update=update, preset="authors/imagenet-a", length=9).update is update


def test_a_ratio_beside_a_policy_object_is_refused() -> None:
    with pytest.raises(wa.errors.BadConfig, match=r"ratio=0\.1: give it to the policy object itself"):
        wa.methods.wise(ratio=0.1, policy=when.Uniform(0.2))


def test_an_option_of_a_part_that_came_as_an_object_is_refused() -> None:
    with pytest.raises(wa.errors.BadConfig, match="lr: give these to the update object itself"):
        wa.methods.get("tent", update=how.Descend(), lr=0.1)
    with pytest.raises(wa.errors.BadConfig, match="sigma: give these to the selector object itself"):
        wa.methods.eatta(selector=what.Margin(), sigma=0.1)


def test_a_part_without_a_registry_is_given_as_an_object() -> None:
    with pytest.raises(wa.errors.BadConfig, match="update='Descend': give an object"):
        wa.methods.get("tent", update="Descend")


def test_options_reach_every_part_that_has_them() -> None:
    made = wa.methods.cema(teacher=small.net(), below=0.3, momentum=0.5, lr=0.1, teacher_lr=0.2, seed=4, ratio=1)
    parts = made.update, made.update.tutor, made.selector
    assert {part.below for part in parts} == {0.3} and {part.momentum for part in parts[:2]} == {0.5}
    assert (made.update.lr, made.update.tutor.lr) == (0.1, 0.2)
    assert made.selector.seed == made.update.replay.seed == 4
    made = wa.methods.get("wise", anchor_momentum=0.7, momentum=0.5, objective="roid", seed=2)
    assert (made.anchor.momentum, made.update.momentum, made.update.objective.seed) == (0.7, 0.5, 2)


def mine(*, rate: float = 0.5) -> wa.methods.Method:
    return wa.methods.Method("mine", how.Descend(lr=rate))


def nothing() -> None:
    return None


def test_a_method_of_one_s_own_is_named_by_module_and_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_package_of_mine")
    module.mine, module.nothing, module.number = mine, nothing, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    adapter = wa.adapt(small.net(), "a_package_of_mine:mine", rate=0.25, statistics="source")
    assert (adapter.update.lr, adapter.classifier.statistics) == (0.25, "source")
    assert wa.methods.options("a_package_of_mine:mine") == ["rate"]
    with pytest.raises(wa.errors.UnknownName, match="option of method 'a_package_of_mine:mine': 'rat'"):
        wa.methods.get("a_package_of_mine:mine", rat=1)
    for name, message in {
        "a_package_of_mine:nothing": "gave a NoneType: a factory returns a Method",
        "a_package_of_mine:number": "is a int: name a function",
        "a_package_of_mine:other": "no attribute 'other'",
        "a_package_of_mine:": "module:factory",
        "not_installed:mine": "No module named 'not_installed'",
    }.items():
        with pytest.raises(wa.errors.BadConfig, match=message):
            wa.methods.get(name)


def test_a_package_can_offer_methods_but_not_replace_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a_package_of_mine")
    module.mine = mine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    offered = [EntryPoint(name, "a_package_of_mine:mine", "wise_atta.methods") for name in ("mine", "tent")]
    monkeypatch.setattr("wise_atta.methods.entry_points", lambda group: offered)
    assert (wa.methods.get("mine").name, wa.methods.get("tent").name) == ("mine", "tent")
    with pytest.raises(wa.errors.UnknownName, match="Did you mean 'mine'"):
        wa.methods.get("mime")
