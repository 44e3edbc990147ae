"""Are pictures deleted in time, does the ledger get out, and do the commands do what they say?"""

from __future__ import annotations

import socket
import time
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from serve.parts import comes_back, database, same, send, settings, settled, small_model, twin
from serve.test_trust import answer, ask
from serve.web import running
from sqlalchemy import func, select
from typer.testing import CliRunner

from wise_atta import errors
from wise_atta.serve import cli, ledger as db
from wise_atta.serve.auth import Gate
from wise_atta.serve.retention import close_old, export, prune
from wise_atta.serve.service import Service


def test_old_pictures_go_and_the_record_stays(tmp_path: Path) -> None:
    with running(tmp_path, audit=0, checkpoint_events=2) as (client, service):
        ask(client, service)
        first, second = client.get("/queries?limit=2").json()["queries"]
        answer(client, first, 1)
        ask(client, service, 2, start=6)
        later = time.time() + 1
        with service.ledger.read() as session:
            before = session.scalar(select(func.count()).select_from(db.Question))
        assert service.ledger.write(lambda session: prune(session, later)).result() == 1
        with service.ledger.read() as session:
            rows = {row.id: row for row in session.scalars(select(db.Question))}
            assert len(rows) == before
            assert rows[first["query"]].picture is None and rows[first["query"]].query is None
            assert rows[second["query"]].picture is not None
            assert session.scalar(select(func.count()).select_from(db.Checkpoint)) == 1
        assert client.get(first["picture"]).status_code == 404
        # A restart needs nothing of what was deleted.
        state = service.streams["default"].state.state_dict()
    back = Service(small_model(), settings(tmp_path, audit=0, checkpoint_events=2))
    same(state, back.streams["default"].state.state_dict())
    back.close()


@pytest.mark.parametrize("part", [1000, db.PART])
@pytest.mark.parametrize("keep_log", [0, 60])
def test_no_old_checkpoint_keeps_pixels_unless_a_log_begins_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_log: int, part: int
) -> None:
    monkeypatch.setattr(db, "PART", part)
    service = Service(small_model(), settings(tmp_path, checkpoint_events=1, keep_log=keep_log))
    for number in range(6):
        send(service.streams["default"], number)
        settled(service)
        service.streams["default"].between(service.streams["default"].saved).result(30)
    now = time.time()

    def age(session: db.Session) -> list[int]:
        rows = session.scalars(select(db.Checkpoint).order_by(db.Checkpoint.seq)).all()
        for row, days in zip(rows, (50, 40, 20, 10, 5, 0), strict=True):
            row.at = now - days * 86400
        return [row.seq for row in rows]

    seqs = service.ledger.write(age).result()
    service.ledger.write(lambda session: prune(session, now - 30 * 86400)).result()
    with service.ledger.read() as session:
        left = list(session.scalars(select(db.Checkpoint.seq).order_by(db.Checkpoint.seq)))
        assert left == seqs[1 if keep_log else 2 :]
        digests = set(session.scalars(select(db.Checkpoint.digest))) if part == 1000 else set()
        assert set(session.scalars(select(db.Part.digest))) == digests
        assert not keep_log or db.reaches_back_to(session, "default") == left[0]
    service.close()


def test_questions_that_nobody_answered_in_time_are_given_up(tmp_path: Path) -> None:
    service = Service(small_model(), settings(tmp_path))
    stream = service.streams["default"]
    for number in range(8):
        send(stream, number)
    settled(service)
    audited, asked = stream.state.audit.account.spent, stream.state.adapter.counts.asked
    assert stream.state.spent == audited + asked and audited and asked
    write = close_old("default", time.time() + 1)
    service.ledger.write(write, lambda event: event and stream.learner.feed(event)).result()
    settled(service)
    assert stream.state.adapter.open == [] and stream.state.audit.open == {}
    # Nobody was shown them: their labels return to the account, but for the audit's.
    assert stream.state.spent == audited
    with service.ledger.read() as session:
        assert db.count_by(session, db.Question.state) == {"expired": audited + asked}
        assert session.scalar(select(func.sum(db.Charge.units))) == audited
    same(stream.state.state_dict(), twin(service).state_dict())
    service.close()


def test_a_question_that_somebody_has_seen_stays_charged_when_it_is_given_up_and_is_no_label(tmp_path: Path) -> None:
    with running(tmp_path, audit=0) as (client, service):
        stream = service.streams["default"]
        ask(client, service)
        (query,) = client.get("/queries").json()["queries"]
        write = close_old("default", time.time() + 1)
        service.ledger.write(write, lambda event: event and stream.learner.feed(event)).result()
        settled(service)
        assert stream.state.spent == stream.state.adapter.counts.shown == 1
        status = client.get("/streams/default").json()
        assert status["label_age_s"] is None and list(status["questions"]) == ["expired"]
        assert answer(client, query, 1).status_code == 410
        ask(client, service, 2, start=6)
        comes_back(service)


def test_the_time_to_a_label_counts_labels_alone(tmp_path: Path) -> None:
    with running(tmp_path, audit=0) as (client, service):
        ask(client, service)
        (query,) = client.get("/queries").json()["queries"]
        assert answer(client, query, "cant_tell").status_code == 200
        assert client.get("/streams/default").json()["label_age_s"] is None


def test_the_ledger_becomes_parquet_files_without_secrets_or_pictures(tmp_path: Path) -> None:
    with running(tmp_path, audit=0) as (client, service):
        ask(client, service)
        (query,) = client.get("/queries").json()["queries"]
        answer(client, query, 1)
        ask(client, service, 1, start=6)
        rows = export(service.ledger, tmp_path / "out")
    assert rows["learned"] == 1 and rows["queries"] == rows["budget"] > 1
    assert "tokens" not in rows and not (tmp_path / "out" / "tokens.parquet").exists()
    table = pq.read_table(tmp_path / "out" / "answers.parquet").to_pylist()
    assert [(row["query"], row["label"], row["by"]) for row in table] == [(query["query"], 1, "local")]
    assert "picture" not in pq.read_schema(tmp_path / "out" / "queries.parquet").names


def test_tokens_are_made_listed_and_revoked_from_the_terminal(tmp_path: Path) -> None:
    url, run = database(tmp_path), CliRunner()
    made = run.invoke(cli.app, ["token", "create", "ann", "--role", "annotator", "--database", url])
    assert made.exit_code == 0 and made.stdout.startswith("wa_")
    again = run.invoke(cli.app, ["token", "create", "ann", "--role", "annotator", "--database", url])
    assert again.exit_code == 2
    assert run.invoke(cli.app, ["token", "create", "bob", "--role", "king", "--database", url]).exit_code == 2
    listed = run.invoke(cli.app, ["token", "list", "--database", url])
    assert "ann" in listed.stdout and made.stdout.strip() not in listed.stdout
    ledger = db.Ledger(url)
    caller = Gate(ledger, open_without_tokens=False).caller(f"Bearer {made.stdout.strip()}")
    assert caller is not None and (caller.name, caller.role) == ("ann", "annotator")
    assert run.invoke(cli.app, ["token", "revoke", "ann", "--database", url]).exit_code == 0
    assert Gate(ledger, open_without_tokens=False).caller(f"Bearer {made.stdout.strip()}") is None
    ledger.close()
    assert run.invoke(cli.app, ["token", "revoke", "nobody", "--database", url]).exit_code == 2
    assert run.invoke(cli.app, ["export", str(tmp_path / "out"), "--database", url]).exit_code == 0
    assert run.invoke(cli.app, ["prune", "--days", "1", "--database", url]).stdout.strip() == "0"


def test_old_checkpoints_go_and_newer_ones_of_the_same_state_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "PART", 1000)
    ledger = db.Ledger(database(tmp_path))
    for seq, at in ((1, 0.0), (1, 100.0), (2, 200.0)):
        state = bytes([seq]) * 2500
        ledger.write(partial(db.add_checkpoint, stream="s", seq=seq, state=state, keep=9, keep_log=0, now=at)).result()
    ledger.write(lambda session: prune(session, before=50.0)).result()
    with ledger.read() as session:
        left = session.scalars(select(db.Checkpoint.seq).order_by(db.Checkpoint.seq)).all()
        assert [db.last_checkpoint(session, "s", before=seq + 1) is not None for seq in left] == [True, True]
    ledger.close()


def test_a_ledger_that_is_not_there_is_not_made_by_mistake(tmp_path: Path) -> None:
    url, run = f"sqlite:///{tmp_path / 'elsewhere.db'}", CliRunner()
    for words in (
        ["token", "list"],
        ["token", "revoke", "ann"],
        ["export", str(tmp_path / "out")],
        ["prune", "--days=1"],
    ):
        done = run.invoke(cli.app, [*words, "--database", url])
        assert done.exit_code == 2 and "there is no ledger" in done.stderr
    assert list(tmp_path.iterdir()) == []
    made = run.invoke(cli.app, ["token", "create", "ann", "--role", "admin", "--database", url])
    assert made.exit_code == 0 and made.stdout.startswith("wa_") and f"made a new ledger: {url}" in made.stderr
    assert run.invoke(cli.app, ["token", "create", "bob", "--role", "admin", "--database", url]).stderr == ""


def test_what_keeps_a_command_from_its_files_is_told_in_a_line(tmp_path: Path) -> None:
    url, run, nowhere = f"sqlite:///{tmp_path / 'ledger.db'}", CliRunner(), "/proc/nowhere"
    db.Ledger(url).close()
    copy, broken = tmp_path / "copy.db", tmp_path / "broken.db"
    broken.write_text("no database, but as long as one has to be to be looked at " * 100)
    commands = [
        ["backup", f"{nowhere}/copy.db", "--database", url],
        ["backup", str(copy), "--database", f"sqlite:///{broken}"],
        ["export", nowhere, "--database", url],
        ["export", str(broken), "--database", url],
        ["token", "list", "--database", f"sqlite:///{broken}"],
    ]
    for words in commands:
        done = run.invoke(cli.app, words)
        assert done.exit_code == 2 and done.stderr.startswith("error: "), words
    # Nothing is left half done.
    assert not list(tmp_path.glob("copy.db*"))


def test_an_error_is_printed_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    cli._failed(errors.BadConfig("cannot listen on 127.0.0.1:-1: [no]"))
    assert capsys.readouterr().err == "error: cannot listen on 127.0.0.1:-1: [no]\n"


def test_an_address_that_is_taken_is_told_before_anybody_is_invited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = settings(tmp_path, database=f"sqlite:///{tmp_path / 'ledger.db'}", classes=None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.BadConfig, match=f"cannot listen on 127.0.0.1:{port}"):
            cli.run("wise_atta/digits_cnn@random", options, "127.0.0.1", port)
    assert "listens" not in capsys.readouterr().err
    # Nothing keeps the ledger.
    db.Ledger(options.database).close()


def test_an_address_that_others_can_reach_needs_a_token_first(tmp_path: Path) -> None:
    url = database(tmp_path)
    with pytest.raises(errors.BadConfig, match="there is no token"):
        cli.run("wise_atta/digits_cnn@random", settings(tmp_path, database=url), "0.0.0.0", 0)
    CliRunner().invoke(cli.app, ["token", "create", "ann", "--role", "admin", "--database", url])
    cli.require_tokens(url, "0.0.0.0")


def test_class_names_come_one_a_line(tmp_path: Path) -> None:
    names = tmp_path / "classes.txt"
    names.write_text("cat\n\n dog \n", encoding="utf-8")
    assert cli.read_classes(names) == ("cat", "dog")
    # As some editors write it.
    names.write_text("cat\r\ndog\r\n", encoding="utf-8-sig")
    assert cli.read_classes(names) == ("cat", "dog")
    names.write_text("cat\ncat\n", encoding="utf-8")
    with pytest.raises(errors.BadConfig, match="twice"):
        cli.read_classes(names)


def test_more_than_a_label_a_picture_is_refused_in_the_words_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(errors.BadConfig, match="ratio=2 labels per picture"):
        settings(tmp_path, ratio=2)
