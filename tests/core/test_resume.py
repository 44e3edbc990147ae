"""Is a state enough to go on to the same bits, small, safe to load, and refused where it does not belong?"""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from core import nets, resume
from core.checks import loaded, same, saved, stored
from torch import nn

from wise_atta import Adapter, adapt, errors, what, who

# -- going on ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every adapter run through in this process, and once more with a stop in the middle and a new process after it."""
    folder = tmp_path_factory.mktemp("resume")
    runs: dict[str, Any] = {}
    for index, (name, build) in enumerate(resume.BUILD.items()):
        adapter = build()
        for number in range(1, resume.STOP + 1):
            adapter.step(resume.batch(name, number))
        torch.save(adapter.state_dict(), folder / f"{index}.state")
        runs[name] = {
            "stopped": adapter.state_dict(),
            "logits": resume.go_on(adapter, name, resume.STOP + 1),
            "state": adapter.state_dict(),
        }
    command = [sys.executable, resume.__file__, str(folder), str(resume.STOP + 1)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for index, run in enumerate(runs.values()):
        run["resumed"] = loaded((folder / f"{index}.out").read_bytes())
    return runs


@pytest.mark.parametrize("name", list(resume.BUILD))
def test_a_new_process_goes_on_to_the_same_bits(stopped: dict[str, Any], name: str) -> None:
    run = stopped[name]
    wrong = [i for i, logits in enumerate(run["logits"]) if not same(logits, run["resumed"]["logits"][i])]
    assert not wrong, f"outputs differ from batch {resume.STOP + 1 + wrong[0]} on"
    for part in run["state"]:
        assert same(run["state"][part], run["resumed"]["state"][part]), part


def test_what_was_stopped_had_something_to_lose(stopped: dict[str, Any]) -> None:
    state = stopped["delayed labels, momentum, anchor, ema, balance"]["stopped"]
    assert state["desk"]["open"] and state["annotator"]["due"] and state["annotator"]["held"]
    assert state["running"] is not None and state["anchor"] is not None
    assert state["selector"]["last_score"] and state["policy"]["scores"]
    assert state["update"]["optimizer"]["optimizer"]
    assert state["desk"]["counts"]["expired"] and state["desk"]["counts"]["learned"]


def wise(net: nn.Module | None = None, **options: Any) -> Adapter:
    given = {"ratio": 1.0, "policy": "uniform", "lr": 0.1, "entropy": "all"} | options
    return adapt(nets.make() if net is None else net, "wise", **({"statistics": "batch"} | given))


def play(adapter: Adapter, numbers: range, answer: bool = True) -> list[torch.Tensor]:
    logits = []
    for number in numbers:
        out = adapter.predict(nets.batch(number=number))
        adapter.learn(out, {query.id: nets.truth(query) for query in out.queries} if answer else {})
        logits.append(out.logits)
    return logits


def test_a_state_is_a_copy_and_can_be_loaded_again_and_again() -> None:
    adapter = wise(statistics="ema")
    play(adapter, range(1, 4))
    state = adapter.state_dict()
    kept = copy.deepcopy(state)
    first = play(adapter, range(4, 7))
    for _ in range(2):
        adapter.load_state_dict(state)
        assert same(play(adapter, range(4, 7)), first)
    assert same(state, kept)


def test_a_state_taken_between_predict_and_learn_belongs_to_the_moment_before_learning() -> None:
    adapter, other = wise(), wise()
    out = adapter.predict(nets.batch())
    other.load_state_dict(saved(adapter.state_dict()))
    adapter.learn(out)
    assert torch.equal(other.classifier.live.flat, other.classifier.source_flat())
    assert [query.id for query in other.open] == [query.id for query in out.queries]
    step = other.learn(other.predict(nets.batch(number=2)), {out.queries[0].id: 1})
    assert step.late == 1 and step.number == 2


def test_loading_drops_a_graph_of_before() -> None:
    adapter, other = wise(), wise()
    play(other, range(1, 4))
    out = adapter.predict(nets.batch(), ask=False)
    adapter.load_state_dict(other.state_dict())
    adapter.learn(out)
    other.learn(other.predict(nets.batch(), ask=False))
    assert torch.equal(adapter.classifier.live.flat, other.classifier.live.flat)


@pytest.mark.parametrize("call", ["predict", "learn"])
def test_a_signal_in_the_middle_of_a_call_cannot_save_half_of_it(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapt(nets.make(), "wise", ratio=1.0, policy="uniform", lr=0.1)
    states: list[Any] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: states.append(adapter.state_dict()))
    try:
        out = adapter.predict(nets.batch())
        of, part = (adapter, "_ask") if call == "predict" else (adapter.update, "learn")
        whole = getattr(of, part)

        def interrupted(*args: Any) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return whole(*args)

        with monkeypatch.context() as patch:
            patch.setattr(of, part, interrupted)
            with pytest.raises(errors.WiseAttaError, match="in the middle"):
                adapter.predict(nets.batch()) if call == "predict" else adapter.learn(out)
        assert not states and adapter.policy.spent == adapter.counts.asked == adapter.number == 1
        adapter.on_step(lambda step: signal.raise_signal(signal.SIGUSR1))
        adapter.learn(out)
        assert same(states[-1], adapter.state_dict())
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_frozen_adapter_stays_frozen() -> None:
    adapter, other = wise(), wise()
    adapter.freeze()
    other.load_state_dict(saved(adapter.state_dict()))
    assert not other.predict(nets.batch()).queries


# -- size -------------------------------------------------------------------------------------------------------------


class Wide(nets.BatchNormCnn):
    """Four million frozen weights, and two hundred thousand that adapt."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(2000, 2000, 1)
        self.block = nn.Sequential(nn.Conv2d(8, 100_000, 1, bias=False), nn.BatchNorm2d(100_000), nn.SiLU())
        self.fc = nn.Linear(100_000, 2)


@pytest.mark.parametrize("waiting", [0, 3])
def test_a_state_is_three_times_the_adapted_tensors_and_the_open_questions_never_the_model(waiting: int) -> None:
    adapter = wise(nets.trained(Wide, dtype=torch.float32), train_head="bias", ratio=1.0)
    for number in range(1, 4):
        out = adapter.predict(nets.batch(number=number, n=2, dtype=torch.float32))
        adapter.learn(out, {} if number <= waiting else {query.id: 0 for query in out.queries})
    adapted = sum(tensor.numel() * 4 for tensor in adapter.classifier.live.tensors.values())
    assert adapted == 4 * (2 * 100_000 + 2 * 8 + 2)
    # A question: its sample, its logits, and the mean and variance of every BatchNorm layer.
    questions = waiting * 4 * (3 * 6 * 6 + 2 + 2 * (100_000 + 8))
    size = len(stored(adapter.state_dict()))
    assert size <= 3 * adapted + 2**20 + questions
    assert size >= 3 * adapted + questions - 1000, "tensors, momentum and anchor are all there"


def test_a_state_of_the_questions_that_an_annotator_holds_stores_each_tensor_once() -> None:
    adapter = wise(annotator=who.Inbox(), ratio=1.0)
    x = torch.linspace(0, 1, 2 * 3 * 400 * 400, dtype=torch.float64).view(2, 3, 400, 400)
    adapter.step(x)
    assert len(adapter.open) == 1
    assert len(stored(adapter.state_dict())) < 1.5 * x[0].nbytes + 2**20


# -- where it does not belong -----------------------------------------------------------------------------------------


def other_weights() -> nn.Module:
    """A net that differs in frozen weights alone."""
    net = nets.make()
    with torch.no_grad():
        net.conv1.weight.mul_(1.001)
    return net


FOREIGN: dict[str, tuple[Any, str]] = {
    "another net": (lambda: wise(nets.make("group-norm")), "another model"),
    "other weights": (lambda: wise(nets.make(seed=7)), "another model"),
    "other frozen weights": (lambda: wise(other_weights()), "another model: network"),
    "another dtype": (lambda: wise(nets.make(dtype=torch.float32)), "another model.*dtype"),
    "other tensors": (lambda: wise(train_head="bias"), "another model.*groups"),
    "another method": (lambda: adapt(nets.make(), "tent"), "another method: update"),
    "another policy": (lambda: wise(policy="random"), "policy Random there, Uniform here"),
    "another ratio": (lambda: wise(ratio=0.5), "ratio"),
    "another selector": (lambda: wise(selector="margin"), "selector Margin there, Drift here"),
    "another utility": (lambda: wise(utility="mean-drift"), "utility MeanDrift there, Count here"),
    "other statistics": (lambda: wise(statistics="ema"), "statistics ema there, batch here"),
    "another objective": (lambda: wise(objective=Other()), "objective Other there, Entropy here"),
    "other classes": (lambda: wise(classes=[0, 1, 2]), "another model: classes"),
    "another annotator": (lambda: wise(annotator=who.Inbox()), "Inbox.*Oracle"),
}


class Other(what.Selector):
    """Stands for an objective of another method, without running quantities."""

    def __call__(self, *_: Any) -> None:
        return None

    def start(self, model: Any) -> None:
        """Nothing to measure."""


@pytest.mark.parametrize("case", list(FOREIGN))
def test_a_state_of_something_else_is_refused_and_changes_nothing(case: str) -> None:
    build, match = FOREIGN[case]
    annotator = who.Oracle(nets.truth) if "annotator" in case else None
    adapter, twin, other = wise(annotator=annotator), wise(annotator=annotator), build()
    for one in (adapter, twin):
        play(one, range(1, 4))
    kind = "group-norm" if case == "another net" else "batch-norm"
    out = other.predict(nets.batch(kind, 1, dtype=other.classifier.dtype))
    other.learn(out)
    before = adapter.state_dict()
    with pytest.raises(errors.StateMismatch, match=match):
        adapter.load_state_dict(other.state_dict())
    assert same(adapter.state_dict(), before)
    assert same(play(adapter, range(4, 7)), play(twin, range(4, 7)))


@pytest.mark.parametrize(("there", "here"), [("sgd", "adam"), ("adam", "sgd")])
def test_momenta_of_another_optimizer_are_refused_at_once_and_not_when_they_are_used(there: Any, here: Any) -> None:
    other, adapter = (adapt(nets.make(), "tent", optimizer=kind) for kind in (there, here))
    for one in (other, adapter):
        play(one, range(1, 3))
    before = adapter.state_dict()
    with pytest.raises(errors.StateMismatch, match=f"not of the optimizer '{here}'"):
        adapter.load_state_dict(saved(other.state_dict()))
    assert same(adapter.state_dict(), before)


def damage(state: dict[str, Any], kind: str) -> Any:
    if kind == "not a state":
        return [state]
    if kind == "nothing":
        return {}
    if kind == "version":
        return state | {"version": 99}
    if kind == "missing desk":
        return {name: part for name, part in state.items() if name != "desk"}
    if kind == "broken update":
        return state | {"update": {"optimizer": {}}}
    if kind == "short tensors":
        return state | {"update": {**state["update"], "optimizer": {"flat": torch.zeros(3), "optimizer": {}}}}
    if kind == "broken counts":
        return state | {"desk": {**state["desk"], "counts": {**state["desk"]["counts"], "asked": 77}}}
    if kind == "overdrawn account":
        policy = state["policy"]
        return state | {"policy": {**policy, "account": {**policy["account"], "spent": 50}}}
    return state | {"anchor": {"flat": torch.zeros(5)}}


@pytest.mark.parametrize(
    "kind",
    [
        "not a state",
        "nothing",
        "version",
        "missing desk",
        "broken update",
        "short tensors",
        "broken counts",
        "overdrawn account",
        "broken anchor",
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(kind: str) -> None:
    adapter, other = wise(statistics="ema"), wise(statistics="ema")
    play(adapter, range(1, 4), answer=False)
    play(other, range(1, 6))
    before = adapter.state_dict()
    with pytest.raises(errors.StateMismatch):
        adapter.load_state_dict(damage(other.state_dict(), kind))
    assert same(adapter.state_dict(), before)


def test_the_message_about_a_version_says_both() -> None:
    adapter = wise()
    with pytest.raises(errors.StateMismatch, match="version 99, this is version 1"):
        adapter.load_state_dict(adapter.state_dict() | {"version": 99})
