"""Does the loop keep its word: predict, ask, learn; late answers; reset, freeze, shadow, export?"""

from __future__ import annotations

import copy
import io
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
from core import nets
from core.checks import look, same, saved
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta import CANT_TELL, SKIP, Adapter, Answer, Batch, Step, adapt, errors, methods, what, when, who
from wise_atta.who import Counts


def wise(kind: str = "batch-norm", **options: Any) -> Adapter:
    given = {"ratio": 1.0, "policy": "uniform", "entropy": "all", "lr": 0.1} | options
    return adapt(nets.make(kind), "wise", **({"statistics": "batch"} | given))


def play(adapter: Adapter, numbers: range, kind: str = "batch-norm") -> list[Tensor]:
    """Some batches with prompt answers; their logits."""
    logits = []
    for number in numbers:
        out = adapter.predict(nets.batch(kind, number))
        adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
        logits.append(out.logits)
    return logits


def ask(adapter: Adapter, number: int = 1) -> Any:
    """One batch whose single question stays open."""
    out = adapter.predict(nets.batch(number=number))
    adapter.learn(out)
    (query,) = out.queries
    return query


def fresh_logits(adapter: Adapter, x: Any) -> Tensor:
    """What a net with the adapter's live tensors says, run by hand on batch statistics."""
    twin = copy.deepcopy(adapter.classifier.model)
    with torch.no_grad():
        for name, tensor in twin.named_parameters():
            if name in adapter.classifier.live.tensors:
                tensor.copy_(adapter.classifier.live.tensors[name])
        for part in twin.modules():
            part.training = isinstance(part, _BatchNorm)
        return nets.call(twin, x)


class First:
    """A selector that takes the first rows."""

    needs_anchor = False

    def pick(self, view: Any, k: int = 1) -> list[int]:
        return list(range(k))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("quick", [False, True])
def test_a_selector_and_a_policy_can_be_replaced(quick: bool) -> None:
    adapter = wise(ratio=0.1, labels=3, channels_last=quick)
    adapter.selector = First()  # type: ignore[assignment]
    adapter.policy = when.policy("always", labels=3)
    out = adapter.predict(nets.batch())
    assert [query.index for query in out.queries] == [0, 1, 2]
    adapter.learn(out)
    adapter.give_up(["1-0"])
    assert adapter.policy.spent == 2


def test_a_batch_nobody_may_ask_about_has_no_decision() -> None:
    adapter = wise(ratio=0.5)
    play(adapter, range(1, 3))
    step = adapter.learn(adapter.predict(nets.batch(number=3), ask=False))
    assert math.isnan(step.rate) and math.isnan(step.debt) and math.isnan(step.threshold)


def test_before_the_first_question_a_state_holds_none() -> None:
    adapter = wise()
    before = adapter.state_dict()
    assert before["desk"] is None, "release 0.1.0 reads no other"
    ask(adapter)
    assert len(adapter.state_dict()["desk"]["open"]) == 1
    adapter.load_state_dict(before)
    assert adapter.open == [] and adapter.counts == Counts()


def test_a_frozen_adapter_settles_a_batch_that_was_not_to_be_learned() -> None:
    adapter = wise()
    out = adapter.predict(nets.batch(), learn=False)
    assert adapter.latest is None
    with pytest.raises(errors.BadInput, match="cannot be learned"):
        adapter.learn(out)
    adapter.freeze()
    step = adapter.learn(out, {query.id: 0 for query in out.queries})
    assert step.asked == tuple(query.id for query in out.queries) and len(step.asked) == 1
    assert step.rate == 1 and step.work.forwards == 2 and step.counts.answered == 1 and not step.learned


# -- predict ----------------------------------------------------------------------------------------------------------


def test_logits_are_those_before_the_update_on_the_same_batch() -> None:
    adapter = wise(lr=0.5)
    for number in range(1, 5):
        x = nets.batch(number=number)
        expected = fresh_logits(adapter, x)
        out = adapter.predict(x)
        kept = out.logits.clone()
        adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
        torch.testing.assert_close(out.logits, expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(out.logits, kept), "learning must not write to what was predicted"
        assert not out.logits.requires_grad and out.logits.grad_fn is None


@pytest.mark.parametrize("method", ["wise", "tent", "cotta"])
def test_what_the_caller_does_to_the_logits_is_not_learned(method: str) -> None:
    options = {"policy": "uniform", "ratio": 1.0} if method == "wise" else {}
    adapter, twin = (adapt(nets.make(), method, lr=0.1, **options) for _ in range(2))
    for each in (adapter, twin):
        out = each.predict(nets.batch())
        if each is adapter:
            out.logits.div_(100)
        each.learn(out, {query.id: nets.truth(query) for query in out.queries})
    assert torch.equal(adapter.classifier.live.flat, twin.classifier.live.flat)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("method", "part", "call"),
    [
        ("wise", "head", 1),
        ("wise", "gradients", 2),
        ("wise block", "forward", 1),
        ("wise block", "gradients", 2),
        ("wise published", "forward", 1),
        ("wise published", "gradients", 2),
        ("sar", "forward", 1),
        ("sar", "gradients", 2),
        ("roid", "forward", 1),
        ("eatta", "gradients", 2),
        ("hiltta", "forward", 4),
        ("hiltta", "forward", 10),
        ("hiltta", "gradients", 2),
        ("simatta", "forward", 3),
        ("simatta", "forward", 12),
        ("simatta", "gradients", 5),
        ("simatta", "forward", 12),
    ],
)
def test_a_batch_that_could_not_be_learned_leaves_no_trace_in_the_tensors_and_can_be_learned_again(
    method: str, part: str, call: int, at_once: bool
) -> None:
    options = {} if method in ("tent", "sar", "roid") else {"ratio": 1.0, "policy": "uniform", "labels": 1}
    method, _, rule = method.partition(" ")
    options |= {"": {}, "block": {"block": "block"}, "published": {"rule": "published"}}[rule]
    adapter = adapt(nets.make(), method, statistics="batch", annotator=who.Oracle(nets.truth), **options)
    for number in range(1, 4):
        adapter.step(nets.batch(number=number))
    out, whole = adapter.predict(nets.batch(number=4)), getattr(adapter.classifier, part)
    answers = {query.id: nets.truth(query) for query in out.queries}
    before, calls = adapter.classifier.live.flat, 0
    anchored = None if adapter.anchor is None else adapter.anchor.version.flat

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise torch.OutOfMemoryError
        return whole(*args, **options)

    setattr(adapter.classifier, part, fail)
    with pytest.raises(torch.OutOfMemoryError):
        adapter.learn(out, answers)
    assert adapter.classifier.live.flat is before, "memory may have run out, so nothing new is made"
    assert torch.equal(adapter.update.optimizer.flat, before)
    assert adapter.anchor is None or torch.equal(adapter.anchor.version.flat, anchored)
    setattr(adapter.classifier, part, whole)
    if not at_once:
        adapter.predict(nets.batch(number=5))
    assert set(adapter.learn(out, answers).learned) == set(answers)


@pytest.mark.parametrize("method", ["wise", "eatta", "roid", "cotta"])
def test_where_tensors_are_made_by_default_is_none_of_its_business(method: str) -> None:
    options = {"ratio": 1.0, "policy": "uniform"} if method in ("wise", "eatta") else {}
    found = []
    for device in (None, "meta"):
        adapter, x = adapt(nets.make(), method, guard=True, **options), [nets.batch(number=t) for t in range(1, 5)]
        torch.set_default_device(device)
        try:
            for batch in x:
                out = adapter.predict(batch)
                adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
        finally:
            torch.set_default_device(None)
        found.append(out.logits)
    assert torch.equal(*found)


ACTIVE = {"ratio": 1.0, "policy": "uniform", "labels": 1}
MADE_INSIDE: dict[str, dict[str, Any]] = {
    "sar": {},
    "roid": {},
    "cotta": {"views": 2},
    "wise": ACTIVE | {"entropy": "all"},
    "eatta": ACTIVE,
    "hiltta": ACTIVE,
    "simatta": ACTIVE,
    "cema": {"queue": 2, "below": 1.0, "epsilon": 1.0, "cost": 0},
}


@pytest.mark.parametrize("statistics", ["batch", "renorm"])
@pytest.mark.parametrize("method", list(MADE_INSIDE))
def test_it_can_be_made_saved_and_loaded_inside_inference_mode(method: str, statistics: Any) -> None:
    net, teacher = nets.make(), nets.make(seed=5)
    options = MADE_INSIDE[method] | ({"teacher": teacher} if method == "cema" else {})

    def made() -> Adapter:
        delayed = who.Delayed(who.Oracle(nets.truth), 1)
        return adapt(net, method, statistics=statistics, guard=True, annotator=delayed, **options)

    plain = made()
    expected = [plain.step(nets.batch(number=number)).logits for number in range(1, 7)]
    with torch.inference_mode():
        adapter, another, third = made(), made(), made()
    found = [adapter.step(nets.batch(number=number)).logits for number in range(1, 4)]
    with torch.inference_mode():
        state = adapter.state_dict()
        another.load_state_dict(state)
        third.load_state_dict(saved(state))
    for each in (another, third):
        assert same([*found, *(each.step(nets.batch(number=number)).logits for number in range(4, 7))], expected)


@pytest.mark.parametrize("kind", list(nets.KINDS))
@pytest.mark.parametrize("method", ["source", "bn", "tent", "wise"])
def test_every_first_method_runs_on_every_kind_of_net(kind: str, method: str) -> None:
    adapter = adapt(nets.make(kind), method)
    for number in range(1, 8):
        out = adapter.predict(nets.batch(kind, number))
        adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
        assert out.logits.shape == (8, nets.CLASSES) and out.logits.isfinite().all()
    assert adapter.number == 7


def test_the_source_method_is_the_user_s_net_in_eval_mode() -> None:
    for kind in nets.KINDS:
        net = nets.make(kind)
        adapter = adapt(net.train(), "source")
        for number in (1, 2):
            x = nets.batch(kind, number)
            with torch.no_grad():
                expected = nets.call(net.eval(), x)
            net.train()
            out = adapter.predict(x)
            adapter.learn(out)
            # Not to the bit: which way torch takes through a product of three dimensions depends on requires_grad.
            torch.testing.assert_close(out.logits, expected, rtol=1e-12, atol=1e-12)


def test_a_prediction_says_what_was_spent_and_allowed_and_why() -> None:
    adapter = wise(ratio=0.5)
    for number in range(1, 7):
        out = adapter.predict(nets.batch(number=number))
        assert (out.number, len(out), len(out.queries)) == (number, 8, int(number % 2 == 0))
        assert (out.spent, out.allowed) == (number // 2, number // 2)
        p = out.logits.softmax(1)
        sure = -(p * p.log()).sum(1) < 0.4 * math.log(nets.CLASSES)
        assert out.utility == sure.sum().item()
        adapter.learn(out)


def test_a_question_carries_a_copy_of_its_sample_and_what_the_stream_said_of_it() -> None:
    x = nets.batch()
    adapter = wise(labels=2, ratio=2.0)
    out = adapter.predict(Batch(x, ids=[f"img-{i}" for i in range(8)], meta={"domain": "fog"}))
    assert [query.id for query in out.queries] == [f"1-{query.index}" for query in out.queries]
    for query in out.queries:
        assert (query.batch, query.asked_at, query.sample_id) == (1, 1, f"img-{query.index}")
        assert query.meta == {"domain": "fog"}
        assert torch.equal(query.input, x[query.index]) and torch.equal(query.logits, out.logits[query.index])
        assert query.input.untyped_storage().nbytes() == query.input.nbytes, "a view would keep the whole batch alive"
        assert query.input.device.type == "cpu" and not query.logits.requires_grad
    kept = [query.input.clone() for query in out.queries]
    x.zero_()
    assert all(torch.equal(query.input, copy_) for query, copy_ in zip(out.queries, kept, strict=True))


def test_questions_about_a_tree_of_tensors_are_trees() -> None:
    x = nets.batch("text")
    (query,) = wise("text").predict(x).queries
    assert {name: tensor.shape for name, tensor in query.input.items()} == {"ids": (7,), "mask": (7,)}
    assert torch.equal(query.input["ids"], x["ids"][query.index])


def test_plain_inference_changes_nothing() -> None:
    adapter, twin = wise(), wise()
    play(adapter, range(1, 4))
    play(twin, range(1, 4))
    before = adapter.state_dict()
    for number in (9, 10):
        out = adapter.predict(nets.batch(number=number), ask=False, learn=False)
        torch.testing.assert_close(out.logits, fresh_logits(adapter, nets.batch(number=number)))
        assert not out.queries
    assert same(adapter.state_dict(), before)
    assert same(play(adapter, range(4, 7)), play(twin, range(4, 7)))


def test_a_batch_may_be_learned_without_being_asked_about() -> None:
    adapter = wise()
    out = adapter.predict(nets.batch(), ask=False)
    assert not out.queries and math.isnan(out.utility) and adapter.policy.seen == 0
    adapter.learn(out)
    assert not torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


def test_a_batch_may_be_asked_about_without_being_learned() -> None:
    adapter = wise()
    asked = adapter.predict(nets.batch(), learn=False)
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())
    with pytest.raises(errors.BadInput, match="cannot be learned"):
        adapter.learn(asked)
    out = adapter.predict(nets.batch(number=2))
    step = adapter.learn(out, {asked.queries[0].id: 1})
    assert step.late == 1 and step.learned == (asked.queries[0].id,)


# -- the life of a graph ----------------------------------------------------------------------------------------------


class Token:
    """Lives as long as the graph that holds it."""


class Mark(torch.autograd.Function):
    """Does nothing to its input and leaves a token in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: list[weakref.ref[Token]]) -> Tensor:
        ctx.token = Token()
        tokens.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Marked(nn.Module):
    """Notes, at the beginning of every forward, how many graphs of earlier ones are alive."""

    def __init__(self, tokens: list[weakref.ref[Token]], alive: list[int]) -> None:
        super().__init__()
        self.note = lambda: alive.append(graphs(tokens))
        self.mark = lambda x: Mark.apply(x, tokens)

    def forward(self, x: Tensor) -> Tensor:
        self.note()
        return self.mark(x)


def watched() -> tuple[Adapter, list[int], list[weakref.ref[Token]]]:
    alive: list[int] = []
    tokens: list[weakref.ref[Token]] = []
    net = nets.make("tabular")
    net.body.insert(2, Marked(tokens, alive))
    return adapt(net, "wise", ratio=1.0, policy="uniform", entropy="all", lr=0.1), alive, tokens


def graphs(tokens: list[weakref.ref[Token]]) -> int:
    """How many are alive. No garbage collection: on a device a graph in a cycle fills the memory before that comes."""
    return sum(token() is not None for token in tokens)


def test_the_watch_sees_two_graphs_where_there_are_two() -> None:
    adapter, alive, tokens = watched()
    kept = [adapter.classifier.forward(nets.batch("tabular"), grad=True) for _ in range(2)]
    assert graphs(tokens) == 2 and alive == [0, 1]
    del kept
    assert graphs(tokens) == 0


def test_at_most_one_graph_is_alive_even_while_the_next_is_built() -> None:
    adapter, alive, tokens = watched()
    outs = [adapter.predict(nets.batch("tabular", number)) for number in range(1, 4)]
    assert graphs(tokens) == 1
    # Of every predict the first forward finds no graph, the anchor's finds the one just built.
    assert alive == [0, 1] * 3
    for out in (outs[2], outs[0], outs[1]):
        adapter.learn(out, {query.id: 1 for query in out.queries})
        assert graphs(tokens) == 0
    assert alive == [0, 1] * 3 + [0, 0]


def test_a_prediction_does_not_keep_its_graph_alive_after_learn() -> None:
    adapter, _, tokens = watched()
    out = adapter.predict(nets.batch("tabular"))
    assert graphs(tokens) == 1
    step = adapter.learn(out, {query.id: 1 for query in out.queries})
    assert graphs(tokens) == 0
    assert out.view is not None and out.view.drift is not None and step.losses


def test_a_view_that_outlives_its_prediction_holds_no_graph() -> None:
    adapter, _, tokens = watched()
    view = adapter.predict(nets.batch("tabular")).view
    adapter.predict(nets.batch("tabular", 2), ask=False)
    assert view is not None and graphs(tokens) == 1


def test_learning_an_older_prediction_gives_the_same_bits_as_learning_it_at_once() -> None:
    late, prompt = wise(ratio=0.1), wise(ratio=0.1)
    older = late.predict(nets.batch(number=1))
    newer = late.predict(nets.batch(number=2))
    late.learn(older)
    assert torch.equal(play(prompt, range(1, 2))[0], older.logits)
    assert torch.equal(late.classifier.live.flat, prompt.classifier.live.flat)
    late.learn(newer)
    assert not torch.equal(late.classifier.live.flat, prompt.classifier.live.flat)


def test_predictions_can_be_learned_in_any_order_and_labels_find_their_rows() -> None:
    adapter = wise()
    first, second = (adapter.predict(nets.batch(number=number)) for number in (1, 2))
    answers = {query.id: nets.truth(query) for query in (*first.queries, *second.queries)}
    step = adapter.learn(second, answers)
    assert step.late == 1 and set(step.learned) == set(answers)
    step = adapter.learn(first)
    assert step.learned == () and step.number == 1


def test_only_the_adapter_that_predicted_can_learn_and_only_once() -> None:
    adapter, other = wise(), wise()
    out = adapter.predict(nets.batch())
    with pytest.raises(errors.BadInput, match="another adapter"):
        other.learn(out)
    adapter.learn(out)
    with pytest.raises(errors.AlreadyLearned, match="batch 1"):
        adapter.learn(out)


# -- late answers -----------------------------------------------------------------------------------------------------


def test_answers_come_late_out_of_order_and_with_any_batch() -> None:
    adapter = wise()
    queries = [ask(adapter, number) for number in (1, 2, 3)]
    assert [query.id for query in adapter.open] == [query.id for query in queries]
    out = adapter.predict(nets.batch(number=4))
    step = adapter.learn(out, {queries[2].id: 1, out.queries[0].id: 2, queries[0].id: 0})
    assert step.learned == (queries[2].id, out.queries[0].id, queries[0].id) and step.late == 2
    assert [query.id for query in adapter.open] == [queries[1].id]
    assert adapter.counts == Counts(asked=4, shown=3, answered=3, learned=3)


@pytest.mark.parametrize("kind", list(nets.KINDS))
def test_late_answers_work_on_every_kind_of_net(kind: str) -> None:
    adapter = wise(kind)
    out = adapter.predict(nets.batch(kind, 1))
    adapter.learn(out)
    before = adapter.classifier.live.flat.clone()
    second = adapter.predict(nets.batch(kind, 2))
    assert adapter.learn(second, {out.queries[0].id: 3}).late == 1
    assert not torch.equal(adapter.classifier.live.flat, before)


def test_an_answer_without_a_batch_at_hand_is_learned_with_the_next() -> None:
    adapter, twin = wise(), wise()
    query, theirs = ask(adapter), ask(twin)
    adapter.answer({query.id: 2})
    assert adapter.counts.answered == 1 and adapter.counts.learned == 0
    out = adapter.predict(nets.batch(number=2))
    assert adapter.learn(out).learned == (query.id,)
    other = twin.predict(nets.batch(number=2))
    twin.learn(other, {theirs.id: 2})
    assert torch.equal(adapter.classifier.live.flat, twin.classifier.live.flat)


def test_an_answer_given_between_predict_and_learn_is_prompt() -> None:
    adapter, twin = wise(), wise()
    out, other = adapter.predict(nets.batch()), twin.predict(nets.batch())
    adapter.answer({out.queries[0].id: 2})
    assert adapter.learn(out).late == 0
    twin.learn(other, {other.queries[0].id: 2})
    assert torch.equal(adapter.classifier.live.flat, twin.classifier.live.flat)


def test_the_same_answer_again_changes_nothing_and_another_is_a_conflict() -> None:
    adapter = wise()
    query = ask(adapter)
    adapter.answer({query.id: Answer(2, by="ann")})
    for again in (2, Answer(2, by="ben", weight=3.0), torch.tensor(2), None):
        adapter.answer({query.id: again})
    with pytest.raises(errors.Conflict, match="answered 2 and now 3"):
        adapter.answer({query.id: 3})
    out = adapter.predict(nets.batch(number=2))
    assert adapter.learn(out, {query.id: 2}).learned == (query.id,)
    with pytest.raises(errors.Conflict):
        adapter.answer({query.id: CANT_TELL})
    assert adapter.counts.answered == adapter.counts.learned == 1


def test_cant_tell_stays_charged_and_skip_leaves_the_question_open() -> None:
    adapter = wise(expires_after=50)
    unsure, skipped = ask(adapter, 1), ask(adapter, 2)
    adapter.answer({unsure.id: CANT_TELL, skipped.id: SKIP})
    assert adapter.counts == Counts(asked=2, shown=2, cant_tell=1)
    assert [query.id for query in adapter.open] == [skipped.id] and adapter.policy.spent == 2
    out = adapter.predict(nets.batch(number=3))
    assert adapter.learn(out, {skipped.id: 1}).learned == (skipped.id,)


def test_a_question_that_expires_unseen_is_refunded_and_one_that_was_shown_is_not() -> None:
    adapter = wise(expires_after=2)
    unseen, shown = ask(adapter, 1), ask(adapter, 2)
    adapter.show([shown.id])
    assert adapter.policy.spent == 2
    expired = []
    for number in (3, 4):
        out = adapter.predict(nets.batch(number=number))
        step = adapter.learn(out, {query.id: 0 for query in out.queries})
        expired.append((step.expired, step.spent))
    assert expired == [((unseen.id,), 2), ((shown.id,), 3)], "1: −1 +1; 2: no refund"
    assert adapter.counts == Counts(asked=4, shown=3, answered=2, learned=2, expired=2)
    for query in (unseen, shown):
        with pytest.raises(errors.UnknownQuery, match="expired"):
            adapter.answer({query.id: 1})


def test_all_ids_are_checked_before_anything_changes() -> None:
    adapter = wise()
    query = ask(adapter)
    out = adapter.predict(nets.batch(number=2))
    before = adapter.state_dict()
    for bad, error in [
        ({query.id: 1, "9-9": 0}, errors.UnknownQuery),
        ({query.id: 1, out.queries[0].id: 99}, errors.BadLabel),
    ]:
        with pytest.raises(error):
            adapter.learn(out, bad)
        with pytest.raises(error):
            adapter.answer(bad)
    assert same(adapter.state_dict(), before)
    assert adapter.learn(out, {query.id: 1}).learned == (query.id,)


def test_weights_of_answers_weigh_their_loss() -> None:
    heavy, light = wise(), wise()
    losses = []
    for adapter, weight in ((heavy, 2.0), (light, 1.0)):
        out = adapter.predict(nets.batch())
        step = adapter.learn(out, {out.queries[0].id: Answer(1, weight=weight)})
        losses.append(step.losses["sup"].item())
    assert losses[0] == pytest.approx(2 * losses[1], rel=1e-12)


def test_a_question_in_its_own_context_keeps_only_statistics_with_it() -> None:
    adapter = wise()
    ask(adapter)
    (kept,) = adapter.state_dict()["desk"]["open"]
    assert kept["context"]["values"].numel() == 2 * (8 + 8) and kept["context"]["batch"] == 8
    for options in ({"context": "current"}, {"context": "source"}, {"kind": "tokens"}):
        adapter = wise(**options)
        out = adapter.predict(nets.batch(options.get("kind", "batch-norm")))
        adapter.learn(out)
        (kept,) = adapter.state_dict()["desk"]["open"]
        assert kept["context"] is None


# -- step and annotators ----------------------------------------------------------------------------------------------


def test_step_is_predict_ask_and_learn() -> None:
    stepping, by_hand = wise(annotator=who.Oracle(nets.truth)), wise()
    logits = [stepping.step(nets.batch(number=number)).logits for number in range(1, 6)]
    assert same(logits, play(by_hand, range(1, 6)))
    assert torch.equal(stepping.classifier.live.flat, by_hand.classifier.live.flat)
    assert stepping.counts == Counts(asked=5, shown=5, answered=5, learned=5)


def test_step_learns_delayed_answers_when_they_come() -> None:
    adapter = wise(annotator=who.Delayed(who.Oracle(nets.truth), batches=2))
    steps: list[Step] = []
    adapter.on_step(steps.append)
    for number in range(1, 6):
        adapter.step(nets.batch(number=number))
    assert [(step.number, len(step.learned), step.late) for step in steps] == [
        (1, 0, 0),
        (2, 0, 0),
        (3, 1, 1),
        (4, 1, 1),
        (5, 1, 1),
    ]


def test_step_returns_labels_of_questions_that_nobody_saw_in_time() -> None:
    inbox = who.Inbox()
    adapter = wise(annotator=inbox, expires_after=1)
    adapter.step(nets.batch(number=1))
    inbox.show("1-" + inbox.waiting()[0].split("-")[1])
    for number in (2, 3, 4):
        adapter.step(nets.batch(number=number))
    assert adapter.counts.expired == 3 and adapter.counts.shown == 1
    assert adapter.policy.spent == 2, "four were asked; the two that expired unseen came back"
    assert len(inbox.waiting()) == 1


def test_a_free_teacher_is_asked_on_every_batch_and_never_charged() -> None:
    adapter = wise(ratio=0.1, annotator=who.Teacher(nets.make(seed=5), cost=0), expires_after=1)
    for number in range(1, 5):
        assert len(adapter.step(nets.batch(number=number)).queries) == 1
    assert adapter.policy.spent == 0 and adapter.counts.learned == 4


def test_an_annotator_that_fails_leaves_its_question_open_and_the_loop_usable() -> None:
    calls: list[str] = []

    def flaky(query: Any) -> int:
        calls.append(query.id)
        if len(calls) == 2:
            raise ConnectionError("the labelling service is down")
        return 1

    adapter = wise(annotator=who.Callback(flaky))
    adapter.step(nets.batch(number=1))
    with pytest.raises(ConnectionError):
        adapter.step(nets.batch(number=2))
    assert len(adapter.open) == 1 and adapter.policy.spent == 2
    adapter.step(nets.batch(number=3))
    assert adapter.counts.learned == 3 and adapter.policy.spent == 3 and not adapter.open


def broken(query: Any) -> int:
    if query.batch == 2:
        raise ValueError("this picture cannot be shown")
    return nets.truth(query)


def test_where_a_question_can_never_be_answered_the_prediction_can_be_had_and_the_stream_goes_on() -> None:
    adapter, learned = wise(annotator=who.Callback(broken)), []
    adapter.on_step(lambda step: learned.append((step.number, step.learned)))
    for number in range(1, 5):
        try:
            adapter.step(nets.batch(number=number))
        except ValueError as error:
            assert "Question '2-" in error.__notes__[0] and "CANT_TELL" in error.__notes__[0]
            assert f"Batch {number} is predicted" in error.__notes__[1]
            out = adapter.latest
            assert (
                out is not None
                and out.number == number
                and torch.equal(out.logits, adapter.predict(nets.batch(number=number), ask=False, learn=False).logits)
            )
            adapter.learn(out)
    assert [number for number, _ in learned] == [1, 2, 3, 4] and adapter.latest is None
    assert adapter.counts.learned == 1 and len(adapter.open) == 3 and adapter.policy.spent == 4


def test_a_question_that_can_never_be_answered_is_in_the_way_no_longer_than_until_it_expires() -> None:
    adapter = wise(annotator=who.Callback(broken), expires_after=2)
    failed = []
    for number in range(1, 9):
        try:
            adapter.step(nets.batch(number=number))
        except ValueError:
            failed.append(number)
    assert failed == [2, 3, 4]
    assert not adapter.open and adapter.counts.expired == 1 and adapter.counts.learned == 7
    assert adapter.policy.spent == adapter.counts.asked - 1 == 7, "nobody could be shown it, so it is not charged"


def test_what_was_answered_before_an_annotator_failed_is_neither_lost_nor_asked_again() -> None:
    calls: list[str] = []

    def flaky(query: Any) -> int:
        calls.append(query.id)
        if len(calls) in (1, 3, 5):
            raise ConnectionError("the labelling service is down")
        return nets.truth(query)

    adapter = wise(annotator=who.Callback(flaky))
    for number in range(1, 4):
        with pytest.raises(ConnectionError):
            adapter.step(nets.batch(number=number))
    resumed = wise(annotator=who.Callback(flaky))
    resumed.load_state_dict(saved(adapter.state_dict()))
    resumed.step(nets.batch(number=4))
    assert resumed.counts.learned == 4 and len(calls) == 3 + 4


def test_questions_that_no_annotator_took_are_neither_charged_nor_open() -> None:
    adapter = wise(annotator=who.Noisy(who.Oracle({}), rate=0.1, classes=99))
    for number in range(3):
        with pytest.raises(errors.BadConfig, match="Noisy was made for 99"):
            adapter.step(nets.batch(number=number))
    assert adapter.open == [] and adapter.counts == Counts() and adapter.policy.spent == 0
    state = adapter.state_dict()
    adapter.load_state_dict(state)


def test_an_answer_that_is_refused_costs_no_other() -> None:
    inbox = who.Inbox()
    adapter = wise(annotator=inbox, labels=2, ratio=2.0)
    out = adapter.step(nets.batch())
    first, second = (query.id for query in out.queries)
    inbox._ready = {"9-9": Answer(0), first: Answer(1)}
    with pytest.raises(errors.UnknownQuery, match="9-9"):
        adapter.step(nets.batch(number=2))
    assert adapter.counts.answered == 1 and first not in {query.id for query in adapter.open}
    inbox.put(second, 0)
    adapter.step(nets.batch(number=3))
    assert adapter.counts.learned == 2


def test_an_answer_to_a_question_that_expired_in_a_learn_by_hand_is_dropped_and_no_other() -> None:
    inbox = who.Inbox()
    adapter = wise(annotator=inbox, expires_after=2)
    early = adapter.step(nets.batch()).queries[0].id
    for number in (2, 3):
        adapter.learn(adapter.predict(nets.batch(number=number)))
    late = adapter.step(nets.batch(number=4)).queries[0].id
    assert adapter.counts.expired == 2, "those of batches 1 and 2"
    inbox.put(early, 0)
    inbox.put(late, 0)
    adapter.step(nets.batch(number=5))
    assert adapter.counts.learned == 1


@pytest.mark.parametrize("expires_after", [0, 1])
def test_a_question_expires_by_the_batch_that_is_learned_not_by_the_latest_prediction(expires_after: int) -> None:
    adapter = wise(expires_after=expires_after)
    for out in [adapter.predict(nets.batch(number=number)) for number in range(3)]:
        adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
    assert adapter.counts.learned == adapter.policy.spent == 3


def test_a_selector_cannot_take_more_than_was_granted() -> None:
    class Greedy(what.Selector):
        def pick(self, view: Any, k: int = 1) -> list[int]:
            return list(range(len(view)))

    adapter = wise(selector=Greedy())
    with pytest.raises(errors.BadConfig, match="Greedy picked 8 samples where the budget grants 1"):
        adapter.predict(nets.batch())
    assert adapter.open == [] and adapter.policy.spent == 0


def test_a_method_with_a_teacher_of_its_own_takes_no_other_answers() -> None:
    adapter = adapt(nets.make(), "cema", teacher=nets.make(seed=3), queue=2, below=1.0, epsilon=1.0)
    out = adapter.predict(nets.batch())
    for take in (adapter.answer, lambda answers: adapter.learn(out, answers)):
        with pytest.raises(errors.BadInput, match="own teacher answers"):
            take({out.sent[0].id: 0})
    adapter.learn(out)


def test_a_moving_average_follows_batches_that_wait_and_are_not_learned() -> None:
    running = []
    for ahead in (False, True):
        adapter = wise(statistics="ema", ratio=0.0, only_selected=True)
        outs = (adapter.predict(nets.batch(number=number)) for number in range(4))
        for out in list(outs) if ahead else outs:
            adapter.learn(out)
        # Of the first layer: what reaches the second depends on how the first was normalised meanwhile.
        assert adapter.classifier.running is not None
        running.append(adapter.classifier.running[:16])
    torch.testing.assert_close(running[1], running[0])


def test_step_without_an_annotator_says_what_to_do() -> None:
    with pytest.raises(errors.BadConfig, match="annotator"):
        wise().step(nets.batch())
    adapt(nets.make(), "tent").step(nets.batch())


def test_a_function_has_to_be_made_an_annotator() -> None:
    with pytest.raises(errors.BadConfig, match=r"who\.Callback"):
        wise(annotator=nets.truth)
    with pytest.raises(errors.BadConfig, match="guard"):
        wise(guard="yes")


# -- steering ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", ["batch", "ema"])
def test_reset_returns_to_the_source_to_the_bit(statistics: Any) -> None:
    adapter, fresh = wise(statistics=statistics), wise(statistics=statistics)
    play(adapter, range(1, 6))
    adapter.reset(policy=True, account=True)
    # Questions are named after the batch, so numbers go on; everything else is as new.
    logits = [adapter.predict(nets.batch(number=number), ask=False) for number in (1,)]
    assert torch.equal(logits[0].logits, fresh.predict(nets.batch(number=1), ask=False).logits)
    for name in ("update", "anchor", "running", "policy", "selector", "age"):
        assert same(adapter.state_dict()[name], fresh.state_dict()[name]), name
    assert adapter.counts == Counts() and adapter.policy.spent == 0


def test_reset_leaves_account_and_questions_alone_unless_told() -> None:
    adapter = wise()
    query = ask(adapter)
    adapter.reset()
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())
    assert (adapter.policy.spent, adapter.policy.seen, len(adapter.open)) == (1, 1, 1)
    out = adapter.predict(nets.batch(number=2))
    assert adapter.learn(out, {query.id: 1}).learned == (query.id,)
    adapter.reset(model=False, account=True)
    assert (adapter.policy.spent, adapter.counts) == (0, Counts())
    assert not torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


def test_a_prediction_from_before_a_reset_is_learned_from_the_source() -> None:
    adapter, fresh = wise(), wise()
    play(adapter, range(1, 4))
    out = adapter.predict(nets.batch(number=4), ask=False)
    adapter.reset()
    adapter.learn(out)
    fresh.learn(fresh.predict(nets.batch(number=4), ask=False))
    assert torch.equal(adapter.classifier.live.flat, fresh.classifier.live.flat)


def test_restart_keeps_the_model_and_begins_the_rest_anew() -> None:
    adapter = wise(ratio=0.5, selector="drift")
    play(adapter, range(1, 5))
    live, momentum = adapter.classifier.live.flat.clone(), adapter.update.state_dict()
    adapter.restart()
    assert torch.equal(adapter.classifier.live.flat, live) and same(adapter.update.state_dict(), momentum)
    assert (adapter.policy.spent, adapter.policy.seen, adapter.counts) == (0, 0, Counts())
    out = adapter.predict(nets.batch(number=5))
    assert out.view is not None and out.view.age == 1 and out.number == 5


def test_a_frozen_adapter_neither_asks_nor_learns_and_keeps_answers_for_later() -> None:
    adapter = wise()
    query = ask(adapter)
    live = adapter.classifier.live.flat.clone()
    adapter.freeze()
    for number in (2, 3):
        out = adapter.predict(nets.batch(number=number))
        assert not out.queries
        adapter.learn(out, {query.id: 1})
    assert torch.equal(adapter.classifier.live.flat, live)
    assert (adapter.number, adapter.policy.seen) == (1, 1)
    assert adapter.counts.answered == 1 and adapter.counts.learned == 0
    adapter.freeze(False)
    out = adapter.predict(nets.batch(number=4))
    assert adapter.learn(out).learned == (query.id,)


def test_freezing_between_predict_and_learn_stops_the_update() -> None:
    adapter = wise(statistics="ema")
    out = adapter.predict(nets.batch())
    adapter.freeze()
    before = adapter.state_dict()
    adapter.learn(out)
    assert same(adapter.state_dict(), before)


def test_a_shadow_answers_with_the_source_and_adapts_unseen() -> None:
    adapter, twin, net = wise(shadow=True), wise(), nets.make()
    for number in range(1, 5):
        x = nets.batch(number=number)
        out = adapter.predict(x)
        assert torch.equal(out.logits, net(x).detach())
        adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
        assert torch.equal(adapter.predict(x, ask=False, learn=False).logits, net(x).detach())
    play(twin, range(1, 5))
    assert torch.equal(adapter.classifier.live.flat, twin.classifier.live.flat)


@pytest.mark.parametrize("kind", ["batch-norm", "tabular", "folded", "tokens", "text"])
@pytest.mark.parametrize("statistics", ["batch", "source", "mixed", "ema"])
def test_an_exported_module_gives_the_same_outputs_by_itself(kind: str, statistics: Any) -> None:
    adapter = wise(kind, statistics=statistics)
    play(adapter, range(1, 5), kind)
    before = look(adapter.classifier.model)
    module = adapter.export()
    assert type(module) is type(adapter.classifier.model) and isinstance(module, nn.Module)
    for clone in (module, pickle.loads(pickle.dumps(module)), torch_saved(module), copy.deepcopy(module)):
        # Whatever becomes of the exported module, the user's stays what it is.
        for number, n in ((7, 8), (8, 3)):
            x = nets.batch(kind, number, n)
            if statistics == "ema" and nets.KINDS[kind].batch_norm:
                continue
            expected = adapter.predict(x, ask=False, learn=False).logits
            torch.testing.assert_close(nets.call(clone, x), expected, rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            for tensor in clone.parameters():
                tensor.zero_()
    assert same(look(adapter.classifier.model), before)


def test_a_module_exported_from_a_moving_average_normalises_by_it() -> None:
    adapter = wise(statistics="ema")
    play(adapter, range(1, 5))
    module, x = adapter.export(), nets.batch(number=7)
    running = adapter.classifier.running
    assert running is not None
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    found = torch.cat([part for norm in norms for part in (norm.running_mean, norm.running_var)])
    assert torch.equal(found, running)
    assert torch.equal(module(x)[:3], module(x[:3])), "a plain net in eval mode does not look at the batch"


def test_an_exported_module_can_be_adapted_again() -> None:
    first = wise()
    play(first, range(1, 4))
    second = adapt(first.export(), "wise", ratio=1.0, policy="uniform", entropy="all", lr=0.1, statistics="batch")
    torch.testing.assert_close(play(second, range(4, 5))[0], first.predict(nets.batch(number=4)).logits)
    query = ask(second, 5)
    out = second.predict(nets.batch(number=6))
    assert second.learn(out, {query.id: 1}).late == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_adapter_is_neither_copied_nor_pickled_but_says_what_to_do(copied: Any) -> None:
    with pytest.raises(errors.WiseAttaError, match=r"load_state_dict\(\)"):
        copied(wise())


class Remembering(nets.TabularNet):
    """Keeps what it computed last, with its graph."""

    latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.latest = super().forward(x)
        return self.latest


def test_what_a_net_remembers_of_its_last_forward_does_not_keep_it_from_being_exported() -> None:
    net, x = nets.trained(Remembering), nets.batch("tabular")
    net(x)
    adapter = adapt(net, "wise", ratio=1.0, policy="uniform", lr=0.1)
    play(adapter, range(1, 4), "tabular")
    exported = adapter.export()
    assert exported.latest is not net.latest and exported.latest.grad_fn is None  # type: ignore[union-attr]
    torch.testing.assert_close(exported(x).detach(), adapter.predict(x, ask=False, learn=False).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_net_in_half_precision_is_exported_as_it_normalises_here(dtype: torch.dtype) -> None:
    adapter, x = adapt(nets.make(dtype=dtype), "wise", ratio=1.0, policy="uniform"), nets.batch(dtype=dtype)
    adapter.learn(adapter.predict(x))
    assert adapter.classifier.statistics == "mixed"
    assert torch.equal(adapter.export()(x), adapter.predict(x, ask=False, learn=False).logits)


def torch_saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def test_tied_tensors_stay_tied_in_an_exported_module() -> None:
    net = nets.trained(nets.TiedNet)
    adapter = adapt(net, "wise", ratio=1.0, policy="uniform", entropy="all", lr=0.1)
    ids = torch.arange(16).view(8, 2) % nets.CLASSES
    out = adapter.predict(ids)
    adapter.learn(out, {query.id: 1 for query in out.queries})
    module = adapter.export()
    assert module.out.weight is module.words.weight and module.norm1.weight is module.norm2.weight
    with torch.no_grad():
        assert torch.equal(module(ids), adapter.predict(ids, ask=False, learn=False).logits)
    assert not torch.equal(module.out.weight, net.out.weight)


def test_callbacks_see_every_step() -> None:
    adapter = wise(ratio=0.5)
    first: list[Step] = []
    second: list[int] = []
    adapter.on_step(first.append)
    adapter.on_step(lambda step: second.append(step.number))
    play(adapter, range(1, 5))
    assert second == [1, 2, 3, 4]
    assert [(step.samples, len(step.asked), step.spent, step.allowed) for step in first] == [
        (8, 0, 0, 0),
        (8, 1, 1, 1),
        (8, 0, 1, 1),
        (8, 1, 2, 2),
    ]
    assert [step.learned for step in first] == [step.asked for step in first]
    assert all(step.seconds > 0 and step.counts.asked == step.spent for step in first)
    assert all(math.isnan(step.threshold) and step.rate == 0.5 for step in first)
    assert [step.debt for step in first] == [0.5, 1.0, 0.5, 1.0]


def test_an_adapter_says_what_it_is_made_of() -> None:
    text = repr(wise())
    assert all(
        part in text for part in ("Classifier(BatchNormCnn", "Uniform(ratio=1.0", "Count(", "Drift(", "TwoStep(")
    )


# -- one call ---------------------------------------------------------------------------------------------------------


def test_options_find_their_part() -> None:
    adapter = adapt(
        nets.make(),
        "wise",
        ratio=0.25,
        lr=0.5,
        window=33,
        statistics="mixed",
        prior=3,
        classes=[0, 2],
        context="source",
        expires_after=4,
        shadow=True,
        labels=2,
        anchor_momentum=0.5,
    )
    assert (adapter.classifier.prior, adapter.classifier.statistics, adapter.labels) == (3, "mixed", 2)
    assert (adapter.questions.context, adapter.questions.expires_after, adapter.shadow) == ("source", 4, True)
    assert "ratio=0.25, window=33" in repr(adapter.policy) and adapter.update.lr == 0.5
    assert adapter.anchor is not None and adapter.anchor.momentum == 0.5


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        ("wize", {}, "Did you mean 'wise'"),
        ("wise", {"policy": "pacd"}, "Did you mean 'paced'"),
        ("wise", {"selector": "drfit"}, "Did you mean 'drift'"),
        ("wise", {"utility": "counts"}, "Did you mean 'count'"),
        ("wise", {"colour": 1}, "colour"),
        ("tent", {"ratio": 0.5}, "ratio"),
        ("wise", {"context": "mine"}, "Known: current, own, source"),
        ("wise", {"statistics": "bacth"}, "Did you mean 'batch'"),
        ("wise", {"labels": 0}, "labels"),
        ("wise", {"expires_after": -1}, "expires_after"),
        ("wise", {"ratio": -0.1}, "ratio"),
        ("wise", {"ratio": "many"}, "ratio"),
        ("wise", {"ratio": math.nan}, "ratio"),
        ("wise", {"prior": -1}, "prior"),
        ("wise", {"ema_weight": 0}, "ema_weight"),
    ],
)
def test_a_mistyped_option_is_refused_with_what_was_meant(method: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.BadConfig, match=match):
        adapt(nets.make(), method, **options)


def test_options_of_a_method_made_by_hand_go_to_the_method() -> None:
    adapt(nets.make(), methods.tent(lr=0.1), statistics="source")
    with pytest.raises(errors.BadConfig, match="lr: give these to the method"):
        adapt(nets.make(), methods.tent(), lr=0.1)


def test_a_method_made_by_hand_serves_one_adapter() -> None:
    method = methods.wise(ratio=1.0, policy="uniform")
    first = adapt(nets.make(), method)
    before = first.state_dict()
    with pytest.raises(errors.BadConfig, match="another adapter"):
        adapt(nets.make(seed=3), method)
    assert same(first.state_dict(), before)
