"""Do several processes that share the batches of one stream do what one process does with whole batches?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core import nets, ranks

from wise_atta import adapt, errors

heavy = [pytest.mark.heavy, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes did with every scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    outs = [folder / f"{rank}.pt" for rank in (0, 1)]
    command = [sys.executable, Path(ranks.__file__)]
    processes = [
        subprocess.Popen([*command, str(rank), "2", folder / "store", out], stderr=subprocess.PIPE, text=True)
        for rank, out in enumerate(outs)
    ]
    try:
        outputs = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return [torch.load(out) for out in outs]


def agree(scenario: ranks.Scenario, parts: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    tolerance = 1e-5 if scenario.dtype == torch.float32 else 1e-10
    assert alone["moved"] > 1e-3
    if "ratio" in scenario.options:
        assert alone["counts"]["learned"] >= 2
    for part in parts:
        assert part["asked"] == alone["asked"] and part["counts"] == alone["counts"]
        assert torch.equal(part["flat"], parts[0]["flat"])
    # Every question comes up in one process, once.
    assert sorted(query for part in parts for query in part["own"]) == sorted(alone["own"])
    torch.testing.assert_close(parts[0]["flat"], alone["flat"], rtol=tolerance, atol=tolerance)
    for whole, *shares in zip(alone["logits"], *(part["logits"] for part in parts), strict=True):
        torch.testing.assert_close(torch.cat(shares), whole, rtol=tolerance, atol=tolerance)


class TestTwoProcesses:
    pytestmark = heavy

    @pytest.mark.parametrize("name", ranks.SCENARIOS)
    def test_they_do_what_one_does(self, name: str, both: list[dict[str, Any]]) -> None:
        scenario = ranks.SCENARIOS[name]
        parts = [rank[name] for rank in both]
        agree(scenario, parts, ranks.run(scenario))
        assert tuple(len(part["logits"][0]) for part in parts) == scenario.shares

    def test_a_state_of_theirs_is_a_state_of_one(self, both: list[dict[str, Any]]) -> None:
        scenario = ranks.SCENARIOS["wise, late"]
        adapter = adapt(nets.make(scenario.net), scenario.method, **scenario.options)
        adapter.load_state_dict(both[1]["wise, late"]["state"])
        assert torch.equal(adapter.classifier.live.flat, both[0]["wise, late"]["flat"])
        assert [query.id for query in adapter.open] != []

    def test_options_that_differ_are_refused_in_both(self, both: list[dict[str, Any]]) -> None:
        for rank in both:
            assert rank["refusals"]["other options"].startswith("BadConfig: rank")
            assert "different options (update)" in rank["refusals"]["other options"]
            assert "different options (policy, selector)" in rank["refusals"]["other seed"]
            assert "different options (mixture)" in rank["refusals"]["other mixture"]

    @pytest.mark.parametrize(
        ("what", "says"),
        [
            ("roid", "PriorCorrected cannot be spread over several processes"),
            ("cotta", "TeacherStudent cannot be spread over several processes"),
            ("guard", "guard and group cannot be used together"),
            ("compile", "compile and group cannot be used together"),
            ("renorm", "statistics='renorm' is not known over several processes"),
        ],
    )
    def test_what_cannot_be_shared_is_refused(self, what: str, says: str, both: list[dict[str, Any]]) -> None:
        assert [says in rank["refusals"][what] for rank in both] == [True, True]

    def test_a_bad_share_is_an_error_in_both_and_they_go_on(self, both: list[dict[str, Any]]) -> None:
        good, bad = (rank["bad shares"] for rank in both)
        assert [message.partition(":")[0] for message in bad] == ["BadInput", "BadInput", "BadInput", "NotFinite"]
        assert [message.partition(":")[0] for message in good] == ["BadInput", "BadInput", "BadInput", "NotFinite"]
        assert "rank 1 has a share that cannot be predicted on" in good[0]


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["tent", "tent, mixture", "wise, mixed statistics", "wise, late", "wise, layer norm"])
@pytest.mark.usefixtures("group_of_one")
def test_one_process_in_a_group_does_what_it_does_alone(name: str) -> None:
    scenario = ranks.SCENARIOS[name]
    agree(scenario, [ranks.run(scenario, group=dist.group.WORLD)], ranks.run(scenario))


def test_a_group_needs_processes_that_know_of_each_other() -> None:
    with pytest.raises(errors.BadConfig, match="init_process_group"):
        adapt(nets.make(), "tent", group="world")


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_another_name_is_unknown() -> None:
    with pytest.raises(errors.UnknownName, match="wrold"):
        adapt(nets.make(), "tent", group="wrold")


@pytest.mark.usefixtures("group_of_one")
def test_one_sample_in_all_shares_together_is_refused() -> None:
    with pytest.raises(errors.SingleSample):
        adapt(nets.make(), "tent", group="world").predict(nets.batch(n=1))
