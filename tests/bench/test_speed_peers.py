"""Is the peer that speed is measured against the published sequence, and does the benchmark say what was done?"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import wise_atta as wa

FOLDER = Path(__file__).parents[2] / "benchmarks"
CLASSES = 6
Loader = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def load() -> Iterator[Loader]:
    """Loads a script of the folder, whose neighbours it imports by their plain names."""
    sys.path.insert(0, str(FOLDER))
    before = set(sys.modules)

    def one(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield one
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if name in ("authors", "peers", "speed"):
            del sys.modules[name]


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    with torch.no_grad():
        model[-1].weight.mul_(100)
    return model.double()


def stream(batches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(16, 3, 8, 8, generator=generator, dtype=torch.float64) for _ in range(batches)]


def test_the_peer_learns_what_the_published_rule_learns(load: Loader) -> None:
    authors = load("authors").Authors(net(), length=12)
    adapter = wa.adapt(net(), "wise", preset="authors", ratio=0.5, length=12)
    labelled = 0
    for x in stream(12):
        out = adapter.predict(x)
        rows = [query.index for query in out.queries]
        answers = {query.id: query.index % CLASSES for query in out.queries}
        assert torch.allclose(authors.model(x), out.logits, atol=1e-12)
        if rows and out.number > 4:
            drift = authors.drift(x, out.logits.softmax(1))
            assert out.view is not None
            assert torch.allclose(drift, out.view.drift, atol=1e-12)
        adapter.learn(out, answers)
        authors.learn(x, rows, list(answers.values()))
        labelled += len(rows)
    assert labelled == 6
    for name, tensor in adapter.classifier.live.tensors.items():
        assert torch.allclose(authors.model.get_parameter(name), tensor, atol=1e-12)
        assert not torch.equal(net().get_parameter(name), tensor)


def test_a_labelled_batch_costs_the_peer_four_forwards_and_two_backwards(load: Loader) -> None:
    authors = load("authors").Authors(net(), length=40)
    costs = set()
    for x in stream(40):
        before = authors.spent, authors.forwards, authors.backwards
        authors.step(x, [0] * len(x))
        after = authors.spent, authors.forwards, authors.backwards
        if authors.seen > 4:  # drift, and with it the anchor's forward, begins then
            costs.add(tuple(b - a for a, b in zip(before, after, strict=True)))
    assert costs == {(0, 2, 1), (1, 4, 2)}
    assert authors.spent == 20


def test_the_tent_written_by_hand_learns_what_tent_learns(load: Loader) -> None:
    load("authors")
    hand = load("peers").Tent(net())
    adapter = wa.adapt(net(), "tent")
    for x in stream(5):
        out = adapter.predict(x)
        assert torch.allclose(hand.step(x, []), out.logits, atol=1e-12)
        adapter.learn(out)


def test_a_mode_that_fails_is_reported_and_the_run_goes_on(
    load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load("authors")
    load("peers")
    speed = load("speed")
    monkeypatch.setattr(speed, "build", lambda name: net().float())
    broken = speed.Mode("broken", {"no_such_option": True})
    monkeypatch.setitem(speed.GROUPS, "cpu", [speed.Group("small", "fp32", [broken, speed.EAGER], methods=True)])
    out = tmp_path / "speed.json"
    sizes = ["--batch", "16", "--px", "8", "--batches", "10", "--rounds", "1"]
    speed.main(["--device", "cpu", "--out", str(out), *sizes])
    (group,) = json.loads(out.read_text())["groups"]
    rows = {(row["name"], row["mode"]): row for row in group["rows"]}
    assert "no_such_option" in rows["wise", "broken"]["error"]
    done = {name: (row["forwards"], row["backwards"]) for (name, mode), row in rows.items() if mode == "eager"}
    assert done["plain inference"] == (1, 0) and done["authors"] == (3, 1.5)
    assert done["wise"] == (1.5, 1) and done["tent"] == done["tent by hand"] == (1, 1)
    assert {"eta", "sar", "roid", "eatta"} <= done.keys()
    assert [name for (name, mode), row in rows.items() if mode == "eager" and "split_ms" not in row] == []
    assert set(rows["wise", "eager"]["ratio"]) >= {"plain inference", "tent by hand", "authors"}
    assert "no_such_option" in (tmp_path / "table-speed.md").read_text()


@pytest.mark.parametrize("fresh", [True, False])
def test_the_report_says_whether_memory_was_kept(
    load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    load("authors")
    load("peers")
    speed = load("speed")
    monkeypatch.setattr(speed, "build", lambda name: net().float())
    monkeypatch.setitem(speed.GROUPS, "cpu", [speed.Group("small", "fp32", [speed.EAGER])])
    kept: list[bool] = []
    monkeypatch.setattr(wa, "keep_memory", lambda: not kept.append(True))
    sizes = ["--batch", "16", "--px", "8", "--batches", "1", "--rounds", "1", "--rows", "wise"]
    out = tmp_path / "speed.json"
    speed.main(["--device", "cpu", "--out", str(out), *sizes, *["--fresh-memory"] * fresh])
    assert json.loads(out.read_text())["settings"]["keeps_memory"] is not fresh
    assert bool(kept) is not fresh
    assert ("memory kept" in (tmp_path / "table-speed.md").read_text()) is not fresh
