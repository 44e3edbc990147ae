"""Tables and figures of the paper as experiments, on the paper's data or on data at hand."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wise_atta import errors
from wise_atta.bench.experiment import Experiment
from wise_atta.bench.paper.items import NETWORKS, PLACES, STAGES, Item, Row, item
from wise_atta.bench.rivals import SEEDS, SETTINGS, WITHOUT_CHANCE, Setting, experiment
from wise_atta.methods import METHODS
from wise_atta.model import Spec

ALIASES = {"cifar10-c": "cifar10"}
# Algorithm 1 as printed lets spending run ahead without limit. Under `exhaust` its limit is ⌊rT⌋ labels for the whole
# stream, none of them left over, which is the paper's rule for a fair comparison (section 4.3).
ALGORITHM_1: dict[str, Any] = {"slack": 1, "credit": 1_000_000, "ties": "accept"}


@dataclass(frozen=True)
class Spot:
    """Where rows are run: a benchmark of the paper, or a setting at hand under a protocol."""

    name: str
    title: str
    setting: Setting
    stages: tuple[Spec, ...]
    on: str | None = None


def places(which: str | Item, on: str | None = None, protocols: Sequence[str] | None = None) -> list[Spot]:
    """The benchmarks of a table or figure, or with `on` the setting that stands in for all of them.

    Examples
    --------
    >>> [spot.name for spot in places("delay")]
    ['r-rn', 'r-vit', 'k-rn', 'k-vit']
    >>> [spot.name for spot in places("imagenet-c", on="cifar10-c")]
    ['cifar10 ctta', 'cifar10 ftta']
    """
    exhibit = item(which) if isinstance(which, str) else which
    if on is None:
        names = dict.fromkeys(name for block in exhibit.blocks for column in block.columns for name in column.places)
        return [_of_paper(name) for name in names if protocols is None or PLACES[name].protocol in protocols]
    on = ALIASES.get(on, on)
    if on not in SETTINGS:
        raise errors.unknown("setting", on, [*SETTINGS, *ALIASES])
    base = SETTINGS[on]
    return [
        Spot(
            f"{on} {protocol}",
            f"{on}, {protocol.upper()}",
            replace(base, fields={**base.fields, "protocol": protocol}),
            STAGES[on],
            on,
        )
        for protocol in protocols or exhibit.protocols
    ]


def _of_paper(name: str) -> Spot:
    place = PLACES[name]
    network = NETWORKS[place.model]
    setting = Setting(
        {"data": place.data, "model": network.name, "protocol": place.protocol, "batch": 64},
        tune_on="",
        tune_stream={},
        source_data="imagenet",
        teacher=network.teacher,
        options={method: {"preset": place.data} for method in METHODS},
    )
    return Spot(name, place.title, setting, network.stages)


def experiments(
    name: str,
    on: str | None = None,
    *,
    seeds: Sequence[int] = SEEDS,
    device: str = "auto",
    tuned: Mapping[str, Mapping[str, Any]] | None = None,
    protocols: Sequence[str] | None = None,
    only: Sequence[str] = (),
    limit: int | None = None,
    own_streams: bool = False,
    **fields: Any,
) -> list[Experiment]:
    """The runs of a table or figure, each once, stream by stream, so that one held in memory serves many.

    Runs of different tables that ask for the same thing are the same experiment, and are found and not repeated.

    Parameters
    ----------
    name
        Its name here, or its label in the paper.
    on
        `digits`, `cifar10` (or `cifar10-c`), `imagenet-sample` or `pacs` instead of the paper's data sets.
    seeds
        Of the methods' draws. What draws nothing is run with the first alone.
    tuned
        Options by method, such as a learning rate; otherwise the paper's on its data, the methods' own elsewhere.
    protocols
        Which; by default the paper's, and on data at hand CTTA, for ImageNet-C's tables FTTA too.
    only
        Rows by name, with * and ?; all if empty.
    limit
        At most so many pictures a domain, to shorten.
    own_streams
        Whether each seed but 0 also has a stream of its own: other order, other noise, other pictures where they are
        limited. In the paper's code seeds change the method's draws alone, and some rows hardly draw anything.
    fields
        Further fields of every experiment.

    Examples
    --------
    >>> runs = experiments("batch-selection", "digits", seeds=[0])
    >>> [(run.method, run.policy) for run in runs][:3]
    [('eatta', 'uniform'), ('eatta', 'random'), ('wise', 'uniform')]
    """
    exhibit = item(name)
    stream = {**fields.pop("stream", {}), **({} if limit is None else {"limit": limit})}
    runs: dict[str, Experiment] = {}
    for spot in places(exhibit, on, protocols):
        for row in rows(exhibit, spot, only):
            for seed in seeds if has_chance(row) or own_streams else seeds[:1]:
                own = {"seed": seed} if own_streams and seed else {}
                shared = {"device": device, "stream": {**stream, **own}, **fields}
                one = experiment_of(row, spot, tuned or {}, seed=seed, **shared)
                runs.setdefault(one.digest, one)
    if not runs:
        raise errors.BadConfig(
            f"nothing of {exhibit.name} is left to run: look at --only, --protocol and --seeds. "
            f"Its rows: {', '.join(exhibit.rows)}"
        )
    streams: dict[str, list[Experiment]] = {}
    for one in runs.values():
        streams.setdefault(replace(one.spec(), protocol="ctta").digest, []).append(one)
    return [one for together in streams.values() for one in together]


def rows(exhibit: Item, spot: Spot, only: Sequence[str] = ()) -> list[Row]:
    """The rows that are run at a place: on the paper's data those that it prints there, and those set beside them."""
    for pattern in only:
        if not fnmatch.filter(exhibit.rows, pattern):
            raise errors.unknown(f"row of {exhibit.name}", pattern, exhibit.rows)
    printed = [
        row
        for block in exhibit.blocks
        if spot.name in [name for column in block.columns for name in column.places]
        for row in (block.numbers or exhibit.rows)
    ]
    # A figure prints few of its numbers; all of its rows are run.
    whole = spot.on is not None or exhibit.kind == "figure"
    return [
        row
        for row in exhibit.rows.values()
        if (whole or row.beside or row.name in printed)
        and (not only or any(fnmatch.fnmatchcase(row.name, pattern) for pattern in only))
    ]


def has_chance(row: Row) -> bool:
    """Whether another seed can give other numbers."""
    return row.method not in WITHOUT_CHANCE and row.ratio != 0


def experiment_of(row: Row, spot: Spot, tuned: Mapping[str, Mapping[str, Any]], **fields: Any) -> Experiment:
    """One row at one place with one seed."""
    content: dict[str, Any] = {**fields, **_when(row)}
    content |= {name: value for name in ("selector", "utility") if (value := getattr(row, name)) is not None}
    if row.delay:
        content["delay"] = row.delay
    if row.batch is not None:
        content["batch"] = row.batch
    return experiment(
        spot.setting, row.method, options={**tuned.get(row.method, {}), **own_options(row, spot)}, **content
    )


def own_options(row: Row, spot: Spot) -> dict[str, Any]:
    """The options that make a row what it is, whatever was tuned."""
    options: dict[str, Any] = {}
    policy = _when(row).get("policy")
    if policy == "paced" and row.policy == "paced":
        options |= ALGORITHM_1
    if policy == "random":
        options["exact"] = True  # round(rT) batches without replacement, as in the published code
    if row.method == "wise" and spot.on is not None:
        options["statistics"] = "batch"  # as all its rivals; the paper's presets have it already
    if row.stage is not None:
        options["block"] = spot.stages[row.stage - 1]
    return {**options, **row.options}


def _when(row: Row) -> dict[str, Any]:
    """Policy and ratio. Where the ratio leaves no choice, the policy says so, and one run stands for all policies."""
    if row.policy is None:
        return {}
    if row.ratio == 0:
        return {"policy": "never"}
    if row.ratio == 1:
        return {"policy": "always"}
    policy = "paced" if row.policy == "paced-prefix" else row.policy
    return {"policy": policy, "ratio": row.ratio, **({"exhaust": True} if policy == "paced" else {})}
