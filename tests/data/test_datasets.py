"""Are the published layouts read as published, with the right classes, and is what does not fit named?"""

from __future__ import annotations

import functools
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from wise_atta import errors
from wise_atta.data import models, open_dataset, open_stream, picture_of
from wise_atta.data.corruptions import CORRUPTIONS, EXTRA
from wise_atta.data.streams import PictureStream, StreamSpec

# As in conftest.py: folder name and place among the 1,000.
WNIDS = {"n01443537": 1, "n01498041": 6, "n07749582": 951}
Pack = Callable[..., Path]
Make = Callable[..., dict[str, bytes]]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def cifar_c(rows: int = 4, labels: np.ndarray | None = None) -> dict[str, bytes]:
    """CIFAR-10-C with `rows` pictures: each pixel says which corruption, severity and row it belongs to."""
    files = {}
    for place, corruption in enumerate(CORRUPTIONS):
        values = 10 * place + np.arange(5)[:, None] + 50 * np.arange(rows)[None, :] % 256
        files[f"CIFAR-10-C/{corruption}.npy"] = npy(
            np.broadcast_to(values.reshape(-1, 1, 1, 1), (5 * rows, 32, 32, 3)).astype(np.uint8)
        )
    files["CIFAR-10-C/labels.npy"] = npy(np.tile(np.arange(rows) % 10, 5) if labels is None else labels)
    return files


@functools.cache
def _loaded(name: str) -> models.SourceModel:
    return models.load(name)


# ---- the paper's four ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "classes", "model"),
    [
        ("imagenet-c", 1000, "torchvision/resnet50@random"),
        ("imagenet-r", 3, "torchvision/resnet50@random"),
        ("imagenet-k", 1000, "torchvision/vit_b_16@random"),
        ("imagenet-a", 3, "torchvision/vit_b_16@random"),
    ],
)
def test_a_published_benchmark_runs_from_its_archive_to_scored_logits(
    imagenet_folder: Path, data: str, classes: int, model: str
) -> None:
    spec = StreamSpec(data=data, batch=3, domains=("fog",) if data == "imagenet-c" else (), limit=3)
    stream, truth = open_stream(spec, imagenet_folder)
    assert isinstance(stream, PictureStream)
    source = _loaded(model)
    right = 0
    with torch.inference_mode():
        for batch in stream:
            assert isinstance(batch.inputs, torch.Tensor) and batch.ids is not None
            assert batch.inputs.shape == (3, 3, 224, 224)
            assert 0 <= float(batch.inputs.min()) < float(batch.inputs.max()) <= 1
            logits = source(batch.inputs)
            if stream.dataset.mask is not None:
                logits = logits[:, list(stream.dataset.mask)]
            assert logits.shape == (3, classes)
            right += sum(int(guess) == truth[name] for guess, name in zip(logits.argmax(1), batch.ids, strict=True))
    assert 0 <= right <= 3
    names = stream.dataset.classes
    assert all(names[label] in WNIDS for label in truth.values())


def test_classes_of_the_200_class_sets_are_those_that_occur(imagenet_folder: Path) -> None:
    for name in ("imagenet-r", "imagenet-a"):
        dataset = open_dataset(name, imagenet_folder)
        assert dataset.classes == tuple(WNIDS)
        assert dataset.mask == tuple(WNIDS.values())


def test_labels_of_the_1000_class_sets_are_imagenets_own(imagenet_folder: Path) -> None:
    for name, domain in (("imagenet-c", "snow"), ("imagenet-k", "imagenet-k")):
        dataset = open_dataset(name, imagenet_folder)
        assert dataset.mask is None
        assert sorted(set(dataset.place(domain, 5).labels.tolist())) == sorted(WNIDS.values())


def test_imagenet_c_is_found_across_archives_and_in_published_order(imagenet_folder: Path) -> None:
    dataset = open_dataset("imagenet-c", imagenet_folder)
    assert dataset.domains == CORRUPTIONS
    assert {len(place) for place in dataset.all_places()} == {6}


def test_extra_corruptions_are_there_but_not_part_of_the_benchmark(
    tmp_path: Path, pack: Pack, class_files: Make
) -> None:
    files: dict[str, bytes] = {}
    for corruption in (*CORRUPTIONS, EXTRA[0]):
        files |= class_files(f"{corruption}/5/", count=1, size=(224, 224))
    pack(tmp_path / "ImageNet-C", files)
    assert EXTRA[0] in open_dataset("imagenet-c", tmp_path).domains
    stream, _ = open_stream(StreamSpec(data="imagenet-c"), tmp_path)
    assert isinstance(stream, PictureStream)
    assert [place.domain for place in stream.places] == list(CORRUPTIONS)


def test_a_missing_corruption_is_not_passed_over(tmp_path: Path, pack: Pack, class_files: Make) -> None:
    pack(tmp_path / "ImageNet-C", class_files("fog/5/", size=(224, 224)))
    with pytest.raises(errors.DataError, match=r"imagenet-c lacks gaussian_noise.*such as fog"):
        open_stream(StreamSpec(data="imagenet-c"), tmp_path)
    stream, _ = open_stream(StreamSpec(data="imagenet-c", domains=("fog",)), tmp_path)
    assert stream.length == 1
    with pytest.raises(errors.DataError, match="has no 'snow' here"):
        open_stream(StreamSpec(data="imagenet-c", domains=("snow",)), tmp_path)
    with pytest.raises(errors.BadConfig, match="severities"):
        open_stream(StreamSpec(data="imagenet-c", domains=("fog",), severity=2), tmp_path)


def test_a_folder_that_is_no_imagenet_class_is_named(tmp_path: Path, pack: Pack, jpeg: Callable[..., bytes]) -> None:
    pack(tmp_path / "imagenet-r", {"n00000000/a.jpg": jpeg(0)})
    with pytest.raises(errors.DataError, match=r"imagenet-r/n00000000 is not one of ImageNet's 1,000 classes"):
        open_dataset("imagenet-r", tmp_path)


def test_the_same_pictures_have_the_same_ids_in_any_kind_of_archive(
    tmp_path: Path, pack: Pack, class_files: Make
) -> None:
    ids = []
    for kind in ("imagenet-a", "imagenet-a.tar"):
        pack(tmp_path / kind / kind, class_files("imagenet-a/" if kind.endswith(".tar") else ""))
        place = open_dataset("imagenet-a", tmp_path / kind).place("imagenet-a")
        ids.append([(place.id(index), int(place.labels[index])) for index in range(len(place))])
    assert ids[0] == ids[1]


def test_an_id_says_which_picture_but_not_which_class(imagenet_folder: Path) -> None:
    dataset = open_dataset("imagenet-c", imagenet_folder)
    fog, snow = dataset.place("fog", 5), dataset.place("snow", 1)
    assert fog.id(0) != snow.id(0)
    assert picture_of(fog.id(0)) == picture_of(snow.id(0))
    assert not any(wnid in fog.id(index) for wnid in WNIDS for index in range(len(fog)))


# ---- trees -----------------------------------------------------------------------------------------------------------


def test_a_tree_of_domains_is_read_at_any_depth(tmp_path: Path, pack: Pack, jpeg: Callable[..., bytes]) -> None:
    names = [f"{domain}/{kind}/{n}.jpg" for domain in ("photo", "sketch") for kind in ("dog", "cat") for n in (0, 1)]
    pack(tmp_path / "mine.zip", {f"some/where/{name}": jpeg(n) for n, name in enumerate(names)})
    pack(tmp_path / "mine", {name: jpeg(n) for n, name in enumerate(names)})
    first, second = open_dataset("tree:mine", tmp_path), open_dataset("tree:mine.zip", tmp_path)
    assert first.domains == second.domains == ("photo", "sketch")
    assert first.classes == second.classes == ("cat", "dog")
    assert first.place("photo").labels.tolist() == [0, 0, 1, 1]
    assert first.place("photo").id(0) == second.place("photo").id(0)
    assert picture_of(first.place("photo").id(0)) != picture_of(first.place("sketch").id(0))


def test_a_tree_without_domains_is_one_domain(tmp_path: Path, pack: Pack, jpeg: Callable[..., bytes]) -> None:
    pack(tmp_path / "flowers", {f"{kind}/{n}.png": jpeg(n, form="PNG") for kind in ("rose", "iris") for n in (1, 2)})
    dataset = open_dataset("tree:flowers", tmp_path)
    assert dataset.domains == ("flowers",)
    assert dataset.classes == ("iris", "rose")


def test_pacs_is_read_from_a_tree_and_from_one_zip_a_domain(
    tmp_path: Path, pack: Pack, jpeg: Callable[..., bytes]
) -> None:
    domains = ("photo", "art_painting", "cartoon", "sketch")
    for number, domain in enumerate(domains):
        pack(tmp_path / "zips" / f"pacs-{domain}.zip", {"dog/pic_001.jpg": jpeg(number, (160, 150))})
        pack(tmp_path / "tree" / "PACS" / domain, {"dog/pic_001.jpg": jpeg(number, (160, 150))})
    ids = []
    for kind in ("zips", "tree"):
        stream, truth = open_stream(StreamSpec(data="pacs"), tmp_path / kind)
        batches = list(stream)
        assert [batch.meta["domain"] for batch in batches] == list(domains)
        ids.append([name for batch in batches for name in batch.ids or ()])
        assert len(truth) == 4
    assert ids[0] == ids[1]
    assert len({picture_of(name) for name in ids[0]}) == 4


def test_an_empty_class_folder_is_named(tmp_path: Path, pack: Pack, jpeg: Callable[..., bytes]) -> None:
    pack(tmp_path / "mine", {"dog/1.jpg": jpeg(1), "cat/notes.txt": b"none yet"})
    with pytest.raises(errors.DataError, match=r"mine/cat holds no picture"):
        open_dataset("tree:mine", tmp_path)


@pytest.mark.parametrize("stray", ["stray.jpg", "dog/deep/er.jpg"])
def test_a_picture_in_the_wrong_place_is_named(
    tmp_path: Path, pack: Pack, jpeg: Callable[..., bytes], stray: str
) -> None:
    pack(tmp_path / "imagenet-r", {f"n01443537/{n}.jpg": jpeg(n) for n in (1, 2)})
    pack(tmp_path / "imagenet-r" / "n01498041", {"1.jpg": jpeg(1), stray: jpeg(3)} if "/" in stray else {"1.jpg": b""})
    if "/" not in stray:
        pack(tmp_path / "imagenet-r", {stray: jpeg(3)})
    with pytest.raises(errors.DataError, match=stray.split("/")[0]):
        open_dataset("imagenet-r", tmp_path)


def test_other_files_are_listed_not_read(imagenet_folder: Path) -> None:
    assert open_dataset("imagenet-r", imagenet_folder).ignored == ("imagenet-r/README.txt",)


# ---- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".tar", ".zip", ""])
def test_cifar_c_rows_are_cut_by_severity(tmp_path: Path, pack: Pack, ending: str) -> None:
    path = pack(tmp_path / f"CIFAR-10-C{ending}", cifar_c())
    name = "cifar10-c" if ending != ".zip" else f"npy:{path.name}"
    dataset = open_dataset(name, tmp_path)
    for corruption in ("gaussian_noise", "jpeg_compression"):
        for severity in (1, 5):
            place = dataset.place(corruption, severity)
            pixels = [int(place.load(n, resize=None, crop=None, interpolation="bilinear")[0, 0, 0]) for n in range(4)]
            start = 10 * CORRUPTIONS.index(corruption) + severity - 1
            assert pixels == [(start + 50 * row) % 256 for row in range(4)]
            assert place.labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("file", "array", "message"),
    [
        ("fog", np.zeros((20, 32, 32), np.uint8), r"fog\.npy has shape \(20, 32, 32\)"),
        ("fog", np.zeros((15, 32, 32, 3), np.uint8), r"fog\.npy has shape \(15, 32, 32, 3\)"),
        ("fog", np.zeros((20, 32, 32, 3), np.float32), r"fog\.npy has shape .* type float32"),
        ("labels", np.zeros((20, 2), np.int64), r"labels\.npy has shape \(20, 2\)"),
        ("labels", np.zeros(7, np.int64), r"labels\.npy has shape \(7,\)"),
        ("labels", np.full(20, 10), r"labels\.npy has labels from 10 to 10: 0 to 9 was"),
        ("labels", np.arange(20) % 10, r"labels\.npy: the labels of the five severities differ"),
        ("labels", np.tile(np.arange(5), 5), r"fog\.npy has shape \(20, 32, 32, 3\).*\(25, height, width, 3\)"),
    ],
)
def test_an_array_that_does_not_fit_is_named(
    tmp_path: Path, pack: Pack, file: str, array: np.ndarray, message: str
) -> None:
    pack(tmp_path, {**cifar_c(), f"CIFAR-10-C/{file}.npy": npy(array)})
    with pytest.raises(errors.DataError, match=message):
        open_dataset("cifar10-c", tmp_path).place("fog", 5)


def test_a_truncated_array_is_named(tmp_path: Path, pack: Pack) -> None:
    files = cifar_c()
    pack(tmp_path, {**files, "CIFAR-10-C/fog.npy": files["CIFAR-10-C/fog.npy"][:-100]})
    with pytest.raises(errors.DataError, match=r"fog\.npy is not a whole npy file"):
        open_dataset("cifar10-c", tmp_path).place("fog", 5)


def test_an_array_that_runs_code_is_refused(tmp_path: Path, pack: Pack) -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    pack(tmp_path, {**cifar_c(), "CIFAR-10-C/labels.npy": file.getvalue()})
    with pytest.raises(errors.DataError, match=r"labels\.npy is not a whole npy file"):
        open_dataset("cifar10-c", tmp_path)


def test_labels_must_be_there(tmp_path: Path, pack: Pack) -> None:
    files = cifar_c()
    del files["CIFAR-10-C/labels.npy"]
    pack(tmp_path, files)
    with pytest.raises(errors.DataError, match=r"CIFAR-10-C has no labels\.npy"):
        open_dataset("cifar10-c", tmp_path)


# ---- others ----------------------------------------------------------------------------------------------------------


def test_a_hugging_face_dataset_is_read_by_its_column_types(
    tmp_path: Path, pack: Pack, jpeg: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("datasets", reason="needs the package `datasets`")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files = [jpeg(number) for number in range(4)]
    table = hub.Dataset.from_dict(
        {"photo": [{"bytes": data, "path": None} for data in files], "kind": [1, 0, 1, 1]},
        features=hub.Features({"photo": hub.Image(), "kind": hub.ClassLabel(names=["cat", "dog"])}),
    )
    (tmp_path / "pets").mkdir()
    table.to_parquet(str(tmp_path / "pets" / "test-00000.parquet"))
    stream, truth = open_stream(StreamSpec(data=f"hf:{tmp_path / 'pets'}@test", order="sequential", batch=4))
    (batch,) = stream
    assert batch.ids is not None
    assert [truth[name] for name in batch.ids] == [1, 0, 1, 1]
    assert isinstance(batch.inputs, torch.Tensor) and batch.inputs.shape == (4, 3, 36, 40)
    with pytest.raises(errors.UnknownName, match="split"):
        open_dataset(f"hf:{tmp_path / 'pets'}@tset")
    with pytest.raises(errors.DataError, match="cannot be opened"):
        open_dataset(f"hf:{tmp_path / 'nothing-here'}")


def test_without_the_package_a_hugging_face_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(errors.MissingExtra, match="pip install datasets"):
        open_dataset("hf:cifar10")


def test_names_that_do_not_exist_are_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(errors.UnknownName, match="Did you mean 'imagenet-r'"):
        open_dataset("imagnet-r", tmp_path)
    with pytest.raises(errors.DataError, match=r"imagenet-r is not in .*wise-atta data fetch imagenet-r"):
        open_dataset("imagenet-r", tmp_path)
    with pytest.raises(errors.DataError, match=r"comes from https://domaingeneralization"):
        open_dataset("pacs", tmp_path)


def test_without_a_data_folder_the_error_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WISE_ATTA_DATA", raising=False)
    with pytest.raises(errors.DataError, match="WISE_ATTA_DATA"):
        open_dataset("imagenet-r")
    with pytest.raises(errors.DataError, match="is not a folder"):
        open_dataset("imagenet-r", tmp_path / "nowhere")


def test_a_half_downloaded_set_is_named(tmp_path: Path) -> None:
    (tmp_path / "imagenet-r.tar.part").write_bytes(b"x")
    with pytest.raises(errors.DataError, match=r"imagenet-r\.tar\.part is half downloaded"):
        open_dataset("imagenet-r", tmp_path)


def test_corruptions_go_on_clean_sets_only(imagenet_folder: Path) -> None:
    assert open_dataset("imagenet-r+c", imagenet_folder).domains == CORRUPTIONS
    with pytest.raises(errors.BadConfig, match="corrupted already"):
        open_dataset("imagenet-c+c", imagenet_folder)


# ---- real pictures ---------------------------------------------------------------------------------------------------


def test_every_second_imagenet_class_is_in_the_sample(wise_atta_data: Path) -> None:
    stream, truth = open_stream(StreamSpec(data="imagenet-sample+c", cut=False), wise_atta_data)
    assert isinstance(stream, PictureStream)
    assert stream.places[0].pictures.labels.tolist() == list(range(0, 1000, 2))
    assert (stream.samples, stream.length, len(truth)) == (22_500, 352, 22_500)
    assert len({picture_of(name) for name in truth}) == 500


def test_the_real_sets_have_their_published_numbers(wise_atta_data: Path) -> None:
    targets = StreamSpec(data="pacs", domains=("art_painting", "cartoon"), protocol="ftta")
    for spec, text in (
        (targets, "pacs: 4,392 samples, 69 batches of 64, from 4,392 in 2 domains (all that were published)"),
        (StreamSpec(data="cifar10"), "cifar10: 10,000 samples, 157 batches of 64, from 10,000 in 1 domain"),
        (StreamSpec(data="cifar10+c"), "cifar10+c: 150,000 samples, 2,355 batches of 64, from 150,000 in 15 domains"),
    ):
        assert str(open_stream(spec, wise_atta_data)[0]).startswith(text)


def test_a_zip_of_real_pictures_gives_what_its_folder_gives(wise_atta_data: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(wise_atta_data / "pacs-cartoon.zip", tmp_path / "PACS" / "cartoon")
    spec = StreamSpec(data="pacs", domains=("cartoon",), limit=64)
    packed, unpacked = (next(iter(open_stream(spec, root)[0])) for root in (wise_atta_data, tmp_path))
    assert packed.ids == unpacked.ids
    assert isinstance(packed.inputs, torch.Tensor) and isinstance(unpacked.inputs, torch.Tensor)
    assert torch.equal(packed.inputs, unpacked.inputs)
