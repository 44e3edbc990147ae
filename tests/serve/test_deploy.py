"""Does what the pages about running it say hold? Paths, options and extras exist; a backup comes back."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest
import typer
from serve.parts import same, send, settings, settled, small_model
from serve.web import running
from typer.testing import CliRunner

from wise_atta.serve import cli
from wise_atta.serve.service import Service

ROOT = Path(__file__).parents[2]
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
UNIT = (ROOT / "deploy" / "wise-atta.service").read_text(encoding="utf-8")


def steps() -> list[tuple[str, str]]:
    """Instructions of the container file, with their lines joined."""
    lines = [line for line in CONTAINER.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def only(name: str) -> str:
    (rest_of_step,) = [rest for step, rest in steps() if step == name]
    return rest_of_step


def check_serve(words: list[str]) -> None:
    """Have the command line read a call of `wise-atta serve`."""
    app = typer.Typer()
    app.command()(cli.serve)
    command = typer.main.get_command(app)
    assert words[0] == "serve"
    # Unknown options and values of the wrong type are refused here.
    command.make_context("serve", words[1:])


def test_the_container_is_built_from_what_is_there() -> None:
    for step, rest in steps():
        if step == "COPY":
            assert all((ROOT / name).exists() for name in rest.split()[:-1]), rest
    assert "build -f deploy/Containerfile" in CONTAINER
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r'pip install [^"]*"\.\[([\w,]+)\]"', CONTAINER)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert json.loads(only("ENTRYPOINT")) == ["wise-atta"] and "wise-atta" in project["scripts"]
    # What is built needs these beside the sources.
    copied = " ".join(rest for step, rest in steps() if step == "COPY")
    assert project["readme"] in copied and all(name in copied for name in project["license-files"])


def test_the_container_runs_as_nobody_special_and_keeps_its_state_in_a_volume() -> None:
    names = [step for step, _ in steps()]
    assert only("USER") == "wise-atta" and names.index("USER") < names.index("CMD")
    volume = only("VOLUME")
    assert f"sqlite:///{volume}/" in only("ENV") and f"XDG_CACHE_HOME={volume}/" in only("ENV")
    words = json.loads(only("CMD"))
    check_serve(words)
    assert words[words.index("--port") + 1] == only("EXPOSE")


def test_the_container_asks_a_call_that_needs_no_token(tmp_path: Path) -> None:
    (path,) = re.findall(rf"127\.0\.0\.1:{only('EXPOSE')}(/\w+)", only("HEALTHCHECK"))
    code = json.loads(only("HEALTHCHECK").partition("CMD ")[2])[2]
    compile(code, "healthcheck", "exec")
    with running(tmp_path, loopback=False) as (client, _):
        assert client.get(path).status_code == 200


def test_the_unit_starts_what_there_is() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT)
    command = shlex.split(unit["Service"]["ExecStart"])
    assert Path(command[0]).name == "wise-atta"
    check_serve(command[1:])
    assert f"sqlite:////var/lib/{unit['Service']['StateDirectory']}/" in UNIT
    for name in re.findall(r"^(?:Environment=)(\w+)=", UNIT, re.M):
        sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
        assert name in sources


def page_commands(heading: str) -> list[list[str]]:
    """The commands under a heading of the page about running it."""
    page = (ROOT / "docs" / "guide" / "operate.md").read_text(encoding="utf-8")
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.S)
    return [shlex.split(line) for line in block.splitlines()]


def follow(heading: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.chdir(folder)
    output = ""
    for words in page_commands(heading):
        assert words[:2] == ["wise-atta", "ledger"]
        done = CliRunner().invoke(cli.app, words[2:])
        output += done.output
        if done.exit_code:
            break
    return output


def test_a_backup_of_a_running_service_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = settings(tmp_path, database=f"sqlite:///{tmp_path / 'ledger.db'}", checkpoint_events=3)
    service = Service(small_model(), options)
    for number in range(5):
        send(service.streams["default"], number)
    settled(service)
    saved = service.streams["default"].state.state_dict()
    follow("Backup", monkeypatch, tmp_path)
    assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600
    assert "is there already" in follow("Backup", monkeypatch, tmp_path)
    assert "in use" in follow("Restore", monkeypatch, tmp_path)
    for number in range(5, 9):
        send(service.streams["default"], number)
    service.close()
    later = service.streams["default"].state.state_dict()
    # As a kill leaves it: something that is not in the file yet.
    (tmp_path / "ledger.db-wal").write_bytes(b"of the old one")
    aside = follow("Restore", monkeypatch, tmp_path).strip()
    back = Service(small_model(), options)
    same(saved, back.streams["default"].state.state_dict())
    send(back.streams["default"], 5)
    back.close()
    # What was there before is kept.
    (tmp_path / f"{aside}-wal").unlink()
    old = Service(small_model(), settings(tmp_path, database=f"sqlite:///{tmp_path / aside}", checkpoint_events=3))
    same(later, old.streams["default"].state.state_dict())
    old.close()


def test_what_is_no_ledger_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(small_model(), settings(tmp_path, database=f"sqlite:///{tmp_path / 'ledger.db'}"))
    service.close()
    before = (tmp_path / "ledger.db").read_bytes()
    assert "it is not there" in follow("Restore", monkeypatch, tmp_path)
    (tmp_path / "copy.db").write_bytes(b"SQLite format 3\x00" + bytes(500))
    assert "no sound ledger" in follow("Restore", monkeypatch, tmp_path)
    assert (tmp_path / "ledger.db").read_bytes() == before
    refused = CliRunner().invoke(cli.app, ["backup", "a.db", "--database", "postgresql+psycopg://host/a"])
    assert refused.exit_code == 2 and "pg_dump" in refused.output


@pytest.mark.parametrize("page", ["docs/serve.md", "docs/guide/first-label.md", "docs/guide/operate.md"])
def test_commands_on_the_pages_are_commands(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    ours = [shlex.split(line) for line in lines if line.startswith("wise-atta ")]
    assert ours
    command = typer.main.get_command(cli.app)
    for words in ours:
        if words[1] == "serve":
            check_serve(words[1:])
            continue
        assert words[1] == "ledger"
        with click.Context(command) as context:
            current: click.Command = command
            rest = words[2:]
            while isinstance(current, click.Group):
                inner = current.get_command(context, rest.pop(0))
                assert inner is not None, words
                current = inner
            current.make_context(current.name, list(rest))
