"""Does every policy, utility, selector, annotator, update rule, objective and method keep the rules of the house?"""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from conformance.examples import CASES, LENGTH, Case
from core.checks import look, same, saved

from wise_atta import methods, what, when, who

HALF = LENGTH // 2
ALL, FIRST, REST = range(1, LENGTH + 1), range(1, HALF + 1), range(HALF + 1, LENGTH + 1)

every = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
every_with_state = pytest.mark.parametrize(
    "case",
    [case for name, case in CASES.items() if not name.startswith("utility")],
    ids=[name for name in CASES if not name.startswith("utility")],
)
every_that_adapts = pytest.mark.parametrize(
    "case", [case for case in CASES.values() if case.adapts], ids=[name for name, case in CASES.items() if case.adapts]
)


def fresh(case: Case, dtype: torch.dtype = torch.float64) -> Any:
    return case.use(case.make(), dtype)


def test_every_registered_part_is_here() -> None:
    kinds = {name.split()[1] for name in CASES}
    for registry in (when.POLICIES, what.SELECTORS, who.ANNOTATORS):
        assert {kind.__name__ for kind in registry.values()} <= kinds
    assert {f"utility {name}" for name in when.UTILITIES} | {f"method {name}" for name in methods.METHODS} <= set(CASES)


@every
def test_the_same_seed_gives_the_same_run(case: Case) -> None:
    assert same(case.run(fresh(case), ALL), case.run(fresh(case), ALL))


@every_with_state
def test_a_state_saved_midway_goes_on_to_the_same_bits(case: Case) -> None:
    part, resumed = fresh(case), fresh(case)
    case.run(part, FIRST)
    resumed.load_state_dict(saved(part.state_dict()))
    assert same(resumed.state_dict(), part.state_dict())
    assert same(case.run(resumed, REST), case.run(part, REST))
    assert same(resumed.state_dict(), part.state_dict())


@every_with_state
def test_a_state_is_a_snapshot(case: Case) -> None:
    part = fresh(case)
    case.run(part, FIRST)
    state = part.state_dict()
    kept = saved(state)
    case.run(part, REST)
    assert same(state, kept), "going on must not write to a state that was given away"
    part.load_state_dict(state)
    case.run(part, REST)
    assert same(state, kept), "nor to one that was loaded"


@every
def test_its_repr_says_what_it_is_and_nothing_of_where_it_lies(case: Case) -> None:
    text = repr(case.make())
    assert type(case.make()).__name__ in text and " at 0x" not in text
    assert text == repr(case.make())
    used = case.make()
    case.run(case.use(used, torch.float64), FIRST)
    assert repr(used).split("  #")[0] == text, "a repr shows the options, and options do not change in use"


@every
def test_it_can_be_pickled_before_use(case: Case) -> None:
    part = case.make()
    copy = pickle.loads(pickle.dumps(part))
    assert repr(copy) == repr(part)
    assert same(case.run(case.use(copy, torch.float64), ALL), case.run(case.use(part, torch.float64), ALL))


def global_states() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    return [torch.get_rng_state(), [name, keys, *rest], random.getstate()]


@every
def test_it_neither_reads_nor_moves_the_global_random_states(case: Case) -> None:
    kept = global_states()
    try:
        results = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            before = global_states()
            part = fresh(case)
            assert same(global_states(), before), "making it"
            results.append(case.run(part, ALL))
            assert same(global_states(), before), "using it"
        assert same(*results)
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(tuple(kept[1]))
        random.setstate(kept[2])


@every_that_adapts
def test_it_leaves_the_user_s_model_alone(case: Case) -> None:
    adapter = fresh(case)
    net = adapter.classifier.model.train()
    before = look(net)
    case.run(adapter, ALL)
    assert same(look(net), before)


@every_that_adapts
def test_it_keeps_dtype_and_device(case: Case) -> None:
    dtype = torch.float32  # all other tests here are in float64
    adapter = fresh(case, dtype)
    for logits, *_ in case.run(adapter, FIRST):
        assert logits.dtype == dtype and logits.device == torch.device("cpu") and logits.isfinite().all()
    flat = adapter.classifier.live.flat
    assert flat.dtype == dtype and flat.device == torch.device("cpu") and flat.isfinite().all()


@every_that_adapts
def test_it_returns_to_the_source(case: Case) -> None:
    adapter, new = fresh(case), fresh(case)
    case.run(adapter, FIRST)
    adapter.reset(policy=True, account=True)
    for part in ("update", "anchor", "running", "policy", "selector", "age"):
        assert same(adapter.state_dict()[part], new.state_dict()[part]), part
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


@pytest.mark.parametrize(
    "case",
    [case for name, case in CASES.items() if name.split()[0] in ("policy", "selector", "annotator")],
    ids=[name for name in CASES if name.split()[0] in ("policy", "selector", "annotator")],
)
def test_after_a_reset_it_is_as_new(case: Case) -> None:
    part, new = fresh(case), fresh(case)
    case.run(part, FIRST)
    part.reset()
    assert same(part.state_dict(), new.state_dict())
    assert same(case.run(part, ALL), case.run(new, ALL))
