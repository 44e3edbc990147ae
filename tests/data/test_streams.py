"""Does a description say what arrives, byte for byte, and does nothing that arrives say a label?"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import IterableDataset

from wise_atta import errors, rng
from wise_atta.data import StreamSpec, from_iterable, open_stream
from wise_atta.data.arrangement import ORDERS, arrange, correlate
from wise_atta.data.streams import PictureStream
from wise_atta.stream import Batch

SPECS = [
    StreamSpec(data="tree:tree+c", batch=5, limit=6, domains=("fog", "gaussian_noise")),
    StreamSpec(data="tree:tree+c", batch=4, protocol="mixed", severity=3, seed=7, domains=("fog", "elastic_transform")),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, pack: Callable[..., Path], jpeg: Callable[..., bytes]) -> Path:
    """A data folder with a tree of 4 classes of 3 pictures of 32 px."""
    folder = tmp_path_factory.mktemp("streams")
    names = [f"{kind}/{n}.jpg" for kind in ("ant", "bee", "cat", "dog") for n in range(3)]
    pack(folder / "tree", {name: jpeg(number, (32, 32)) for number, name in enumerate(names)})
    return folder


def content(spec: StreamSpec, root: Path, workers: int = 0) -> str:
    """A hash of all that arrives."""
    digest = hashlib.sha256()
    for batch in open_stream(spec, root, workers=workers)[0]:
        assert isinstance(batch.inputs, torch.Tensor)
        digest.update(json.dumps([list(batch.ids or ()), batch.meta, list(batch.inputs.shape)]).encode())
        digest.update(batch.inputs.numpy().tobytes())
    return digest.hexdigest()


def domains(stream: Any) -> list[str]:
    return [batch.meta["domain"] for batch in stream]


def ids(stream: Any) -> list[str]:
    return [name for batch in stream for name in batch.ids]


# ---- the same bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=["ctta", "mixed"])
def test_any_number_of_workers_gives_the_same_bytes(root: Path, spec: StreamSpec) -> None:
    assert content(spec, root) == content(spec, root, workers=1) == content(spec, root, workers=2)


@pytest.mark.parametrize("data", ["tree:tree", "digits"])
def test_what_workers_need_can_be_sent_to_them(root: Path, data: str) -> None:
    """Where processes are not forked, the reader travels as a pickle."""
    stream, _ = open_stream(StreamSpec(data=data, limit=4), root)
    assert isinstance(stream, PictureStream)
    again = pickle.loads(pickle.dumps(stream.places))
    cut: dict[str, Any] = {"resize": None, "crop": None, "interpolation": "bilinear"}
    assert np.array_equal(again[0].load(0, **cut), stream.places[0].load(0, **cut))


def test_another_process_gives_the_same_bytes(root: Path) -> None:
    program = (
        "import sys, json, torch, pathlib\n"
        "torch.set_num_threads(1)\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from test_streams import content\n"
        "from wise_atta.data import StreamSpec\n"
        "for line in sys.stdin:\n"
        "    print(content(StreamSpec.from_dict(json.loads(line)), pathlib.Path(sys.argv[2]), workers=2))\n"
    )
    # Another hash seed shuffles whatever depends on the order of a set or on `hash`.
    run = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent), str(root)],
        input="\n".join(json.dumps(spec.to_dict()) for spec in SPECS),
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [content(spec, root) for spec in SPECS]


def test_a_stream_neither_reads_nor_moves_the_global_generators(root: Path) -> None:
    np.random.seed(3)
    torch.manual_seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first = content(SPECS[0], root, workers=1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    torch.manual_seed(4)
    assert content(SPECS[0], root) == first


def test_a_sample_looks_the_same_in_any_stream(root: Path) -> None:
    """Its pixels depend on the sample and the seed, not on the batch, the protocol or the other domains."""

    def pixels(spec: StreamSpec) -> dict[str, torch.Tensor]:
        by_id = {}
        for batch in open_stream(spec, root)[0]:
            assert isinstance(batch.inputs, torch.Tensor)
            by_id.update(zip(batch.ids or (), batch.inputs, strict=True))
        return by_id

    alone = pixels(StreamSpec(data="tree:tree+c", domains=("snow",), batch=1))
    mixed = pixels(StreamSpec(data="tree:tree+c", domains=("snow", "fog"), protocol="mixed", batch=7))
    assert len(alone) == 12
    assert all(torch.equal(mixed[name], picture) for name, picture in alone.items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_same_samples_in_the_same_order(root: Path) -> None:
    spec = replace(SPECS[1], domains=("gaussian_noise", "fog", "jpeg_compression"))
    here = list(open_stream(spec, root)[0])
    there = list(open_stream(spec, root, device="cuda", workers=2)[0])
    assert [(a.ids, a.meta) for a in here] == [(b.ids, b.meta) for b in there]
    for a, b in zip(here, there, strict=True):
        assert isinstance(a.inputs, torch.Tensor) and isinstance(b.inputs, torch.Tensor)
        assert b.inputs.is_cuda and b.inputs.is_contiguous()
        assert torch.equal(a.inputs, b.inputs.cpu())


def test_a_run_goes_on_from_the_middle(root: Path) -> None:
    stream, _ = open_stream(SPECS[0], root)
    assert isinstance(stream, PictureStream)
    whole, rest = list(stream), list(stream.batches(start=2))
    assert [batch.ids for batch in rest] == [batch.ids for batch in whole[2:]]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(rest, whole[2:], strict=True))  # type: ignore[arg-type]


def test_the_seed_changes_order_and_noise(root: Path) -> None:
    one, two = (StreamSpec(data="tree:tree+c", domains=("gaussian_noise",), seed=seed) for seed in (0, 1))
    assert ids(open_stream(one, root)[0]) != ids(open_stream(two, root)[0])
    assert content(one, root) != content(two, root)


def test_after_a_whole_pass_the_card_has_a_hash_of_the_pixels(root: Path) -> None:
    stream, _ = open_stream(SPECS[0], root)
    assert stream.describe()["pixels"] is None
    list(stream)
    first = stream.describe()["pixels"]
    list(stream)
    assert len(first) == 64 and stream.describe()["pixels"] == first


# ---- no labels -------------------------------------------------------------------------------------------------------


def test_nothing_that_arrives_says_a_label(root: Path) -> None:
    stream, truth = open_stream(StreamSpec(data="tree:tree", batch=4), root)
    for batch in stream:
        assert set(vars(batch)) == {"inputs", "ids", "meta"}
        assert not any(kind in str((batch.ids, batch.meta)) for kind in ("ant", "bee", "cat", "dog", "label"))
    assert Counter(truth.values()) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_truth_knows_the_samples_of_the_stream_and_no_others(root: Path) -> None:
    stream, truth = open_stream(StreamSpec(data="tree:tree", limit=5), root)
    _, everything = open_stream(StreamSpec(data="tree:tree"), root)
    assert set(truth) == set(ids(stream)) and len(truth) == 5
    for name in set(everything) - set(truth):
        assert name not in truth
    for wrong in (
        "",
        "tree",
        "tree/xyz",
        "tree/0123456789abcdef",
        "tree/0123456789abcdef.1",
        "other/" + next(iter(truth)),
    ):
        assert wrong not in truth


def test_the_card_says_how_many_of_how_many(root: Path) -> None:
    stream, _ = open_stream(StreamSpec(data="tree:tree+c", limit=5, domains=("fog", "snow")), root)
    described = stream.describe()
    assert (described["samples"], described["batches"]) == (10, 2)
    assert described["domains"]["fog/5"] == {"used": 5, "here": 12, "published": None}
    assert str(stream) == "tree:tree+c: 10 samples, 2 batches of 64, from 24 in 2 domains"
    json.dumps(described)


# ---- arrival ---------------------------------------------------------------------------------------------------------


def test_ctta_brings_domain_after_domain_without_a_reset(root: Path) -> None:
    batches = list(open_stream(StreamSpec(data="tree:tree+c", batch=8, domains=("snow", "fog")), root)[0])
    assert [(b.meta["domain"], b.meta["severity"], len(b), b.meta["reset"]) for b in batches] == [
        ("snow", 5, 8, False),
        ("snow", 5, 4, False),
        ("fog", 5, 8, False),
        ("fog", 5, 4, False),
    ]


def test_ftta_is_the_same_with_resets_where_the_domain_changes(root: Path) -> None:
    ctta, ftta = (
        StreamSpec(data="tree:tree+c", batch=8, domains=("snow", "fog"), protocol=protocol)
        for protocol in ("ctta", "ftta")
    )
    stream = open_stream(ftta, root)[0]
    assert ids(stream) == ids(open_stream(ctta, root)[0])
    assert [batch.meta["reset"] for batch in stream] == [False, False, True, False]


def test_without_cuts_batches_run_across_domains(root: Path) -> None:
    spec = StreamSpec(data="tree:tree+c", batch=8, domains=("snow", "fog"), cut=False)
    batches = list(open_stream(spec, root)[0])
    assert [len(batch) for batch in batches] == [8, 8, 8]
    assert batches[1].meta["domain"] == "mixed"
    assert batches[1].meta["domains"] == ("snow",) * 4 + ("fog",) * 4


def test_mixed_batches_hold_several_domains(root: Path) -> None:
    spec = StreamSpec(data="tree:tree+c", batch=12, domains=("snow", "fog", "frost"), protocol="mixed")
    stream = open_stream(spec, root)[0]
    assert domains(stream) == ["mixed"] * 3
    assert len(set(ids(stream))) == 36


def test_gradual_severity_rises_and_falls(root: Path) -> None:
    spec = StreamSpec(data="tree:tree+c", batch=12, domains=("snow", "fog"), protocol="gradual")
    batches = list(open_stream(spec, root)[0])
    assert [batch.meta["severity"] for batch in batches] == [1, 2, 3, 4, 5, 4, 3, 2, 1] * 2
    assert domains(batches) == ["snow"] * 9 + ["fog"] * 9
    with pytest.raises(errors.BadConfig, match="tree:tree has no severities"):
        open_stream(StreamSpec(data="tree:tree", protocol="gradual"), root)


def test_recurring_domains_come_again_in_another_order(root: Path) -> None:
    spec = StreamSpec(data="tree:tree+c", batch=12, domains=("snow", "fog"), protocol="recurring")
    batches = list(open_stream(spec, root)[0])
    assert domains(batches) == ["snow", "fog"] * 3
    assert set(batches[0].ids or ()) == set(batches[2].ids or ())
    assert batches[0].ids != batches[2].ids


def test_correlated_streams_bring_classes_in_runs() -> None:
    labels = rng.numpy(0, "labels").integers(0, 10, 4000)

    def changes(order: np.ndarray) -> float:
        return float(np.mean([a != b for a, b in pairwise(labels[order].tolist())]))

    tight, loose = (
        changes(arrange([labels], [0], names=["a"], batch=64, order="correlated", concentration=c).index)
        for c in (0.01, 1000.0)
    )
    shuffled = changes(arrange([labels], [0], names=["a"], batch=64).index)
    assert tight < 0.6 * shuffled
    assert abs(loose - shuffled) < 0.03


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    batch=st.integers(1, 9),
    order=st.sampled_from(ORDERS),
    mixed=st.booleans(),
    cut=st.booleans(),
    limit=st.none() | st.integers(1, 20),
    rounds=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_every_sample_arrives_once_a_round_and_none_is_left_out(
    sizes: list[int], batch: int, order: str, mixed: bool, cut: bool, limit: int | None, rounds: int, seed: int
) -> None:
    labels = [np.arange(size) % 3 for size in sizes]
    arrangement = arrange(
        labels,
        list(range(len(sizes))) * rounds,
        names=[str(n) for n in range(len(sizes))],
        batch=batch,
        order=order,
        mixed=mixed,
        cut=cut,
        limit=limit,
        seed=seed,
    )
    arrived = [
        list(zip(*(part.tolist() for part in arrangement.batch(t)), strict=True)) for t in range(len(arrangement))
    ]
    counts = Counter(sample for one in arrived for sample in one)
    assert all(0 < len(one) <= batch for one in arrived)
    assert set(counts.values()) <= {rounds}
    assert Counter(domain for domain, _ in counts) == {
        domain: min(size, limit or size) for domain, size in enumerate(sizes) if size
    }
    if mixed or not cut:
        assert all(len(one) == batch for one in arrived[:-1])
    else:
        assert all(len({domain for domain, _ in one}) == 1 for one in arrived)


def test_a_domains_order_does_not_depend_on_its_neighbours() -> None:
    labels = [np.zeros(50, dtype=np.int64)] * 3
    alone = arrange(labels[:1], [0], names=["b"], batch=7)
    among = arrange(labels, [0, 1, 2], names=["a", "b", "c"], batch=7)
    assert alone.index.tolist() == among.index[among.domain == 1].tolist()


def test_a_limit_takes_the_same_pictures_of_every_domain() -> None:
    labels = [np.zeros(50, dtype=np.int64)] * 2
    arrangement = arrange(labels, [0, 1], names=["a", "b"], batch=7, limit=10)
    assert set(arrangement.index[arrangement.domain == 0]) == set(arrangement.index[arrangement.domain == 1])


def test_a_class_of_one_picture_can_be_correlated() -> None:
    assert sorted(correlate(np.array([4, 0, 4]), 2, 0.1, rng.numpy(0, "few")).tolist()) == [0, 1, 2]


# ---- descriptions ----------------------------------------------------------------------------------------------------


def test_a_description_survives_json() -> None:
    spec = StreamSpec(data="pacs", domains=("photo", "cartoon"), protocol="correlated", limit=9, delay=3, crop=0)
    again = StreamSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec and again.digest == spec.digest and hash(again) == hash(spec)


def test_a_shorthand_is_the_same_description_as_its_options() -> None:
    assert StreamSpec(data="a", protocol="correlated") == StreamSpec(data="a", order="correlated")
    assert StreamSpec(data="a", protocol="recurring") == StreamSpec(data="a", rounds=3)
    assert StreamSpec(data="a", protocol="recurring", rounds=20).rounds == 20


@pytest.mark.parametrize("field", list(StreamSpec(data="a").to_dict()))
def test_every_option_changes_the_digest(field: str) -> None:
    other: dict[str, Any] = {"data": "b", "protocol": "ftta", "domains": ["x"], "order": "sequential", "cut": False}
    other |= {"interpolation": "bicubic", "concentration": 0.5, "limit": 7, "resize": 8, "crop": 8}
    other |= {"severity": 2, "batch": 1, "rounds": 2, "delay": 1, "seed": 1}
    assert StreamSpec.from_dict({"data": "a", field: other[field]}).digest != StreamSpec(data="a").digest


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 0},
        {"batch": 2.5},
        {"rounds": 0},
        {"severity": 6},
        {"limit": 0},
        {"delay": -1},
        {"concentration": 0.0},
        {"protocol": "cta"},
        {"order": "random"},
        {"interpolation": "nearest"},
        {"domains": ("fog", "fog")},
    ],
    ids=str,
)
def test_an_option_out_of_range_is_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(errors.BadConfig, match=name):
        StreamSpec(data="a", **options)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(errors.UnknownName, match="Did you mean 'batch'"):
        StreamSpec.from_dict({"data": "a", "bacth": 3})
    with pytest.raises(errors.BadConfig, match="needs `data`"):
        StreamSpec.from_dict({"batch": 3})


# ---- bad pictures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_picture_is_named_not_skipped(
    tmp_path: Path, pack: Callable[..., Path], jpeg: Callable[..., bytes], workers: int
) -> None:
    pack(tmp_path / "mine", {f"cat/{n}.jpg": jpeg(n) for n in range(6)})
    pack(tmp_path / "mine", {"dog/broken.jpg": jpeg(0)[:-40]})
    stream, _ = open_stream(StreamSpec(data="tree:mine", order="sequential", batch=3), tmp_path, workers=workers)
    seen = []
    with pytest.raises(errors.DataError, match=r"^\S*dog/broken\.jpg cannot be decoded"):
        for batch in stream:
            seen.append(len(batch))
    assert seen == [3, 3]


def test_pictures_of_different_sizes_need_a_crop(
    tmp_path: Path, pack: Callable[..., Path], jpeg: Callable[..., bytes]
) -> None:
    pack(tmp_path / "mine", {"cat/a.jpg": jpeg(0, (40, 30)), "cat/b.jpg": jpeg(1, (30, 40))})
    spec = StreamSpec(data="tree:mine", order="sequential")
    with pytest.raises(errors.DataError, match=r"b\.jpg is 30×40 and another picture of its batch 40×30.*`crop`"):
        list(open_stream(spec, tmp_path)[0])
    (batch,) = open_stream(StreamSpec(data="tree:mine", resize=24, crop=24), tmp_path)[0]
    assert isinstance(batch.inputs, torch.Tensor) and batch.inputs.shape == (2, 3, 24, 24)


# ---- one's own iterable ----------------------------------------------------------------------------------------------


class Sensor(IterableDataset):  # type: ignore[type-arg]
    """Seven pictures that come one by one."""

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        for number in range(7):
            yield np.full((3, 4, 4), 10 * number, dtype=np.uint8), number % 2


def test_ones_own_iterable_dataset_is_a_stream_and_its_labels_stay_apart() -> None:
    stream, truth = from_iterable(Sensor(), StreamSpec(data="sensor", order="sequential", batch=3))
    batches = iter(stream)
    first = next(batches)
    assert isinstance(first, Batch) and isinstance(first.inputs, torch.Tensor)
    assert first.inputs[:, 0, 0, 0].tolist() == pytest.approx([0, 10 / 255, 20 / 255])
    assert [truth[name] for name in first.ids or ()] == [0, 1, 0]
    assert [len(batch) for batch in batches] == [3, 1]
    assert len(truth) == 7 and stream.length is None


def test_a_factory_can_be_named_in_a_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_sensor.py").write_text(
        "import torch\ndef readings():\n    return [(torch.full((1, 2, 2), n / 9), n, f'r{n}') for n in range(9)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = StreamSpec(data="python:my_sensor:readings", order="sequential", batch=4, limit=6)
    stream, truth = open_stream(spec)
    assert ids(stream) == ["r0", "r1", "r2", "r3", "r4", "r5"]
    assert truth["r5"] == 5
    with pytest.raises(errors.BadConfig, match="my_sensor:reading: no such factory"):
        open_stream(StreamSpec(data="python:my_sensor:reading", order="sequential"))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (torch.zeros(3, 4, 4), "sample 0 of iterable is a Tensor, not"),
        ((torch.full((3, 4, 4), -1.0), 0), r"float in \[0, 1\]: normalisation belongs to the model"),
        ((torch.zeros(3, 4, 4, dtype=torch.int64), 0), "neither 8-bit nor"),
    ],
)
def test_an_iterable_that_gives_something_else_is_told(sample: Any, message: str) -> None:
    with pytest.raises(errors.DataError, match=message):
        list(from_iterable([sample])[0])


def test_an_iterable_cannot_be_shuffled() -> None:
    with pytest.raises(errors.BadConfig, match="order='shuffled' has no meaning"):
        from_iterable(Sensor(), StreamSpec(data="sensor"))


@pytest.mark.parametrize("cut", [True, False])
def test_a_method_judged_by_domain_starts_anew_once_for_every_domain_after_the_first(cut: bool) -> None:
    spec = StreamSpec(data="digits+c", protocol="ftta", limit=100, batch=64, cut=cut)
    batches = list(open_stream(spec)[0])
    assert sum(batch.meta["reset"] for batch in batches) == 14
    assert not batches[0].meta["reset"]
