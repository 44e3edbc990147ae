"""What becomes of labels that come late to the service? Learned by their age, or kept and charged but not learned."""

from __future__ import annotations

from pathlib import Path

import pytest
from serve.parts import crash, same, settings, settled, small_model, twin
from serve.web import post, running
from sqlalchemy import func, select

from wise_atta import errors
from wise_atta.serve import ledger as db
from wise_atta.serve.config import build
from wise_atta.serve.service import Service


def test_a_label_past_the_limit_stays_charged_is_never_learned_and_no_crash_changes_that(tmp_path: Path) -> None:
    with running(tmp_path, audit=0, late_limit=2) as (client, service):
        stream = service.streams["default"]
        for number in range(6):
            post(client, number)
        settled(service)
        old, *_, new = client.get("/queries?limit=50").json()["queries"]
        assert int(old["query"].split("-")[0]) < 4 and new["query"].split("-")[0] == "6"
        body = {"answers": [{"query": query["query"], "label": 2} for query in (old, new)]}
        assert client.post("/answers", json=body).json() == {"taken": 2, "held": 0}
        post(client, 6)
        settled(service)
        counts = stream.state.adapter.counts
        assert (counts.answered, counts.learned, counts.stale) == (2, 1, 1)
        with service.ledger.read() as session:
            assert session.scalars(select(db.Learned.query)).all() == [new["query"]]
            status = {row.query: row.status for row in session.scalars(select(db.Reply))}
            assert status == {old["query"]: "late", new["query"]: "accepted"}
            assert session.scalar(select(func.sum(db.Charge.units))) == stream.state.spent == counts.asked
        before = stream.state.state_dict()
        same(before, twin(service).state_dict())
        crash(service)
    again = Service(small_model(), settings(tmp_path, audit=0, late_limit=2))
    same(before, again.streams["default"].state.state_dict())
    again.close()


def test_the_adapter_of_a_stream_has_what_was_set_about_late_labels(tmp_path: Path) -> None:
    chosen = settings(tmp_path, context="source", late_weight=30.0, late_limit=200)
    questions = build(small_model(), chosen).questions
    assert (questions.context, questions.late_weight, questions.late_limit) == ("source", 30.0, 200)
    with pytest.raises(errors.BadConfig, match="late_weight"):
        build(small_model(), settings(tmp_path, late_weight=0.0))
