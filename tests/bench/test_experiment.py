"""Is an experiment what was described, from whatever it was read, and does an error say which field is wrong?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from wise_atta import errors
from wise_atta.bench.experiment import CARD_VERSION, Experiment, read_cards, read_mapping
from wise_atta.bench.run import build, idle
from wise_atta.bench.table import rows

FIELDS: dict[str, Any] = {
    "data": "digits+c",
    "method": "wise",
    "policy": "paced",
    "ratio": 0.5,
    "options": {"lr": 0.01},
    "stream": {"limit": 64, "domains": ["fog", "snow"]},
}
YAML = """
data: digits+c
method: wise
policy: paced
ratio: 0.5
options: {lr: 0.01}
stream: {limit: 64, domains: [fog, snow]}
"""
TOML = """
data = "digits+c"
method = "wise"
policy = "paced"
ratio = 0.5
options = {lr = 0.01}
stream = {limit = 64, domains = ["fog", "snow"]}
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one.yaml", YAML),
        ("one.toml", TOML),
        ("one.json", json.dumps(FIELDS)),
        ("card.json", json.dumps({"card_version": CARD_VERSION, "experiment": FIELDS, "results": {}})),
    ],
)
def test_every_kind_of_file_gives_the_same_experiment(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    experiment = Experiment.read(tmp_path / name)
    assert experiment == Experiment.parse(FIELDS)
    assert experiment.digest == Experiment.parse(FIELDS).digest


def test_a_run_folder_stands_for_its_card(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(json.dumps({"card_version": 1, "experiment": FIELDS}))
    assert Experiment.read(tmp_path) == Experiment.parse(FIELDS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("severity", 6),
        ("batch", 0),
        ("ratio", -0.1),
        ("noise", 2),
        ("delay", -1),
        ("context", "elsewhere"),
        ("statistics", "guess"),
        ("method", "tnt"),
        ("policy", "pased"),
        ("utility", "entropi"),
        ("selector", "drifft"),
        ("protocol", "ctta2"),
        ("methd", "tent"),
    ],
)
def test_an_error_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(errors.BadConfig, match=field):
        Experiment.parse({**FIELDS, field: value})


def test_an_option_of_the_stream_that_does_not_exist_is_named() -> None:
    with pytest.raises(errors.BadConfig, match="limits"):
        Experiment.parse({**FIELDS, "stream": {"limits": 3}})


def test_a_field_of_its_own_cannot_hide_in_the_stream() -> None:
    with pytest.raises(errors.BadConfig, match="severity"):
        Experiment.parse({**FIELDS, "stream": {"severity": 3}})


@pytest.mark.parametrize("text", ["[1, 2]", "{", "just words"])
def test_a_file_that_describes_nothing_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "one.yaml"
    file.write_text(text)
    with pytest.raises(errors.DataError, match=r"one\.yaml"):
        Experiment.read(file)


def test_a_card_of_a_later_release_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    file.write_text(json.dumps({"card_version": CARD_VERSION + 1, "experiment": FIELDS}))
    with pytest.raises(errors.DataError, match="update wise-atta"):
        Experiment.read(file)


def test_a_card_of_an_earlier_release_has_later_fields_at_their_defaults(tmp_path: Path) -> None:
    whole = Experiment(method="tent").model_dump(mode="json")
    cards = [{"card_version": CARD_VERSION, "digest": "0", "experiment": whole}]
    cards.append({**cards[0], "experiment": {name: value for name, value in whole.items() if name != "annotator"}})
    (tmp_path / "cards.json").write_text(json.dumps(cards))
    first, second = read_cards(tmp_path / "cards.json")
    assert first == second and len(rows([first, second])) == 1


def test_the_digest_follows_what_decides_numbers_and_nothing_else() -> None:
    one = Experiment.parse(FIELDS)
    assert Experiment.parse({**FIELDS, "tag": "mine", "workers": 3}).digest == one.digest
    assert Experiment.parse({**FIELDS, "seed": 1}).digest != one.digest
    assert Experiment.parse({**FIELDS, "options": {"lr": 0.02}}).digest != one.digest


def test_a_number_with_an_exponent_is_a_number_in_yaml_too(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("method: tent\noptions: {lr: 1e-3}\ntag: 1e-3x\n")
    one = Experiment.read(tmp_path / "one.yaml")
    assert one.options == {"lr": 0.001} and one.tag == "1e-3x"


def test_what_a_merge_brings_into_yaml_may_be_replaced_there(tmp_path: Path) -> None:
    text = "a: &a {lr: 1}\nb: {c: &c {<<: *a, lr: 2}}\nd: {<<: *c}\n"
    (tmp_path / "one.yaml").write_text(text)
    assert read_mapping(tmp_path / "one.yaml") == {"a": {"lr": 1}, "b": {"c": {"lr": 2}}, "d": {"lr": 2}}


@pytest.mark.parametrize("text", ["seed: 1\nmethod: tent\nseed: 2\n", "options: {lr: 0.1, lr: 0.2}\n"])
def test_a_field_that_stands_in_a_file_twice_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(errors.DataError, match=r"one\.yaml cannot be read: '(seed|lr)' stands there twice"):
        Experiment.read(tmp_path / "one.yaml")


def test_a_field_inside_another_can_be_named_by_a_dot() -> None:
    one = Experiment.parse({"options.lr": 0.1, "options": {"momentum": 0.5, "lr": 3.0}, "stream.limit": 8})
    assert one.options == {"momentum": 0.5, "lr": 0.1} and one.stream == {"limit": 8}
    with pytest.raises(errors.BadConfig, match=r"'stream': stream\.limit has no place in 5"):
        Experiment.parse({"stream": 5, "stream.limit": 8})
    with pytest.raises(errors.UnknownName, match="Did you mean 'options'"):
        Experiment.parse({"option.lr": 0.1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "tent", "options": {"lr": "fast"}}, "'options': lr is a number, got 'fast'"),
        ({"method": "tent", "options": {"momentum": math.nan}}, "'options': momentum is a number, got nan"),
        ({"options": {"slack": "much"}}, "'options': slack is a number, got 'much'"),
        ({"options": {"window": 2.5}}, "'options': window is a whole number, got 2.5"),
        ({"options": {"only_selected": "False"}}, "'options': only_selected is true or false, got 'False'"),
        ({"options": {"nesterov": 0}}, "'options': nesterov is true or false, got 0"),
        ({"stream": {"cut": "no"}}, "'stream': cut is true or false, got 'no'"),
        ({"stream": {"domains": None}}, "'stream': domains is None, a list is needed"),
        ({"fast": {"compile": "off"}}, "'fast': compile is true or false, got 'off'"),
        ({"seed": True}, "'seed' is not true or false, got True"),
        ({"ratio": False}, "'ratio' is not true or false, got False"),
        ({"threads": True}, "'threads' is not true or false, got True"),
    ],
)
def test_a_value_of_another_kind_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.BadConfig, match=f"experiment field {message}"):
        Experiment.parse(fields)


def test_a_value_of_its_kind_is_taken_as_it_is() -> None:
    options = {"lr": 1, "head_lr": None, "window": 30, "slack": None, "only_selected": False, "norm": ["norm"]}
    assert Experiment.parse({"options": options, "stream": {"limit": None}}).options == options


def test_an_option_that_the_method_cannot_take_is_named() -> None:
    options = {"rates": 3}
    one = Experiment(method="hiltta", options=options, model="wise_atta/digits_cnn@random", stream={"limit": 8})
    with pytest.raises(errors.BadConfig, match="'hiltta'"):
        build(one)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "tent", "delay": 50}, "'delay': method 'tent' does not ask for labels"),
        ({"method": "tent", "policy": "uniform"}, "'policy': method 'tent' does not ask for labels"),
        ({"method": "tent", "teacher": "digits", "annotator": "teacher"}, "'annotator': method 'tent' does not ask"),
        ({"policy": "never", "noise": 0.1}, "'noise': policy 'never' asks for no labels"),
        ({"options": {"policy": "never"}, "selector": "drift"}, "'selector': policy 'never' asks for no labels"),
        ({"policy": "never", "late_limit": 3}, "'late_limit': policy 'never'"),
        ({"policy": "never", "exhaust": True}, "'exhaust': policy 'never'"),
        ({"method": "cema", "teacher": "digits", "context": "current"}, "'context': method 'cema' has a teacher"),
        ({"source_data": "digits"}, "'source_data': method 'wise' has no use for it"),
        ({"data": "digits", "severity": 3}, "'severity': digits has no severities"),
        ({"statistics": "batch", "prior": 16}, "'prior': it counts under statistics 'mixed', .* 'batch'"),
        ({"method": "tent", "prior": 16}, "'prior': it counts under statistics 'mixed', .* 'batch'"),
    ],
)
def test_a_field_of_which_nothing_can_come_is_named(fields: dict[str, Any], message: str) -> None:
    one = Experiment.parse({"model": "wise_atta/digits_cnn@random", "stream": {"limit": 8}, **fields})
    with pytest.raises(errors.BadConfig, match=f"experiment field {message}"):
        build(one)


def test_every_published_experiment_can_still_be_run() -> None:
    folder = Path(__file__).parents[2] / "docs" / "results"
    cards = [card for place in (folder, *sorted(folder.rglob("*.zip"))) for card in read_cards(place)]
    refused = {card["digest"]: why for card in cards if (why := idle(Experiment.parse(card["experiment"])))}
    assert len(cards) > 1000 and not refused


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.DataError, match=r"folder without a card\.json: name a file"):
        Experiment.read(tmp_path)


def test_what_stands_beside_the_stream_is_not_taken_inside() -> None:
    with pytest.raises(errors.BadConfig, match=r"does not hold batch, give it beside 'stream'"):
        Experiment.parse({"stream.batch": 4})
