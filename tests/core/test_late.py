"""Does a late label count for as much as its age says, and is one that comes too late accounted for all the same?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core import nets
from core.checks import same, saved

from wise_atta import Adapter, Answer, adapt, errors, who
from wise_atta.prediction import Prediction, Step
from wise_atta.who import Counts


def wise(**options: Any) -> Adapter:
    given = {"ratio": 1.0, "policy": "uniform", "entropy": "all", "lr": 0.1, "statistics": "batch"}
    return adapt(nets.make(), "wise", **(given | options))


def ask(adapter: Adapter, batches: int) -> list[who.Query]:
    """Some batches whose questions, one each, stay open."""
    queries = []
    for _ in range(batches):
        out = adapter.predict(nets.batch(number=adapter.number + 1))
        adapter.learn(out)
        queries += out.queries
    return queries


def answer(adapter: Adapter, *queries: who.Query, weight: float = 1.0) -> Step:
    """Learn the next batch with answers to older questions."""
    out = adapter.predict(nets.batch(number=adapter.number + 1))
    return adapter.learn(out, {query.id: Answer(nets.truth(query), weight=weight) for query in queries})


@pytest.mark.parametrize(("age", "half"), [(1, 1.0), (4, 2.0), (3, 50.0), (6, 0.75)])
def test_a_label_counts_for_less_the_older_it_is_and_half_at_the_given_age(age: int, half: float) -> None:
    plain, weighted = wise(), wise(late_weight=half)
    losses = [answer(adapter, ask(adapter, age)[0]).losses["sup"] for adapter in (plain, weighted)]
    torch.testing.assert_close(losses[1], half / (half + age) * losses[0], rtol=1e-12, atol=0)


def test_what_a_label_moves_shrinks_by_the_same_factor() -> None:
    options = {"lambda_ent": 0.0, "momentum": 0.0, "nesterov": False}
    moves = []
    for extra in ({}, {"late_weight": 2.0}):
        adapter = wise(**options, **extra)
        query = ask(adapter, 3)[0]
        before = adapter.classifier.live.flat.clone()
        answer(adapter, query)
        moves.append(adapter.classifier.live.flat - before)
    torch.testing.assert_close(moves[1], 0.4 * moves[0], rtol=1e-9, atol=1e-15)


def test_an_age_weight_is_a_weight_of_the_answer_like_any_other() -> None:
    by_age, by_hand = wise(late_weight=2.0), wise()
    answer(by_age, ask(by_age, 2)[0], weight=0.5)
    answer(by_hand, ask(by_hand, 2)[0], weight=0.25)
    assert torch.equal(by_age.classifier.live.flat, by_hand.classifier.live.flat)


def test_prompt_labels_keep_their_whole_weight_beside_late_ones() -> None:
    def mixed(adapter: Adapter, late: float, prompt: float) -> torch.Tensor:
        (query,) = ask(adapter, 1)
        out = adapter.predict(nets.batch(number=2))
        new = {query.id: Answer(0, weight=late), out.queries[0].id: Answer(1, weight=prompt)}
        return adapter.learn(out, new).losses["sup"]

    assert torch.equal(mixed(wise(late_weight=1.0), 1.0, 1.0), mixed(wise(), 0.5, 1.0))


def test_a_label_past_the_limit_is_answered_and_charged_and_moves_nothing() -> None:
    adapter, twin = wise(late_limit=2), wise(late_limit=2)
    (query, *_), _ = ask(adapter, 3), ask(twin, 3)
    step = answer(adapter, query)
    answer(twin)
    assert step.stale == (query.id,) and step.learned == () and step.late == 0 and "sup" not in step.losses
    assert torch.equal(adapter.classifier.live.flat, twin.classifier.live.flat)
    assert adapter.counts == Counts(asked=4, shown=1, answered=1, stale=1)
    assert adapter.policy.spent == twin.policy.spent == 4 and query.id not in {q.id for q in adapter.open}
    adapter.answer({query.id: nets.truth(query)})
    with pytest.raises(errors.Conflict):
        adapter.answer({query.id: (nets.truth(query) + 1) % nets.CLASSES})


def test_a_label_at_the_limit_is_learned_like_any_late_one() -> None:
    adapter, twin = wise(late_limit=3), wise()
    steps = [answer(one, ask(one, 3)[0]) for one in (adapter, twin)]
    assert steps[0].learned == steps[1].learned and steps[0].stale == ()
    assert torch.equal(adapter.classifier.live.flat, twin.classifier.live.flat)


def test_a_batch_that_waited_is_not_too_late_for_its_own_label() -> None:
    adapter = wise(late_limit=0)
    waiting: list[Prediction] = [adapter.predict(nets.batch(number=number)) for number in (1, 2, 3)]
    step = adapter.learn(waiting[0], {out.queries[0].id: 1 for out in waiting[:2]})
    assert step.learned == (waiting[0].queries[0].id,) and step.stale == (waiting[1].queries[0].id,)


def test_a_frozen_adapter_settles_old_labels_when_it_goes_on() -> None:
    adapter = wise(late_limit=1)
    (query,) = ask(adapter, 1)
    adapter.freeze()
    step = adapter.learn(adapter.predict(nets.batch(number=2)), {query.id: 0})
    assert step.stale == step.learned == () and adapter.counts == Counts(asked=1, shown=1, answered=1)
    adapter.freeze(False)
    assert [answer(adapter).learned, adapter.counts.learned] == [(query.id,), 1]


def test_every_label_is_learned_once_or_too_late_and_the_account_is_the_same() -> None:
    """Whoever answers, whenever: learned up to the limit, stale beyond it, and no label is charged twice."""

    def run(**options: Any) -> tuple[Adapter, list[Step]]:
        late = who.Delayed(who.Oracle(nets.truth), who.Between(0, 6), seed=1)
        adapter, steps = wise(annotator=late, **options), []
        adapter.on_step(steps.append)
        for number in range(1, 31):
            adapter.step(nets.batch(number=number))
        return adapter, steps

    (plain, _), (limited, steps) = run(), run(late_limit=3, late_weight=2.0)
    age = {name: step.number - int(name.split("-")[0]) for step in steps for name in (*step.learned, *step.stale)}
    learned = [name for step in steps for name in step.learned]
    stale = [name for step in steps for name in step.stale]
    assert len({*learned, *stale}) == len(learned) + len(stale) == limited.counts.answered
    assert max(age[name] for name in learned) == 3 and min(age[name] for name in stale) == 4
    assert (limited.counts.learned, limited.counts.stale) == (len(learned), len(stale))
    assert limited.policy.spent == plain.policy.spent == limited.counts.asked == plain.counts.asked
    assert plain.counts.answered == plain.counts.learned > 0 == plain.counts.stale


def test_a_saved_state_remembers_which_labels_came_too_late() -> None:
    adapter, other = wise(late_limit=1), wise(late_limit=1)
    query, later, *_ = ask(adapter, 3)
    answer(adapter, query)
    other.load_state_dict(saved(adapter.state_dict()))
    assert other.counts == adapter.counts and other.counts.stale == 1
    for one in (adapter, other):
        assert answer(one, later).stale == (later.id,)
    assert same(adapter.state_dict(), other.state_dict())


def test_a_state_from_before_labels_could_be_too_late_is_taken() -> None:
    adapter, other = wise(), wise(late_limit=5)
    answer(adapter, *ask(adapter, 2))
    state = saved(adapter.state_dict())
    del state["desk"]["counts"]["stale"]
    other.load_state_dict(state)
    assert other.counts == adapter.counts and other.counts.learned == 2


@pytest.mark.parametrize("options", [{"late_weight": 0.0}, {"late_weight": float("nan")}, {"late_limit": -1}])
def test_a_weight_or_limit_that_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(errors.BadConfig, match=next(iter(options))):
        wise(**options)


def test_many_late_labels_are_learned_a_few_at_a_time_and_prompt_ones_at_once() -> None:
    adapter = wise()
    queries = ask(adapter, 19)
    out = adapter.predict(nets.batch(number=20))
    step = adapter.learn(out, {query.id: nets.truth(query) for query in [*queries, *out.queries]})
    assert step.learned == (*[query.id for query in queries[:8]], out.queries[0].id) and step.late == 8
    assert step.counts.answered == 20 and step.work.forwards == 2 + 8, "each late label costs a forward and a graph"
    rest = [answer(adapter).learned for _ in range(3)]
    assert rest == [tuple(query.id for query in part) for part in (queries[8:16], queries[16:], ())]
