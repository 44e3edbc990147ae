"""`Experiment`, the typed description of a run: method, model, data, stream, budget, seed."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic

import wise_atta
from wise_atta import errors, methods, what, when
from wise_atta.bench.record import read_json, there
from wise_atta.data import StreamSpec
from wise_atta.model import Classifier, Network, StatisticsMode
from wise_atta.wrap import FAST

if TYPE_CHECKING:
    import yaml

# Fields that change where or how fast a run happens but not what is asked of it.
_NOT_HASHED = frozenset({"workers", "tag"})
# What an annotation asks of a value that somebody typed: any text would count as true.
_KINDS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "bool": ("true or false", bool),
    "int": ("a whole number", int),
    "float": ("a number", (int, float)),
}


class Experiment(pydantic.BaseModel):
    """One run, described. The same description gives the same numbers.

    Parameters
    ----------
    data, protocol, severity, batch, stream
        The stream; `stream` takes every other option of `StreamSpec` (order, limit, domains, rounds, …).
    model
        A model by name, see `wise-atta train --help` and the models page.
    method, options
        A method by name, and its options.
    policy, utility, selector, ratio, labels
        When and what an active method asks: the batch policy, its score (which one that does not look at it writes
        down all the same), the sample selector, labels a batch, and how many a selected batch gets at most. None: the
        method's own.
    exhaust
        The fair-comparison rule: label all that remain once the rest of the budget covers them.
    early
        Spend the same labels while answers can still come before the end, see `wise_atta.when.early`.
    annotator
        Who answers: the ``"oracle"``, with the truth, or the ``"teacher"``, with its own prediction.
    delay, noise, context, late_weight, late_limit, expires_after
        Answers come so many batches late, and wrong with this probability; how late samples are normalised, what they
        count for and up to which age, see `Adapter`; when questions expire.
    statistics, prior
        What BatchNorm layers normalise with, and how many samples the source counts for in ``"mixed"``; None: the
        method's own.
    teacher, source_data
        What cema and eata need beside the stream: a stronger model by name, which can also be the annotator, and clean
        data that the model was trained on.
    guard
        Whether a `Guard` watches for collapse; the card then counts its trips.
    fast
        How the network runs: `precision`, `channels_last`, `compile`, `graphs`, `checkpointing`, see `Classifier`.
    seed
        Of the method's randomness. The stream has its own seed in `stream`.
    device, threads, deterministic
        Where it runs: `cpu`, `cuda`, or `auto`.

    Examples
    --------
    >>> one = Experiment(data="digits", model="wise_atta/digits_cnn@random", method="tent", options={"lr": 1e-3})
    >>> Experiment.parse(one.model_dump()) == one
    True
    >>> Experiment.parse({"methd": "tent"})
    Traceback (most recent call last):
    wise_atta.errors.UnknownName: unknown field of an experiment 'methd'. Did you mean 'method'? Known: ...
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    data: str = "digits+c"
    protocol: str = "ctta"
    severity: int = pydantic.Field(5, ge=1, le=5)
    batch: int = pydantic.Field(64, ge=1)
    stream: dict[str, Any] = {}
    model: str = "digits"
    method: str = "wise"
    options: dict[str, Any] = {}
    policy: str | None = None
    utility: str | None = None
    selector: str | None = None
    ratio: float | None = pydantic.Field(None, ge=0)
    labels: int | None = pydantic.Field(None, ge=1)
    exhaust: bool = False
    early: bool = False
    annotator: Literal["oracle", "teacher"] = "oracle"
    delay: int = pydantic.Field(0, ge=0)
    noise: float = pydantic.Field(0.0, ge=0, le=1)
    context: Literal["own", "current", "source"] = "own"
    late_weight: float | None = pydantic.Field(None, gt=0)
    late_limit: int | None = pydantic.Field(None, ge=0)
    expires_after: int | None = pydantic.Field(None, ge=0)
    statistics: StatisticsMode | None = None
    prior: int | None = pydantic.Field(None, ge=0)
    teacher: str | None = None
    source_data: str | None = None
    guard: bool = False
    fast: dict[str, Any] = {}
    seed: int = 0
    device: str = "auto"
    threads: int | None = pydantic.Field(None, ge=1)
    deterministic: bool = True
    workers: int | None = pydantic.Field(None, ge=0)
    tag: str = ""

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_a_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        field = str(info.field_name)
        if isinstance(value, bool) and cls.model_fields[field].annotation is not bool:
            # To Python, and so to pydantic, it would be 0 or 1.
            raise errors.BadConfig(f"experiment field {field!r} is not true or false, got {value!r}")
        return value

    @pydantic.model_validator(mode="after")
    def _known_names(self) -> Experiment:
        known: list[tuple[str, str | None, Any]] = [
            ("method", self.method, methods.METHODS),
            ("policy", self.policy, when.POLICIES),
            ("utility", self.utility, when.UTILITIES),
            ("selector", self.selector, what.SELECTORS),
        ]
        for kind, name, names in known:
            if name is not None and name not in names:
                raise errors.unknown(kind, name, names)
        if self.annotator == "teacher" and self.teacher is None:
            raise errors.BadConfig("experiment field 'annotator': a teacher answers, so name its model in 'teacher'")
        for name in self.fast:
            if name not in FAST:
                raise errors.unknown("way to be fast", name, FAST)
        for field, asked in (
            ("options", _asked((*when.POLICIES.values(), methods.METHODS[self.method]))),
            ("stream", {one.name: str(one.type) for one in dataclasses.fields(StreamSpec)}),
            ("fast", _asked((Classifier, Network))),
        ):
            for name, value in getattr(self, field).items():
                _check_kind(f"experiment field {field!r}: {name}", asked.get(name, ""), value)
        self.spec()
        return self

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Experiment:
        """An experiment from plain values; `options.lr` stands for lr inside options. An error names the field."""
        content = nested(content)
        for name in content:
            if name not in cls.model_fields:
                raise errors.unknown("field of an experiment", str(name), cls.model_fields)
        try:
            return cls.model_validate(content)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            ours = first.get("ctx", {}).get("error")
            if isinstance(ours, errors.WiseAttaError):
                raise ours from None
            where = ".".join(str(part) for part in first["loc"])
            raise errors.BadConfig(f"experiment field {where!r}: {first['msg']}, got {first['input']!r}") from error

    @classmethod
    def read(cls, path: Path) -> Experiment:
        """An experiment from a YAML, TOML or JSON file, or from a run card."""
        return cls.parse(read_mapping(path))

    def spec(self) -> StreamSpec:
        """The stream's own description."""
        taken = {"data", "protocol", "severity", "batch", "delay"} & set(self.stream)
        if taken:
            named = ", ".join(sorted(taken))
            raise errors.BadConfig(f"experiment field 'stream': it does not hold {named}, give it beside 'stream'")
        if not isinstance(self.stream.get("domains", []), list | tuple):
            raise errors.BadConfig(
                f"experiment field 'stream': domains is {self.stream['domains']!r}, a list is needed (in a grid a list "
                "of lists: every list is an axis)"
            )
        return StreamSpec.from_dict(
            {
                **self.stream,
                "data": self.data,
                "protocol": self.protocol,
                "severity": self.severity,
                "batch": self.batch,
                "delay": self.delay,
            }
        )

    @property
    def excepted(self) -> list[str]:
        """What excepts the run from the same digits, even on the same machine: kernels chosen by their speed."""
        chosen = [name for name in ("compile", "graphs") if self.fast.get(name)]
        return [*chosen, *(["bf16"] if self.fast.get("precision") == "bf16" else [])]

    @property
    def digest(self) -> str:
        """What finished runs are found by: the description and the version of the package.

        Fields at their default do not count, so that a later release with one more field still finds them.
        """
        written = self.model_dump(mode="json", exclude_defaults=True)
        content = {k: v for k, v in written.items() if k not in _NOT_HASHED}
        text = json.dumps([content, wise_atta.__version__], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """A short name for tables and folders."""
        parts = [self.method]
        if self.policy:
            parts.append(self.policy)
        if self.selector:
            parts.append(self.selector)
        if self.ratio is not None:
            parts.append(f"r{self.ratio:g}")
        return "-".join([*parts, f"s{self.seed}"])


@functools.cache
def _asked(parts: tuple[Any, ...]) -> dict[str, str]:
    """The annotations of what parts take, by name."""
    takes = (inspect.signature(part).parameters for part in parts)
    return {name: str(one.annotation) for some in takes for name, one in some.items()}


def _check_kind(what: str, annotation: str, value: object) -> None:
    """Refuse a plain value of another kind than is asked for, and NaN.

    >>> _check_kind("options: nesterov", "bool", "no")
    Traceback (most recent call last):
    wise_atta.errors.BadConfig: options: nesterov is true or false, got 'no'
    """
    kind, _, other = annotation.partition(" | ")
    if kind not in _KINDS or other not in ("", "None") or (value is None and other):
        return
    words, types = _KINDS[kind]
    # To Python true and false are whole numbers, and NaN is a number that is not itself.
    if not isinstance(value, types) or isinstance(value, bool) != (kind == "bool") or value != value:
        raise errors.BadConfig(f"{what} is {words}, got {value!r}")


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Fields whose names hold a dot put inside the field before it: `options.lr` is lr inside options."""
    content, inside = dict[str, Any](), dict[str, dict[str, Any]]()
    for name, value in flat.items():
        field, _, inner = str(name).partition(".")
        if inner:
            inside.setdefault(field, {})[inner] = value
        else:
            content[field] = value
    for field, values in inside.items():
        whole = content.get(field, {})
        if not isinstance(whole, Mapping):
            raise errors.BadConfig(f"experiment field {field!r}: {field}.{min(values)} has no place in {whole!r}")
        content[field] = {**whole, **values}
    return content


def read_mapping(path: Path) -> dict[str, Any]:
    """The content of a YAML, TOML or JSON file; of a run card, the experiment in it."""
    if path.is_dir() and not (path / "card.json").exists():
        raise errors.DataError(f"{path} is a folder without a card.json: name a file, or the folder of a finished run")
    path = path / "card.json" if path.is_dir() else path
    if path.suffix == ".json" and not _is_card(path):
        return read_json(path)
    if path.suffix in (".json", ".zip") or "#" in path.suffix:
        cards = read_cards(path)
        if len(cards) > 1:
            listed = ", ".join(f"{path.name}#{card['digest']}" for card in cards[:3])
            raise errors.BadConfig(f"{path} holds {len(cards)} cards: name one by its digest, such as {listed}")
        content: dict[str, Any] = cards[0]["experiment"]
        return content
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise errors.MissingExtra("this needs yaml: pip install 'wise-atta[bench]'") from error
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _yaml_loader())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise errors.DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise errors.DataError(f"{path} does not describe an experiment: a mapping of fields is needed")
    return content


@functools.cache
def _yaml_loader() -> type[yaml.SafeLoader]:
    """YAML 1.1, but with 1e-3 as the number that YAML 1.2 takes it for, and without a field that stands there twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            # As it is written: later, what `<<` brings in stands beside what takes its place.
            node = super().compose_mapping_node(anchor)
            names = [key.value for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise yaml.composer.ComposerError(None, None, f"{name!r} stands there twice", node.start_mark)
            return node

    number = re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return Loader


def _is_card(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, list) or (isinstance(content, dict) and "experiment" in content)


def below(folder: Path, *patterns: str) -> list[Path]:
    """The files of these names below a folder, by path. A folder that is a link counts like any other, and once.

    A folder that cannot be looked into counts as one with a file of each name, so that who reads them says why not.
    """
    paths, seen = set[Path](), set[Path]()

    def closed(error: OSError) -> None:
        paths.update(Path(error.filename, pattern) for pattern in patterns if "*" not in pattern)

    for root, folders, files in os.walk(folder, onerror=closed, followlinks=True):
        real = Path(root).resolve()
        if real in seen:
            folders.clear()  # a link to what was searched, or around in a circle
        else:
            seen.add(real)
            folders.sort()  # of two links to one folder the first counts, whatever the disk lists first
            paths |= {Path(root, name) for pattern in patterns for name in fnmatch.filter(files, pattern)}
    return sorted(paths)


def card_files(place: Path) -> list[Path]:
    """The files of cards at a place: itself, or all below a folder, those of runs and published lists."""
    return below(place, "card.json", "cards*.json") if there(place) and place.is_dir() else [place]


def read_cards(path: Path, *, results: bool = False, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """The run cards at a place: one or a list in a JSON file, those below a folder, those in a bundle.

    `FILE#DIGEST` is the card of that digest among them; its beginning is enough. To run a card again its experiment is
    enough; with `results` all of it has to be there. `problems` takes what cannot be read beside others, which
    otherwise is an error.
    """
    name, _, wanted = ("", "", "") if there(path) else path.name.partition("#")
    place = path.with_name(name) if name else path
    cards: list[dict[str, Any]] = []
    wrong: list[str] = []
    for where, card in _listed(place, wrong):
        try:
            cards.append((whole if results else current)(card, where))
        except errors.DataError as error:
            wrong.append(str(error))
    if not cards:
        raise errors.DataError("; ".join(wrong) if wrong else f"no card below {place}: was a run finished there?")
    matching = [card for card in cards if str(card.get("digest", "")).startswith(wanted)]
    if not matching:
        known = ", ".join(str(card.get("digest")) for card in cards)
        raise errors.DataError("; ".join([f"no card {wanted} in {place}. There are: {known}", *wrong]))
    if wrong and not wanted:  # where one is named, it does not matter what else is there
        if problems is None:
            raise errors.DataError("; ".join(wrong))
        problems += wrong
    return matching


def _listed(place: Path, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """What stands at a place as cards, each with words for where; nothing in them is looked at."""
    for file in card_files(place):
        try:
            if file.suffix == ".zip":
                from wise_atta.bench.runs import bundled_cards

                yield from bundled_cards(file)
            else:
                content = json.loads(file.read_text(encoding="utf-8"))
                yield from ((str(file), card) for card in (content if isinstance(content, list) else [content]))
        except errors.DataError as error:
            problems.append(str(error))
        except (OSError, ValueError) as error:
            problems.append(f"{file} cannot be read: {error}")


class _Part(pydantic.BaseModel):
    """What is read of a part of a card, and of which kind it is; a card says more."""

    model_config = pydantic.ConfigDict(strict=True, protected_namespaces=())


class _Asked(_Part):
    method: str
    options: dict[str, Any]
    stream: dict[str, Any]
    ratio: float | None
    seed: int


class _Questions(_Part):
    asked: int


class _Results(_Part):
    error: pydantic.FiniteFloat
    error_never_asked: float | None = None
    samples: int
    batches: pydantic.PositiveInt
    by_domain: dict[str, float]
    labels_spent: int
    labels_allowed: int | None
    questions: _Questions
    forwards: int
    backwards: int
    seconds: float
    peak_memory: int | None = None


class _Spec(_Part):
    data: str
    protocol: str
    batch: int
    seed: int = 0


class _StreamRecord(_Part):
    spec: _Spec
    domains: dict[str, Any] | None = None


class _Provenance(_Part):
    model: dict[str, Any]
    stream: _StreamRecord
    versions: dict[str, str]
    device: str
    threads: int
    deterministic: bool


class _FirstBatch(_Part):
    digest: str
    logits: list[list[float]]


class _Spread(_Part):
    low: pydantic.FiniteFloat
    high: pydantic.FiniteFloat
    errors: list[pydantic.FiniteFloat] = []


class _Card(_Part):
    digest: str
    experiment: _Asked
    results: _Results
    provenance: _Provenance
    first_batch: _FirstBatch | None = None
    # Most have none; what stands in for it is never read.
    spread: _Spread = _Spread(low=0, high=0)


def whole(card: Any, where: str) -> dict[str, Any]:
    """The same for a card that is more than an experiment to run: all that is read of it is looked at."""
    checked = current(card, where)
    try:
        _Card.model_validate(checked)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        part = ".".join(str(name) for name in first["loc"])
        raise errors.DataError(f"{where} is not a run card: {part!r}: {first['msg']}") from error
    return checked


def _has(card: Any, where: str, **parts: Any) -> None:
    if not isinstance(card, Mapping):
        raise errors.DataError(f"{where} is not a run card but {card!r:.60}")
    for part, kind in parts.items():
        if not isinstance(card.get(part), kind):
            raise errors.DataError(f"{where} is not a run card: it has no {part!r}")


def current(card: Any, where: str) -> dict[str, Any]:
    """A card as this release writes it: what an earlier one had no field for was as it is by default."""
    _has(card, where, card_version=int, experiment=dict)
    check_version(card, where)
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in Experiment.model_fields.items()
        if not field.is_required()
    }
    return {**card, "experiment": {**defaults, **card["experiment"]}}


def check_version(card: Mapping[str, Any], where: str) -> None:
    """Refuse a card that a later release wrote."""
    version = card.get("card_version", 0)
    if version > CARD_VERSION:
        raise errors.DataError(
            f"{where} is of card version {version}, this release reads up to {CARD_VERSION}: update wise-atta"
        )


CARD_VERSION = 1
