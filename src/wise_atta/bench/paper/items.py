"""The paper's tables and figures with the numbers printed in them, read from `paper.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

import yaml

from wise_atta import errors
from wise_atta.data.corruptions.tables import CORRUPTIONS
from wise_atta.model import Spec

Draw = Literal["bars", "lines", "rows", "tenths", "queries"]


@dataclass(frozen=True)
class Row:
    """One line of a table, or one bar or point of a figure: what differs from wise as the paper runs it.

    Parameters
    ----------
    policy
        A policy by name. `paced` is Algorithm 1 under ⌊rT⌋ labels, spent to the last; `paced-prefix` is the same
        rule as it is by default here, never ahead of r·t.
    stage
        Which of a network's four stages takes the supervised step instead of the head.
    beside
        Whether the paper has no such row.
    x, line
        Where it lies in a figure of lines, and on which.
    """

    name: str
    method: str = "wise"
    policy: str | None = None
    ratio: float | None = None
    selector: str | None = None
    utility: str | None = None
    delay: int = 0
    batch: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    stage: int | None = None
    beside: bool = False
    x: float | None = None
    line: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quote:
    """A difference between two rows that the paper's text speaks of; `value` where it gives the number."""

    says: str
    row: str
    minus: str
    column: str
    value: float | None = None


@dataclass(frozen=True)
class Place:
    """A benchmark of the paper: data, model and protocol."""

    name: str
    title: str
    data: str
    model: str
    protocol: str


@dataclass(frozen=True)
class Network:
    """A model of the paper, a stronger one that teaches it, and its stages."""

    name: str
    teacher: str
    stages: tuple[Spec, ...]


@dataclass(frozen=True)
class Column:
    """Where a number stands: a place, one domain of it, or the mean over several places."""

    name: str
    places: tuple[str, ...]
    domain: str | None = None

    @classmethod
    def parse(cls, text: str) -> Column:
        """A column as it is written: `PLACE`, `PLACE/DOMAIN`, or `mean of PLACE PLACE …`."""
        if text.startswith("mean of "):
            return cls(text, tuple(text.removeprefix("mean of ").split()))
        place, _, domain = text.partition("/")
        return cls(text, (place,), domain or None)


@dataclass(frozen=True)
class Block:
    """A part of a table with columns of its own, and the paper's numbers by row and column."""

    columns: tuple[Column, ...]
    numbers: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper.

    Parameters
    ----------
    label, parts
        Its label in the paper, and those of its sub-figures.
    says
        What the paper finds in it.
    remark
        What a reader of the numbers should know, where the paper contradicts itself or leaves something open.
    reference
        The row that others are compared with.
    protocols
        Under which it is run on data at hand.
    draw, axis
        How it is drawn, and what its lines go along; None for a table of numbers alone.
    """

    name: str
    label: str
    title: str
    says: str
    reference: str
    rows: Mapping[str, Row]
    blocks: tuple[Block, ...]
    parts: tuple[str, ...] = ()
    remark: str = ""
    protocols: tuple[str, ...] = ("ctta",)
    draw: Draw | None = None
    axis: str = ""
    quotes: tuple[Quote, ...] = ()

    @property
    def kind(self) -> str:
        """`table` or `figure`."""
        return "table" if self.label.startswith("tab:") else "figure"

    def number(self, row: str, column: str) -> float | None:
        """What the paper prints there."""
        return next((b.numbers[row][column] for b in self.blocks if column in b.numbers.get(row, {})), None)


def item(name: str) -> Item:
    """A table or figure by its name here or by its label in the paper.

    >>> item("tab:label_delay").name
    'delay'
    >>> item("dealy")
    Traceback (most recent call last):
    wise_atta.errors.UnknownName: unknown table or figure 'dealy'. Did you mean 'delay'? Known: ...
    """
    labels = {label: one.name for one in ITEMS.values() for label in (one.label, *one.parts)}
    name = labels.get(name, name)
    if name not in ITEMS:
        raise errors.unknown("table or figure", name, ITEMS)
    return ITEMS[name]


def _columns(written: str | list[str]) -> tuple[Column, ...]:
    """`domains of PLACE` stands for its fifteen corruptions and their mean."""
    if isinstance(written, str):
        place = written.removeprefix("domains of ")
        written = [*(f"{place}/{domain}" for domain in CORRUPTIONS), place]
    return tuple(Column.parse(text) for text in written)


def _block(content: Mapping[str, Any]) -> Block:
    columns = _columns(content["columns"])
    names = [column.name for column in columns]
    numbers = {
        row: dict(values) if isinstance(values, Mapping) else dict(zip(names, values, strict=True))
        for row, values in content["numbers"].items()
    }
    return Block(columns, numbers)


def _row(name: str, content: Mapping[str, Any]) -> Row:
    line = content.get("line", ())
    return Row(name, **{**content, "line": (line,) if isinstance(line, str) else tuple(line)})


def _item(name: str, content: Mapping[str, Any], all_items: Mapping[str, Any]) -> Item:
    content = dict(content)
    blocks = content.pop("blocks", [])
    for other in content.pop("same_numbers", []):
        blocks = [*blocks, *all_items[other]["blocks"]]
    return Item(
        name=name,
        rows={row: _row(row, what) for row, what in content.pop("rows").items()},
        blocks=tuple(_block(block) for block in blocks),
        parts=tuple(content.pop("parts", ())),
        protocols=tuple(content.pop("protocols", ("ctta",))),
        quotes=tuple(Quote(**quote) for quote in content.pop("quotes", ())),
        **content,
    )


_CONTENT: dict[str, Any] = yaml.safe_load(
    resources.files("wise_atta.bench.paper").joinpath("paper.yaml").read_text(encoding="utf-8")
)
PLACES = {name: Place(name, **content) for name, content in _CONTENT["places"].items()}
NETWORKS = {
    name: Network(content["name"], content["teacher"], tuple(content["stages"]))
    for name, content in _CONTENT["models"].items()
}
STAGES: dict[str, tuple[Spec, ...]] = {name: tuple(stages) for name, stages in _CONTENT["stages"].items()}
ITEMS = {name: _item(name, content, _CONTENT["items"]) for name, content in _CONTENT["items"].items()}
