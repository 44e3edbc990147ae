"""Is every bad input an error of ours that says what to do, with the adapter exactly as before the call?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core import nets
from core.checks import look, same
from torch import Tensor, nn

from wise_atta import CANT_TELL, Adapter, Answer, Batch, adapt, errors, what


def wise(kind: str = "batch-norm", **options: Any) -> Adapter:
    """An adapter in the middle of its stream: one question open, one answered, one expired, statistics moving."""
    given = {"ratio": 1.0, "lr": 0.1, "policy": "uniform", "entropy": "all", "expires_after": 3}
    selector = what.Drift(balance=True)
    adapter = adapt(nets.make(kind), "wise", **({"statistics": "batch"} | given | {"selector": selector} | options))
    for number in range(1, 6):
        out = adapter.predict(nets.batch(kind, number))
        answers = {} if number != 4 else {query.id: 1 for query in out.queries}
        adapter.learn(out, answers)
    return adapter


def pixel(value: float, n: int = 8) -> Tensor:
    x = nets.batch(number=6, n=n)
    x[-1, 1, 2, 3] = value
    return x


OVERFLOW = torch.full((8, 3, 6, 6), 1e308, dtype=torch.float64)

PREDICT: dict[str, tuple[Any, type[errors.WiseAttaError], str]] = {
    "NaN in the inputs": (pixel(math.nan), errors.NotFinite, "inputs hold NaN or Inf: clean them"),
    "Inf in the inputs": (pixel(math.inf), errors.NotFinite, "inputs hold NaN or Inf"),
    "Inf in the logits": (OVERFLOW, errors.NotFinite, r"logits hold NaN or Inf although.*reset\(\)"),
    "a single sample": (nets.batch(n=1), errors.SingleSample, "statistics='ema'"),
    "an empty batch": (nets.batch(n=8)[:0], errors.BadInput, "empty"),
    "an empty tree": ([], errors.BadInput, "inputs|batch"),
    "a number": (torch.tensor(1.0), errors.BadInput, "empty|batch"),
    "another dtype": (nets.batch(dtype=torch.float32), errors.BadInput, "torch.float32, the model is torch.float64"),
    "bytes": (torch.zeros(8, 3, 6, 6, dtype=torch.uint8), errors.BadInput, r"\[8, 3, 6, 6\] torch.uint8"),
    "another device": (nets.batch().to("meta"), errors.BadInput, "on meta, the model is on cpu: move"),
    "another shape": (nets.batch()[:, :2], errors.BadInput, r"\[8, 2, 6, 6\]"),
    "no channels": (nets.batch()[:, 0, 0], errors.BadInput, r"\[8, 6\]"),
    "an array": (nets.batch().numpy(), errors.BadInput, "not ndarray"),
    "text": ("a picture", errors.BadInput, "not str"),
    "nothing": (None, errors.BadInput, "not NoneType"),
    "different lengths": ([nets.batch(), nets.batch(n=3)], errors.BadInput, "first dimensions"),
    "an unknown argument": ({"pictures": nets.batch()}, errors.BadInput, "pictures"),
    "facts that cannot be saved": (
        Batch(nets.batch(), meta={"tags": {1, 2}}),
        errors.BadInput,
        r"meta\['tags'\] is a set",
    ),
}


def unchanged(adapter: Adapter, call: Callable[[], Any], error: type[errors.WiseAttaError], match: str) -> None:
    """The call raises, and nothing of the adapter, the model or its future is different from before."""
    before, model = adapter.state_dict(), look(adapter.classifier.model)
    numbers = (adapter.number, adapter.counts, adapter.policy.spent, adapter.policy.seen, adapter.policy.last)
    with pytest.raises(error, match=match) as raised:
        call()
    assert type(raised.value) is error and isinstance(raised.value, errors.WiseAttaError)
    assert same(adapter.state_dict(), before)
    assert same(look(adapter.classifier.model), model)
    assert numbers == (adapter.number, adapter.counts, adapter.policy.spent, adapter.policy.seen, adapter.policy.last)


def rest(adapter: Adapter, kind: str = "batch-norm") -> list[Tensor]:
    logits = []
    for number in range(7, 10):
        out = adapter.predict(nets.batch(kind, number))
        adapter.learn(out, {query.id: nets.truth(query) for query in out.queries})
        logits.append(out.logits)
    return logits


@pytest.mark.parametrize("case", list(PREDICT))
def test_a_batch_that_cannot_be_predicted_on_changes_nothing(case: str) -> None:
    x, error, match = PREDICT[case]
    adapter, twin = wise(), wise()
    unchanged(adapter, lambda: adapter.predict(x), error, match)
    if "facts" not in case:
        unchanged(adapter, lambda: adapter.predict(x, ask=False, learn=False), error, match)
        unchanged(adapter, lambda: adapter.predict(x, ask=False), error, match)
    assert same(rest(adapter), rest(twin))


@pytest.mark.parametrize("case", ["NaN in the inputs", "another shape", "Inf in the logits"])
def test_a_prediction_of_before_can_still_be_learned_to_the_same_bits(case: str) -> None:
    x, error, match = PREDICT[case]
    adapter, twin = wise(), wise()
    out, other = adapter.predict(nets.batch(number=6)), twin.predict(nets.batch(number=6))
    unchanged(adapter, lambda: adapter.predict(x), error, match)
    adapter.learn(out, {query.id: 1 for query in out.queries})
    twin.learn(other, {query.id: 1 for query in other.queries})
    assert torch.equal(adapter.classifier.live.flat, twin.classifier.live.flat)


@pytest.mark.parametrize("statistics", ["source", "mixed", "ema"])
def test_a_bad_batch_leaves_moving_statistics_alone(statistics: Any) -> None:
    adapter, twin = wise(statistics=statistics), wise(statistics=statistics)
    unchanged(adapter, lambda: adapter.predict(pixel(math.nan)), errors.NotFinite, "inputs")
    assert same(rest(adapter), rest(twin))


def test_a_variance_that_overflows_though_the_logits_do_not_stays_out_of_the_moving_average() -> None:
    adapter = wise(statistics="ema")
    before = adapter.classifier.running
    out = adapter.predict(OVERFLOW)
    assert out.logits.isfinite().all() and before is not None
    adapter.learn(out)
    assert torch.equal(adapter.classifier.running, before)


def test_a_word_that_the_net_does_not_know_changes_nothing() -> None:
    adapter = wise("text")
    bad = nets.batch("text", 6) | {"ids": torch.full((8, 7), 99)}
    unchanged(adapter, lambda: adapter.predict(bad), errors.BadInput, "index out of range")


def test_ids_must_be_as_many_as_samples() -> None:
    with pytest.raises(errors.BadInput, match="3 ids for 8 samples"):
        Batch(nets.batch(), ids=["a", "b", "c"])


ANSWERS: dict[str, tuple[Callable[[Adapter, str], Any], type[errors.WiseAttaError], str]] = {
    "a label out of range": (lambda a, q: {q: 5}, errors.BadLabel, "0.*4|5 classes"),
    "a negative label": (lambda a, q: {q: -1}, errors.BadLabel, "-1"),
    "a label that is no whole number": (lambda a, q: {q: 1.5}, errors.BadLabel, "1.5"),
    "a label that is text": (lambda a, q: {q: "cat"}, errors.BadLabel, "cat"),
    "a truth value": (lambda a, q: {q: True}, errors.BadLabel, "True"),
    "a vector": (lambda a, q: {q: torch.tensor([1, 2])}, errors.BadLabel, "tensor"),
    "a wrapped label out of range": (lambda a, q: {q: Answer(7)}, errors.BadLabel, "7"),
    "an unknown question": (lambda a, q: {"77-7": 1}, errors.UnknownQuery, "'77-7' was never asked"),
    "a known and an unknown question": (lambda a, q: {q: 1, "77-7": 1}, errors.UnknownQuery, "'77-7'"),
    "an expired question": (lambda a, q: {ended(a, "expired"): 1}, errors.UnknownQuery, "expired"),
    "a conflicting answer": (lambda a, q: {ended(a, 1): 2}, errors.Conflict, "answered 1 and now 2"),
    "can't tell after an answer": (lambda a, q: {ended(a, 1): CANT_TELL}, errors.Conflict, "cant_tell"),
    "a list": (lambda a, q: [1], errors.BadInput, "map question ids"),
}


def ended(adapter: Adapter, how: Any) -> str:
    """The id of a question that ended that way."""
    return next(name for name, end in adapter.state_dict()["desk"]["closed"].items() if end == how)


@pytest.mark.parametrize("case", list(ANSWERS))
def test_an_answer_that_cannot_be_learned_changes_nothing(case: str) -> None:
    make, error, match = ANSWERS[case]
    adapter, twin = wise(), wise()
    out, other = adapter.predict(nets.batch(number=6)), twin.predict(nets.batch(number=6))
    answers = make(adapter, out.queries[0].id)
    unchanged(adapter, lambda: adapter.learn(out, answers), error, match)
    unchanged(adapter, lambda: adapter.answer(answers), error, match)
    adapter.learn(out, {out.queries[0].id: 1})
    twin.learn(other, {other.queries[0].id: 1})
    assert same(rest(adapter), rest(twin))


def test_an_answer_before_any_question_changes_nothing() -> None:
    adapter = adapt(nets.make(), "wise", ratio=0.5)
    unchanged(adapter, lambda: adapter.answer({"1-1": 0}), errors.UnknownQuery, "'1-1' was never asked")
    unchanged(adapter, lambda: adapter.show(["1-1"]), errors.UnknownQuery, "'1-1' was never asked")
    out = adapter.predict(nets.batch())
    unchanged(adapter, lambda: adapter.learn(out, {"1-1": 0}), errors.UnknownQuery, "never asked")


def test_learning_twice_changes_nothing() -> None:
    adapter = wise()
    out = adapter.predict(nets.batch(number=6))
    adapter.learn(out, {query.id: 1 for query in out.queries})
    unchanged(adapter, lambda: adapter.learn(out), errors.AlreadyLearned, "call predict again")


def test_learning_from_plain_inference_or_another_adapter_changes_nothing() -> None:
    adapter, other = wise(), wise()
    plain = adapter.predict(nets.batch(number=6), ask=False, learn=False)
    foreign = other.predict(nets.batch(number=6))
    for out in (plain, foreign):
        unchanged(adapter, lambda out=out: adapter.learn(out), errors.BadInput, "plain inference or another adapter")
    other.learn(foreign)


def test_a_ratio_above_the_labels_of_a_batch_is_refused() -> None:
    with pytest.raises(errors.BadConfig, match="ratio"):
        adapt(nets.make(), "wise", ratio=1.5).predict(nets.batch())
    adapter = adapt(nets.make(), "wise", ratio=1.5, labels=2)
    adapter.predict(nets.batch())


def test_a_net_that_diverges_is_recovered_by_reset() -> None:
    net = nets.make("tokens", dtype=torch.float32)
    adapter = adapt(net, "tent", lr=1e30)
    x = nets.batch("tokens", dtype=torch.float32)
    with pytest.raises(errors.NotFinite, match=r"call reset\(\) and lower the learning rate"):
        for _ in range(20):
            adapter.learn(adapter.predict(x))
    adapter.reset()
    assert adapter.predict(x).logits.isfinite().all()


def test_a_source_that_gives_nan_is_not_taken_for_a_wrong_head() -> None:
    net = nets.make()
    with torch.no_grad():
        net.fc.weight.fill_(math.nan)
    adapter = adapt(net, "tent")
    with pytest.raises(errors.NotFinite, match="logits"):
        adapter.predict(nets.batch())


def test_a_net_that_masks_classes_is_told_to_name_the_others() -> None:
    net = nets.make()
    with torch.no_grad():
        net.fc.bias[3] = -math.inf
    adapter = adapt(net, "tent")
    with pytest.raises(errors.NotFinite, match=r"model itself gives them.*classes="):
        adapter.predict(nets.batch())
    adapter = adapt(net, "tent", classes=[0, 1, 2, 4])
    adapter.learn(adapter.predict(nets.batch()))
    assert adapter.predict(nets.batch(number=2)).logits.isfinite().all()


def test_errors_can_be_caught_as_what_python_calls_them() -> None:
    """A caller who knows nothing of this library still catches them."""
    adapter = wise()
    out = adapter.predict(nets.batch(number=6))
    with pytest.raises(ValueError):
        adapter.predict(pixel(math.nan))
    with pytest.raises(KeyError):
        adapter.learn(out, {"99-9": 1})
    with pytest.raises(ValueError):
        adapter.learn(out, {out.queries[0].id: 99})
    with pytest.raises(ValueError):
        adapt(nn.Linear(2, 2), "wise", ratio=-1)
