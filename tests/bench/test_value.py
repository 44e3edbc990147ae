"""Does `value` say what a slow count says, compare equal pictures only, and refuse what cannot be compared?"""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.made import made
from numpy.typing import NDArray

from wise_atta import errors, rng
from wise_atta.bench import runs as read
from wise_atta.bench.figures import Figure, Panel, Series
from wise_atta.bench.nudges import summarise
from wise_atta.bench.runs import Run
from wise_atta.bench.value import Value, value

BATCHES, BATCH = 24, 8
DOMAINS = ["fog"] * 12 + ["snow"] * 12


def mistakes(share: float, who: str, seed: int = 0) -> NDArray[np.bool_]:
    return rng.numpy(seed, who).random((BATCHES, BATCH)) < share


def every(step: int) -> dict[int, list[int]]:
    """One question in every so many batches."""
    return {number: [number % BATCH] for number in range(0, BATCHES, step)}


def some(folder: Path) -> list[Run]:
    """Two methods without labels, and one that asks at three ratios with two seeds; each picture comes twice."""
    shared: dict[str, Any] = {"domains": DOMAINS, "pictures": np.tile(np.arange(BATCHES * BATCH // 2), 2)}
    runs = [
        made(folder / "source", mistakes(0.5, "source"), method="source", **shared),
        made(folder / "tent", mistakes(0.3, "tent"), method="tent", **shared),
        made(folder / "never", mistakes(0.35, "never"), method="wise", policy="never", **shared),
    ]
    for (ratio, share), seed in itertools.product(((0.125, 0.4), (0.25, 0.31), (1.0, 0.15)), (0, 41)):
        asks = {"policy": "paced", "ratio": ratio, "seed": seed, "picked": every(round(1 / ratio))}
        wrong = mistakes(share, f"wise {ratio}", seed)
        runs.append(made(folder / f"wise-{ratio}-{seed}", wrong, method="wise", **asks, **shared))
    return runs


def slow_difference(ours: list[Run], theirs: list[Run], never_asked: bool) -> float:
    """Sample by sample, pair of runs by pair of runs."""
    apart = seen = 0
    for one, other in itertools.product(ours, theirs):
        asked = {n for run in (one, other) for n, mark in zip(run.pictures, run.picked, strict=True) if mark}
        for place, picture in enumerate(one.pictures):
            if never_asked and picture in asked:
                continue
            apart += int(other.hits[place]) - int(one.hits[place])
            seen += 1
    return 100 * apart / seen


@pytest.fixture(scope="module")
def made_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return some(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def labels_value(made_runs: list[Run]) -> Value:
    return value(made_runs, replicates=400)


def test_the_baseline_is_the_best_that_asks_for_nothing(labels_value: Value, made_runs: list[Run]) -> None:
    assert labels_value.baseline == "tent" and labels_value.best.error.mean == pytest.approx(
        made_runs[1].results["error"]
    )
    assert labels_value.asking == ["wise, paced"]
    assert {point.method: point.kind for point in labels_value.points} == {
        "source": "unlabelled",
        "tent": "unlabelled",
        "wise, no labels": "unlabelled",
        "wise, paced": "asking",
    }


def test_errors_and_differences_are_those_of_a_slow_count(labels_value: Value, made_runs: list[Run]) -> None:
    _, tent, never, *asking = made_runs
    for place, point in enumerate(labels_value.of("wise, paced")):
        ours = asking[2 * place : 2 * place + 2]
        assert (point.ratio, point.runs) == (ours[0].experiment["ratio"], 2)
        assert point.labels == len(every(round(1 / point.ratio)))
        assert point.error.mean == pytest.approx(np.mean([run.results["error"] for run in ours]))
        assert point.error_never_asked == pytest.approx(np.mean([run.results["error_never_asked"] for run in ours]))
        assert point.against is not None and point.alone is not None
        assert (point.against.to, point.alone.to) == ("tent", "wise, no labels")
        for difference, other in ((point.against, tent), (point.alone, never)):
            assert difference.never_asked is not None and difference.per_100 is not None
            assert difference.all.mean == pytest.approx(slow_difference(ours, [other], False))
            assert difference.never_asked.mean == pytest.approx(slow_difference(ours, [other], True))
            assert difference.per_100.mean == pytest.approx(-100 * difference.all.mean / point.labels)
            assert difference.all.low <= difference.all.mean <= difference.all.high


def test_break_even_lies_between_the_ratios_where_the_sign_turns(labels_value: Value) -> None:
    (even,) = labels_value.break_even
    zero, *curve = labels_value.of("wise, no labels") + labels_value.of("wise, paced")
    at = [point.against.all.mean for point in curve if point.against is not None]
    assert zero.against is not None and zero.against.all.mean > 0 and at[0] > 0
    place = next(place for place, difference in enumerate(at) if difference < 0)
    before, after = curve[place - 1].ratio, curve[place].ratio
    assert even.ratio == pytest.approx(before + (after - before) * at[place - 1] / (at[place - 1] - at[place]))
    assert even.low is not None and even.high is not None and even.low <= even.ratio <= even.high
    assert not even.at_most and even.told_apart == 1.0
    assert "from" in even.words() and "told apart from it at 1" in even.words()


def test_the_same_method_without_labels_is_found_whatever_its_policy_takes(tmp_path: Path) -> None:
    asks = {"method": "wise", "policy": "paced", "ratio": 0.5, "exhaust": True, "picked": every(2)}
    runs = [
        made(tmp_path / "tent", mistakes(0.3, "tent"), method="tent"),
        made(tmp_path / "never", mistakes(0.35, "never"), method="wise", policy="never", options={"lr": 0.1}),
        made(tmp_path / "wise", mistakes(0.2, "wise"), options={"lr": 0.1, "slack": 1, "credit": 9}, **asks),
        made(tmp_path / "fast", mistakes(0.2, "fast"), options={"lr": 0.5}, **asks),
    ]
    labels_value = value(runs, replicates=10)
    assert labels_value.asking == ["wise, paced, lr 0.1", "wise, paced, lr 0.5"]
    (same,), (other,) = map(labels_value.of, labels_value.asking)
    assert same.alone is not None and same.alone.to == "wise, no labels"
    assert other.alone is None, "another learning rate is another method"


def test_a_method_that_is_never_better_is_said_to_be(tmp_path: Path) -> None:
    tent = made(tmp_path / "tent", mistakes(0.1, "tent"), method="tent")
    wise = made(tmp_path / "wise", mistakes(0.6, "wise"), ratio=0.5, picked=every(2))
    (even,) = value([tent, wise], replicates=50).break_even
    assert even.ratio is even.low is even.high is even.told_apart is None
    assert even.words() == "wise: never better than tent within what was run, up to 0.5 labels a batch"


def test_a_method_that_is_better_at_once_is_said_to_be(tmp_path: Path) -> None:
    tent = made(tmp_path / "tent", mistakes(0.6, "tent"), method="tent")
    wise = made(tmp_path / "wise", mistakes(0.1, "wise"), ratio=0.5, picked=every(2))
    (even,) = value([tent, wise], replicates=50).break_even
    assert even.at_most and even.ratio == 0.5 and "already at 0.5 labels a batch, the fewest run" in even.words()


def test_labels_that_are_only_remembered_buy_nothing_on_other_pictures(tmp_path: Path) -> None:
    """All that the asking run has right beyond the other are the pictures that it asked for."""
    wrong = np.ones((BATCHES, BATCH), dtype=bool)
    wise = wrong.copy()
    for number, places in every(2).items():
        wise[number, places] = False
    runs = [
        made(tmp_path / "bn", wrong, method="bn"),
        made(tmp_path / "wise", wise, ratio=0.5, picked=every(2)),
    ]
    against = value(runs, replicates=50).of("wise")[0].against
    assert against is not None and against.never_asked is not None
    assert against.all.mean == pytest.approx(-100 * 12 / (BATCHES * BATCH))
    assert (against.never_asked.mean, against.never_asked.low, against.never_asked.high) == (0, 0, 0)


def test_where_every_picture_was_asked_for_nothing_is_said_of_others(tmp_path: Path) -> None:
    all_of_them = {number: list(range(BATCH)) for number in range(BATCHES)}
    tent = made(tmp_path / "tent", mistakes(0.6, "tent"), method="tent")
    wise = made(tmp_path / "wise", mistakes(0.1, "wise"), ratio=8, picked=all_of_them)
    labels_value = value([tent, wise], replicates=50)
    (point,) = labels_value.of("wise")
    assert point.against is not None and point.against.never_asked is None and point.error_never_asked is None
    assert labels_value.break_even_never_asked == () and len(labels_value.words()) == 2
    json.dumps(labels_value.to_dict(), allow_nan=False)


def test_seeds_of_one_experiment_stay_together_whatever_they_spent(tmp_path: Path) -> None:
    tent = made(tmp_path / "tent", mistakes(0.3, "tent"), method="tent")
    spent = {0: every(2), 41: every(3), 58: {}}
    wise = [
        made(tmp_path / f"wise-{seed}", mistakes(0.2, "wise", seed), policy="random", seed=seed, picked=picked)
        for seed, picked in spent.items()
    ]
    (point,) = value([tent, *wise], replicates=50).of("wise")
    assert point.runs == 3 and point.ratio == pytest.approx((12 + 8) / 3 / BATCHES)


def test_runs_that_always_ask_stand_where_their_labels_are_whatever_ratio_they_were_given(tmp_path: Path) -> None:
    tent = made(tmp_path / "tent", mistakes(0.3, "tent"), method="tent")
    wise = made(tmp_path / "wise", mistakes(0.2, "wise"), policy="always", ratio=0.3, picked=every(1))
    (point,) = value([tent, wise], replicates=10).of("wise")
    assert (point.ratio, point.labels) == (1.0, BATCHES)


def test_pairs_are_surer_than_two_runs_apart(tmp_path: Path) -> None:
    """Mistakes that both make cancel: the difference is known better than either error."""
    hard = mistakes(0.4, "hard")
    runs = [
        made(tmp_path / "tent", hard | mistakes(0.02, "a"), method="tent", domains=DOMAINS),
        made(tmp_path / "wise", hard, ratio=0.5, picked=every(2), domains=DOMAINS),
    ]
    labels_value = value(runs, replicates=300)
    against, error = labels_value.of("wise")[0].against, labels_value.of("wise")[0].error
    assert against is not None
    assert against.all.high - against.all.low < 0.6 * (error.high - error.low)


def with_spread(run: Run, ten: list[float]) -> Run:
    return dataclasses.replace(run, card={**run.card, "spread": summarise(ten)})


def test_intervals_know_from_nudged_runs_how_far_runs_come_apart(tmp_path: Path) -> None:
    """Every batch has as many mistakes, so that nothing else is left: intervals are those of Student's t."""
    ten = np.linspace(-1.5, 1.5, 10) + 25
    deviation, quantile = np.std(ten, ddof=1), 2.262  # of t with 9 degrees of freedom, 97.5 %
    wrong = np.zeros((BATCHES, BATCH), dtype=bool)
    wrong[:, :2] = True
    shared: dict[str, Any] = {"method": "wise", "ratio": 0.5, "picked": every(2)}

    def width(second: NDArray[np.bool_] | None, spread: bool = True) -> float:
        asking = [made(tmp_path / "a", wrong, seed=0, **shared)]
        asking = [with_spread(asking[0], ten.tolist())] if spread else asking
        asking += [] if second is None else [made(tmp_path / "b", second, seed=41, **shared)]
        tent = made(tmp_path / "tent", wrong, method="tent")
        (point,) = value([tent, *asking], replicates=4000).of("wise")
        assert (point.nudged == (pytest.approx(25), pytest.approx(deviation))) if spread else point.nudged is None
        assert point.against is not None and point.against.all.mean == 0
        assert point.error.high - point.error.low == pytest.approx(point.against.all.high - point.against.all.low)
        return point.error.high - point.error.low

    shifted = np.roll(wrong, 1, axis=1)
    assert width(None, spread=False) == width(wrong, spread=False) == 0
    alone = width(None)
    assert alone == pytest.approx(2 * quantile * deviation, rel=0.06)
    assert width(wrong) == pytest.approx(alone), "the same run twice is one"
    assert width(shifted) == pytest.approx(alone / np.sqrt(2))


def test_seeds_that_lie_further_apart_than_nudged_runs_count_with_the_tails_of_so_few(tmp_path: Path) -> None:
    tent = made(tmp_path / "tent", mistakes(0.3, "tent"), method="tent")
    shared: dict[str, Any] = {"method": "wise", "ratio": 0.5, "picked": every(2)}
    runs = []
    for seed, wrong in ((0, 0), (41, 2), (58, 4)):
        of_each = np.tile(np.arange(BATCH) < wrong, (BATCHES, 1))
        runs.append(made(tmp_path / str(seed), of_each, seed=seed, **shared))
    runs[0] = with_spread(runs[0], np.linspace(0, 0.9, 10).tolist())
    (point,) = value([tent, *runs], replicates=4000).of("wise")
    # Errors of 0, 25 and 50 %: a deviation of 25, over √3; next to it nudged runs are nothing, and t has 2 degrees.
    assert point.error.high - point.error.low == pytest.approx(2 * 4.303 * 25 / np.sqrt(3), rel=0.1)


def test_intervals_hold_what_is_true_as_often_as_they_say(tmp_path: Path) -> None:
    """Two methods err alike but for chance, which moves one of them by five points. With nudged runs this is seen."""
    held = {True: 0, False: 0}
    for number in range(100):
        draw = rng.numpy(number, "test.coverage")
        hard, (own, *nudges) = draw.random((BATCHES, BATCH)), draw.normal(0.3, 0.05, 11)
        tent = made(tmp_path / "tent", hard < 0.3, method="tent")
        wise = made(tmp_path / "wise", hard < own, ratio=0.5, picked=every(2))
        ten = [100 * float(np.mean(hard < share)) for share in nudges]
        for known in held:
            (point,) = value([tent, with_spread(wise, ten) if known else wise], replicates=200, seed=number).of("wise")
            assert point.against is not None
            held[known] += point.against.all.low <= 0 <= point.against.all.high
    assert held[True] >= 88 and held[False] < 60


def test_the_same_seed_gives_the_same_intervals_another_gives_others(made_runs: list[Run], labels_value: Value) -> None:
    assert value(made_runs, replicates=400).to_dict() == labels_value.to_dict()
    other = value(made_runs, replicates=400, seed=1)
    assert other.best.error.mean == labels_value.best.error.mean and other.best.error != labels_value.best.error


def test_streams_of_several_seeds_are_compared_within_each(tmp_path: Path) -> None:
    runs = []
    for seed in range(6):
        shift = 0.02 * seed
        runs.append(
            made(tmp_path / f"tent{seed}", mistakes(0.3 + shift, "tent", seed), method="tent", stream_seed=seed)
        )
        wrong = mistakes(0.2 + shift, "wise", seed)
        runs.append(made(tmp_path / f"wise{seed}", wrong, ratio=0.5, picked=every(2), stream_seed=seed))
    point = value(runs, replicates=2000).of("wise")[0]
    pairs = [b.results["error"] - a.results["error"] for a, b in zip(runs[::2], runs[1::2], strict=True)]
    assert point.against is not None and point.against.all.mean == pytest.approx(np.mean(pairs))
    half = (point.against.all.high - point.against.all.low) / 2
    # Of t with 5 degrees of freedom, 97.5 %.
    assert half == pytest.approx(2.571 * np.std(pairs, ddof=1) / np.sqrt(6), rel=0.1)
    with pytest.raises(errors.DataError, match=r"tent with ratio 0 has no run on the stream with seed 3"):
        value([run for run in runs if run.name != "tent3"], replicates=10)


def test_two_streams_with_other_pictures_left_are_compared_on_those(tmp_path: Path) -> None:
    runs = []
    for seed, picked in ((0, every(2)), (1, every(1))):
        runs.append(made(tmp_path / f"tent{seed}", mistakes(0.3, "tent", seed), method="tent", stream_seed=seed))
        wrong = mistakes(0.2, "wise", seed)
        runs.append(made(tmp_path / f"wise{seed}", wrong, ratio=0.5, picked=picked, stream_seed=seed))
    against = value(runs, replicates=2000).of("wise")[0].against
    assert against is not None and against.never_asked is not None
    left = [
        b.results["error_never_asked"] - 100 * np.mean(~a.hits[b.never_asked])
        for a, b in zip(runs[::2], runs[1::2], strict=True)
    ]
    assert against.never_asked.mean == pytest.approx(
        np.average(left, weights=[run.never_asked.sum() for run in runs[1::2]])
    )
    assert against.never_asked.low < min(left) and against.never_asked.high > max(left)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"severity": 3}, "severity is 5 in the first and 3 in the second"),
        ({"protocol": "ftta"}, "protocol is 'ctta' in the first and 'ftta' in the second"),
        ({"weights": "others"}, "the model's weights is 'weights' in the first and 'others' in the second"),
        ({"pixels": "others"}, "describe the same stream but saw other pictures or another order"),
        ({"pictures": np.arange(BATCHES * BATCH)[::-1]}, "saw other pictures or another order"),
        ({"domains": ["fog"] * 13 + ["snow"] * 11}, "saw other pictures or another order"),
    ],
)
def test_runs_over_different_streams_are_refused(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    tent = made(tmp_path / "tent", mistakes(0.3, "tent"), method="tent", domains=DOMAINS)
    fields = {"ratio": 0.5, "picked": every(2), "domains": DOMAINS, **other}
    wise = made(tmp_path / "wise", mistakes(0.2, "wise"), **fields)
    with pytest.raises(errors.DataError, match=message) as raised:
        value([tent, wise])
    assert str(tmp_path / "tent") in str(raised.value) and str(tmp_path / "wise") in str(raised.value)


def test_late_answers_do_not_make_another_stream(tmp_path: Path) -> None:
    runs = [made(tmp_path / "tent", mistakes(0.3, "tent"), method="tent")]
    for delay in (0, 5):
        runs.append(made(tmp_path / f"{delay}", mistakes(0.2, "wise"), ratio=0.5, picked=every(2), delay=delay))
    assert value(runs, replicates=10).asking == ["wise", "wise, delay 5"]


def test_a_copy_is_no_second_seed_and_two_outcomes_of_one_experiment_are_refused(tmp_path: Path) -> None:
    tent = made(tmp_path / "tent", mistakes(0.3, "tent"), method="tent")
    wise = made(tmp_path / "wise", mistakes(0.2, "wise"), ratio=0.5, picked=every(2))
    copy = made(tmp_path / "copy", mistakes(0.2, "wise"), ratio=0.5, picked=every(2))
    assert value([tent, wise, copy], replicates=10).of("wise")[0].runs == 1
    other = made(tmp_path / "other", mistakes(0.2, "other"), ratio=0.5, picked=every(2))
    with pytest.raises(errors.DataError, match="same experiment with different outcomes"):
        value([tent, wise, other])


def test_one_seed_on_other_threads_is_no_second_one(tmp_path: Path) -> None:
    def with_threads(threads: int, wrong: NDArray[np.bool_], **fields: Any) -> Run:
        asks = {"ratio": 0.5, "picked": every(2), "threads": threads}
        return made(tmp_path / f"wise-{threads}", wrong, **asks, **fields)

    tent = made(tmp_path / "tent", mistakes(0.3, "tent"), method="tent")
    one, same = (with_threads(threads, mistakes(0.2, "wise")) for threads in (1, 2))
    ten = np.linspace(15, 25, 10).tolist()
    (alone,) = value([tent, with_spread(one, ten)], replicates=50).of("wise")
    assert value([tent, same, with_spread(one, ten)], replicates=50).of("wise") == [alone] and alone.runs == 1
    with pytest.raises(errors.DataError, match="same seed and different outcomes"):
        value([tent, one, with_threads(2, mistakes(0.2, "other"))])
    own = [
        with_threads(2, mistakes(0.2, "other"), stream_seed=1),
        made(tmp_path / "1", mistakes(0.3, "b"), method="tent", stream_seed=1),
    ]
    assert value([tent, one, *own], replicates=50).of("wise")[0].runs == 2, "another stream is another draw"


def test_a_run_that_asks_for_nothing_counts_once_whatever_ratio_it_was_given(tmp_path: Path) -> None:
    asking = made(tmp_path / "wise", mistakes(0.2, "wise"), ratio=0.5, policy="paced", picked=every(2))
    never = [
        made(tmp_path / f"{ratio}", mistakes(0.3, "never"), policy="never", ratio=ratio, seed=seed)
        for ratio in (0.25, 0.5)
        for seed in (0, 41)
    ]
    assert value([asking, *never], replicates=10).best.runs == 2


def test_a_stream_of_one_s_own_has_as_many_batches_as_came(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / "tent", mistakes(0.3, "tent"), method="tent"),
        made(tmp_path / "wise", mistakes(0.2, "wise"), ratio=0.5, picked=every(2)),
    ]
    for run in runs:
        del run.provenance["stream"]["batches"]
    assert "24 batches, 192 samples" in value(runs, replicates=10).markdown()


def test_something_must_ask_and_something_must_not(tmp_path: Path) -> None:
    tent = made(tmp_path / "tent", mistakes(0.3, "tent"), method="tent")
    wise = made(tmp_path / "wise", mistakes(0.2, "wise"), ratio=0.5, picked=every(2))
    with pytest.raises(errors.BadConfig, match="none of these runs asked"):
        value([tent])
    with pytest.raises(errors.BadConfig, match="every one of these runs asked"):
        value([wise])


def test_a_teacher_is_neither_the_baseline_nor_a_person(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / "tent", mistakes(0.3, "tent"), method="tent"),
        made(tmp_path / "cema", mistakes(0.01, "cema"), method="cema", teacher="digits"),
        made(tmp_path / "wise", mistakes(0.2, "wise"), ratio=0.5, picked=every(2)),
    ]
    labels_value = value(runs, replicates=10)
    assert labels_value.baseline == "tent" and labels_value.asking == ["wise"]
    assert any("cema (by a teacher)" in line[0] for line in labels_value.table()[1])


def test_a_bundle_gives_the_same_answer_as_the_folders(tmp_path: Path, labels_value: Value) -> None:
    some(tmp_path / "runs")
    read.bundle([tmp_path / "runs"], tmp_path / "runs.zip", queries=False)
    bundled = value(read.find([tmp_path / "runs.zip"]).runs, replicates=400)
    by_folder = value(read.find([tmp_path / "runs"]).runs, replicates=400)
    assert bundled.to_dict() == by_folder.to_dict()


def test_the_documented_table_is_what_the_documented_runs_give() -> None:
    folder = Path(__file__).parents[2] / "docs" / "results" / "value"
    labels_value = value(read.find([folder / "digits.zip"]).runs)
    assert labels_value.markdown() == (folder / "digits" / "table.md").read_text()


def test_whiskers_end_where_the_intervals_do(labels_value: Value, tmp_path: Path) -> None:
    point = labels_value.of(labels_value.asking[0])[-1]
    series = next(one for one in labels_value.figure().panels[0].series if one.name == point.method)
    assert series.ends[-1] == (point.error.low, point.error.high)
    tooltip = f"{point.error.mean:.4g} [{point.error.low:.4g}, {point.error.high:.4g}]"
    assert tooltip in labels_value.figure().html()
    # Where an interval lies beside what was observed, it is drawn as far as it goes.
    beside = Figure("a", [Panel("b", "lines", "x", "y", [Series("c", [0.0], [1.0], ends=[(1.5, 2.0)])])])
    assert beside.write(tmp_path, "beside")[0].exists()
