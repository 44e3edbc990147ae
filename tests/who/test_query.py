"""Are questions safe to keep, and answers read as people mean them?"""

from __future__ import annotations

import copy
import dataclasses
import enum
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import wise_atta.who.query as query_module
from wise_atta import errors
from wise_atta.engine import host
from wise_atta.stream import Batch, leaves
from wise_atta.who import CANT_TELL, SKIP, Answer, Query, as_batch
from wise_atta.who.query import read


def test_a_question_has_the_same_id_in_every_run() -> None:
    batch = Batch(torch.rand(3, 2), ids=["a", "b", "c"], meta={"domain": "fog"})
    query = Query.of(batch, number=12, index=1, logits=torch.zeros(3, 4))
    assert (query.id, query.batch, query.index, query.asked_at) == ("12-1", 12, 1, 12)
    assert (query.sample_id, query.meta, query.classes, query.audit) == ("b", {"domain": "fog"}, 4, False)


def test_a_question_keeps_its_input_when_the_batch_is_overwritten() -> None:
    inputs, logits, meta = torch.ones(3, 2), torch.ones(3, 4, requires_grad=True), {"tags": ["x"]}
    query = Query.of(Batch(inputs, meta=meta), number=1, index=1, logits=logits * 1)
    inputs.zero_()
    meta["tags"].append("y")
    assert torch.equal(query.input, torch.ones(2))
    assert query.input.untyped_storage().nbytes() == 2 * 4, "the batch must not be kept alive"
    assert not query.logits.requires_grad
    assert query.meta == {"tags": ["x"]}


def test_a_question_asked_in_inference_mode_can_be_learned_later() -> None:
    with torch.inference_mode():
        query = Query.of(Batch(torch.ones(1, 2)), number=1, index=0, logits=torch.zeros(1, 2))
    weight = torch.ones(2, requires_grad=True)
    (as_batch(query) * weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(2))


def test_a_tree_of_tensors_is_cut_leaf_by_leaf() -> None:
    inputs = {"tokens": torch.arange(6).view(3, 2), "more": [torch.zeros(3, 1), torch.ones(3, 5)]}
    query = Query.of(Batch(inputs), number=1, index=2, logits=torch.zeros(3, 2))
    assert [list(leaf.shape) for leaf in leaves(query.input)] == [[2], [1], [5]]
    assert [list(leaf.shape) for leaf in leaves(as_batch(query))] == [[1, 2], [1, 1], [1, 5]]
    assert query.input["tokens"].tolist() == [4, 5]


class Weather(str, enum.Enum):  # noqa: UP042  the older way, whose str() is not its value
    FOG = "fog"


def test_a_question_is_saved_with_plain_types_only() -> None:
    meta = {"x": np.float64(0.5), "n": np.int64(3), "kind": Weather.FOG, "t": (1, None, True), "map": torch.eye(2)}
    batch = Batch((torch.rand(1, 2), torch.rand(1, 3, dtype=torch.float16)), ids=["a"], meta=meta)
    query = Query.of(batch, number=3, index=0, logits=torch.rand(1, 2), audit=True)
    file = io.BytesIO()
    torch.save(query.pack(), file)
    file.seek(0)
    back = Query.unpack(torch.load(file, weights_only=True))
    assert repr(back) == repr(query)
    assert {**back.meta, "map": None} == {"x": 0.5, "n": 3, "kind": "fog", "t": (1, None, True), "map": None}
    assert torch.equal(back.meta["map"], torch.eye(2))
    assert torch.equal(back.logits, query.logits)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back.input, query.input, strict=True))


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(2), {"deep": [b"x"]}, {(1, 2): 3}])
def test_facts_that_cannot_be_saved_are_refused_when_asked(value: object) -> None:
    with pytest.raises(errors.BadInput, match="meta"):
        Query.of(Batch(torch.rand(1, 2), meta={"fact": value}), number=1, index=0, logits=torch.zeros(1, 2))


def asked_away(monkeypatch: pytest.MonkeyPatch) -> tuple[Query, list[Tensor]]:
    """A question about a batch that the host cannot read, and the tensors that came to the host since."""
    batch, logits, fetched = Batch({"x": torch.ones(1, 2)}, ids=["a"]), torch.ones(1, 3), list[Tensor]()
    with monkeypatch.context() as patch:
        patch.setattr(query_module, "on_host", lambda tensor: False)
        query = Query.of(batch, number=1, index=0, logits=logits)
    assert isinstance(batch.inputs, dict)
    for tensor in (batch.inputs["x"], logits):
        tensor.fill_(7)
    copy_of = query_module.to_host
    monkeypatch.setattr(query_module, "to_host", lambda tensor: fetched.append(tensor) or copy_of(tensor))  # type: ignore[func-returns-value]
    return query, fetched


@pytest.mark.parametrize(
    "look",
    [
        lambda query: query,
        lambda query: pickle.loads(pickle.dumps(query)),
        copy.deepcopy,
        lambda query: dataclasses.replace(query, index=4),
        lambda query: Query.unpack(query.pack()),
    ],
)
def test_tensors_elsewhere_are_copied_at_once_but_fetched_only_when_looked_at(
    look: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, fetched = asked_away(monkeypatch)
    assert query.classes == 3 and "1-0" in repr(query) and not fetched
    seen = look(query)
    assert seen.input["x"].tolist() == [1, 1] and seen.logits.tolist() == [1, 1, 1]
    assert fetched
    fetched.clear()
    assert query.logits.tolist() == [1, 1, 1]
    query.fetch()
    assert not fetched


def test_who_looks_waits_until_the_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        """Makes the copies only when somebody waits for it."""

        def __init__(self, copies: list[Tensor]) -> None:
            self.copies = copies

        def synchronize(self) -> None:
            for copied in self.copies:
                copied.fill_(5)

    monkeypatch.setattr(host, "working", Stream)
    query, _ = asked_away(monkeypatch)
    assert query.input["x"].tolist() == [5, 5] and query.logits.tolist() == [5, 5, 5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_another_stream_sees_the_sample_that_was_asked_about() -> None:
    inputs, logits = torch.rand(1, 1000, device="cuda"), torch.rand(1, 3, device="cuda")
    expected = inputs[0].cpu(), logits[0].cpu()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        query = Query.of(Batch(inputs), number=1, index=0, logits=logits)
    assert torch.equal(query.input, expected[0]) and torch.equal(query.logits, expected[1])


def test_what_a_question_does_not_have_is_an_error_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = asked_away(monkeypatch)[0].nothing


def test_logits_of_a_whole_batch_are_refused() -> None:
    with pytest.raises(errors.BadInput, match=r"\[C\]"):
        Query("1-0", 1, 0, None, {}, torch.zeros(1, 2), 1, torch.zeros(3))


@pytest.mark.parametrize("raw", [2, np.int64(2), np.uint8(2), torch.tensor(2), torch.tensor(2, dtype=torch.uint8)])
def test_any_integer_is_a_label(raw: object) -> None:
    answer = read(raw, "1-0", classes=3)
    assert answer == Answer(2)
    assert type(answer.label) is int


@pytest.mark.parametrize(
    "raw", [True, np.True_, torch.tensor(True), 1.0, "1", torch.tensor(1.0), torch.tensor([1]), [1], float("nan")]
)
def test_what_is_no_integer_is_no_label(raw: object) -> None:
    with pytest.raises(errors.BadLabel, match="question '1-0'"):
        read(raw, "1-0", classes=3)
    with pytest.raises(errors.BadLabel):
        Answer(raw)


@pytest.mark.parametrize("raw", [-1, 3, Answer(3), np.int64(2**40), torch.tensor(-1)])
def test_a_label_out_of_range_is_refused(raw: object) -> None:
    with pytest.raises(errors.BadLabel, match="give 0 to 2"):
        read(raw, "1-0", classes=3)


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan"), "1", None])
def test_a_weight_must_count_for_something(weight: object) -> None:
    with pytest.raises(errors.BadConfig, match="weight"):
        Answer(0, weight=weight)


@pytest.mark.parametrize("verdict", [CANT_TELL, SKIP])
def test_verdicts_stay_themselves_when_copied_and_pickled(verdict: object) -> None:
    assert pickle.loads(pickle.dumps(verdict)) is verdict
    assert copy.deepcopy(verdict) is verdict
    assert pickle.loads(pickle.dumps(Answer(verdict, by="ann"))) == Answer(verdict, by="ann")


def test_only_a_class_or_cant_tell_decides() -> None:
    assert [Answer(label).decides for label in (0, 5, CANT_TELL, SKIP, None)] == [True, True, True, False, False]
