"""Is a learning rate chosen on another stream, alike for every method, and does a rate too high end nothing?"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from wise_atta import errors
from wise_atta.bench import rivals
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.sweep import Places
from wise_atta.bench.tune import Trial, Tuned, lay_out, tune
from wise_atta.bench.verify import once
from wise_atta.methods.eata import PRESETS

SCORED = Experiment.parse(
    {"method": "tent", "data": "digits+c", "model": "digits", "stream": {"limit": 32}, "batch": 16, "threads": 1}
)


def test_a_diverged_trial_is_the_worst_and_ends_nothing(tmp_path: Path) -> None:
    seen: list[str] = []
    [tuned] = tune(
        [lay_out(SCORED, grid={"lr": [1e38, 1e-3]})],
        Places(tmp_path),
        report=lambda run, result: seen.append(type(result).__name__),
    )
    assert sorted(seen) == ["NotFinite", "dict"]
    assert math.isinf(tuned.trials[0].error) and tuned.best.options == {"lr": 1e-3}
    assert tuned.scored == tuned.to_dict()["labels_scored"] == 4 * 32  # four corruptions, each picture's label
    assert json.loads(json.dumps(tuned.to_dict(), allow_nan=False))["trials"][0]["error"] == "diverged"


def test_where_all_trials_diverge_there_is_no_best(tmp_path: Path) -> None:
    with pytest.raises(errors.NotFinite, match="every point"):
        tune([lay_out(SCORED, grid={"lr": [1e38]})], Places(tmp_path))


def test_other_failures_are_raised(tmp_path: Path) -> None:
    """A diverged trial before it must not hide a trial that cannot run."""
    broken = lay_out(SCORED.model_copy(update={"model": "file:nowhere.safetensors"}), grid={"lr": [1e-3]})
    with pytest.raises(errors.DataError):
        tune([lay_out(SCORED, grid={"lr": [1e38, 1e-3]}), broken], Places(tmp_path))


def test_never_tuned_on_the_scored_stream() -> None:
    assert {run.data for run in lay_out(SCORED, grid={"lr": [1e-3]}).runs} == {"digits+extra"}
    with pytest.raises(errors.BadConfig, match="scored"):
        lay_out(SCORED, on="digits+c")


def test_of_equal_trials_the_first_is_best() -> None:
    trials = (Trial({"lr": 1e-4}, 5.0, 1), Trial({"lr": 1e-3}, 5.0, 2), Trial({"lr": 1e-2}, math.inf, 0))
    assert Tuned("tent", "digits+extra", trials).best.options == {"lr": 1e-4}
    assert Tuned("tent", "digits+extra", trials).labels == 3


def test_all_methods_get_the_same_grid(tmp_path: Path) -> None:
    by_method = rivals.tune_all(
        rivals.setting("digits"),
        ["source", "tent", "wise"],
        Places(tmp_path),
        rates=[1e-4, 1e-3],
        limits={"tent": 64, "wise": 64},
        threads=1,
    )
    assert list(by_method) == ["tent", "wise"]
    for tuned in by_method.values():
        assert [trial.options for trial in tuned.trials] == [{"lr": 1e-4}, {"lr": 1e-3}]
    assert by_method["tent"].labels == 0 < by_method["wise"].labels


@pytest.mark.parametrize("method", [*sorted(rivals.WITHOUT_CHANCE), "eata"])
def test_what_is_run_with_one_seed_gives_the_same_with_another(method: str) -> None:
    fields = {"stream": {"limit": 32}, "options": {"lr": 0.1} if method not in ("source", "bn") else {}, "threads": 1}
    runs = [once(rivals.experiment(rivals.setting("digits"), method, seed=seed, **fields)) for seed in (0, 41)]
    first, other = (run["results"]["by_domain"] for run in runs)
    # eata measures what the source model must keep on source pictures that it draws.
    assert (first == other) == (method in rivals.WITHOUT_CHANCE)


def test_eata_has_the_published_constants_of_cifar10() -> None:
    mine, published = rivals.setting("cifar10").options["eata"], PRESETS["cifar10-c"]
    assert mine == {name: published[name] for name in ("epsilon", "fisher_weight")}


def test_a_file_without_tuned_options_is_named(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text('{"card_version": 1, "experiment": {}}')
    with pytest.raises(errors.DataError, match=r"card\.json holds no tuned options"):
        rivals.load_tuned(tmp_path / "card.json")
