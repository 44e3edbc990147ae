"""Can an experiment say how the network runs, and does its card say what that excepts?"""

from __future__ import annotations

from pathlib import Path

import pytest

from wise_atta import errors
from wise_atta.bench import run as runs
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.verify import verify

ONE = {
    "data": "digits+c",
    "model": "wise_atta/digits_cnn@random",
    "method": "tent",
    "batch": 8,
    "stream": {"limit": 16, "domains": ["fog"]},
    "threads": 1,
}


def test_a_card_of_a_run_in_bf16_is_not_held_to_the_same_digits(tmp_path: Path) -> None:
    card = runs.run(Experiment.parse(ONE | {"fast": {"precision": "bf16", "channels_last": True}}), tmp_path)
    assert card["experiment"]["fast"] == {"precision": "bf16", "channels_last": True}
    assert card["provenance"]["excepted"] == ["bf16"]
    verdict = verify(card)
    assert not verdict.exact and "excepts bf16 from the same digits" in str(verdict.elsewhere)
    assert not verdict.broken and not verdict.holds and "no spread" in " ".join(verdict.open)


def test_a_plain_run_is_found_by_the_digest_it_always_had(tmp_path: Path) -> None:
    plain = Experiment.parse(ONE)
    assert plain.digest == Experiment.parse(ONE | {"fast": {}}).digest
    assert plain.digest != Experiment.parse(ONE | {"fast": {"channels_last": True}}).digest
    assert "excepted" not in runs.run(plain, tmp_path)["provenance"]


def test_an_unknown_way_to_be_fast_is_named() -> None:
    with pytest.raises(errors.UnknownName, match="unknown way to be fast 'precison'"):
        Experiment.parse(ONE | {"fast": {"precison": "bf16"}})
