"""Does every method compute what a slow reference computes that was written without seeing it, constant by constant?"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from methods import pairs

from wise_atta import methods

EQUAL = 1e-9

# How much is asked, at which price and by which chance: a scenario says so, it is no constant of a method.
GIVEN = {"ratio", "labels", "cost", "seed"}

# A tenth more would be no average, no probability.
AT_MOST_ONE = {"beta2", "teacher", "clip"}


def presets(name: str) -> tuple[str | None, ...]:
    return ("paper", "authors") if name == "wise" else (None,)


def changed(value: Any, factor: float, entry: int = 0) -> Any:
    if isinstance(value, tuple):
        return (*value[:entry], value[entry] * factor, *value[entry + 1 :])
    if isinstance(value, int):
        return value + max(1, round(0.1 * value)) * (1 if factor > 1 else -1)
    return value * factor


@pytest.mark.parametrize(
    ("name", "scenario"), [(name, scenario) for name in pairs.REFERENCES for scenario in pairs.scenarios(name)]
)
def test_five_steps_agree_in_every_parameter_prediction_and_question(name: str, scenario: str) -> None:
    ours = pairs.played(name, pairs.scenarios(name)[scenario])
    assert len(ours) == 5
    assert pairs.gap(ours, pairs.expected(name, scenario)) < EQUAL


CASES = [
    (name, preset, constant, factor)
    for name in pairs.REFERENCES
    for preset in presets(name)
    for constant in pairs.REFERENCES[name].constants(preset)
    for factor in (0.9, 1.1)
    if not (factor > 1 and constant in AT_MOST_ONE)
]


@pytest.mark.parametrize(("name", "preset", "constant", "factor"), CASES)
def test_a_tenth_of_any_constant_parts_them(name: str, preset: str | None, constant: str, factor: float) -> None:
    default = pairs.REFERENCES[name].constants(preset)[constant]
    shown_by = pairs.REFERENCES[name].SHOWN_BY
    shown_by = shown_by if preset is None else shown_by[preset]
    entries = range(len(default)) if isinstance(default, tuple) else range(1)
    for entry in entries:
        gaps = []
        for scenario in shown_by.get(constant, (preset or next(iter(pairs.scenarios(name))),)):
            given, theirs = pairs.scenarios(name)[scenario], pairs.expected(name, scenario)
            value = given.get(constant, default)
            if isinstance(value, tuple) and value[entry] not in [step.seen["rate"] for step in theirs]:
                continue  # a learning rate that was not kept here moves nothing
            ours = pairs.played(name, {**given, constant: changed(value, factor, entry)})
            gaps.append(pairs.final_gap(ours, theirs))
            if gaps[-1] > EQUAL:
                break
        assert max(gaps) > EQUAL, f"nobody notices {constant} times {factor}"


@pytest.mark.parametrize("name", pairs.REFERENCES)
def test_no_constant_of_a_method_is_left_out(name: str) -> None:
    options = {
        option
        for option, p in inspect.signature(methods.METHODS[name]).parameters.items()
        if isinstance(p.default, int | float) and p.default and not isinstance(p.default, bool)  # 0: not in use
    }
    compared = {
        to
        for preset in presets(name)
        for constant in pairs.REFERENCES[name].constants(preset)
        if isinstance(to := pairs.NAMES[name][constant], str)
    }
    assert options - compared - GIVEN - {"fisher_samples", "iterations"} == set()


def test_the_fisher_information_is_of_so_many_source_samples() -> None:
    given = pairs.scenarios("eata")["ten classes"]
    first, second, third = given["source"]
    theirs = pairs.reference("eata", {**given, "source": [first, second, third[:8]]})
    for samples, equal in ((40, True), (36, False), (44, False)):
        ours = pairs.played("eata", {**given, "samples": samples})
        assert (pairs.final_gap(ours, theirs) < EQUAL) == equal


@pytest.mark.parametrize("name", [name for name in pairs.NAMES if "nesterov" in pairs.NAMES[name]])
def test_the_other_kind_of_momentum_parts_them(name: str) -> None:
    scenario, given = next(iter(pairs.scenarios(name).items()))
    default = inspect.signature(methods.METHODS[name]).parameters["nesterov"].default
    ours = pairs.played(name, {**given, "nesterov": not default})
    assert pairs.final_gap(ours, pairs.expected(name, scenario)) > EQUAL


def test_sar_finds_the_rate_and_the_last_stage_of_a_vit_by_itself() -> None:
    given = {key: value for key, value in pairs.scenarios("sar")["vit"].items() if key in ("net", "batches")}
    assert pairs.gap(pairs.played("sar", given), pairs.expected("sar", "vit")) < EQUAL
