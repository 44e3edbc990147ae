"""Which methods are there? One file each, each a short composition of when, what and how."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from wise_atta import errors
from wise_atta.methods.bn import bn
from wise_atta.methods.cema import cema
from wise_atta.methods.cotta import cotta
from wise_atta.methods.eata import eata
from wise_atta.methods.eatta import eatta
from wise_atta.methods.eta import eta
from wise_atta.methods.hiltta import hiltta
from wise_atta.methods.method import Method
from wise_atta.methods.roid import roid
from wise_atta.methods.sar import sar
from wise_atta.methods.simatta import simatta
from wise_atta.methods.source import source
from wise_atta.methods.table import ROWS, Row
from wise_atta.methods.tent import tent
from wise_atta.methods.wise import wise
from wise_atta.when import POLICIES

__all__ = [
    "METHODS",
    "Method",
    "Row",
    "bn",
    "cema",
    "cotta",
    "eata",
    "eatta",
    "eta",
    "get",
    "hiltta",
    "list",
    "options",
    "roid",
    "sar",
    "simatta",
    "source",
    "tent",
    "wise",
]

METHODS: dict[str, Callable[..., Method]] = {
    "source": source,
    "bn": bn,
    "tent": tent,
    "eta": eta,
    "eata": eata,
    "sar": sar,
    "cotta": cotta,
    "roid": roid,
    "simatta": simatta,
    "hiltta": hiltta,
    "cema": cema,
    "eatta": eatta,
    "wise": wise,
}


def list() -> builtins.list[Row]:
    """Every method at a glance: labels a batch, adapted tensors, memory, reference.

    >>> for row in list()[:3]:
    ...     print(row.name, row.labels, row.adapts)
    source 0 nothing
    bn 0 nothing
    tent 0 norm
    """
    return [row for row in ROWS if row.name in METHODS]


def options(name: str) -> builtins.list[str]:
    """The names of the options that a method takes, those of its policy included.

    >>> "lr" in options("tent"), "ratio" in options("tent"), "horizon" in options("wise")
    (True, False, True)
    """
    return _takes(name)


def get(name: str, **options: Any) -> Method:
    """A method by its name.

    >>> get("tent", lr=1e-3).name
    'tent'
    """
    takes = _takes(name)
    for option in options:
        if option not in takes:
            raise errors.unknown(f"option of method {name!r}:", option, takes)
    _check_always(name, options)
    try:
        return METHODS[name](**options)
    except TypeError as error:
        raise errors.BadConfig(f"method {name!r}: {error}") from error


def _check_always(name: str, options: Mapping[str, Any]) -> None:
    """Under `always` the labels of a batch are the ratio: another one would be said and not kept."""
    if options.get("policy") != "always" or options.get("ratio") is None:
        return
    labels = options.get("labels", inspect.signature(METHODS[name]).parameters["labels"].default)
    if options["ratio"] != labels:
        said = "all that its selector picks" if labels is None else f"{labels} (labels) of every batch"
        raise errors.BadConfig(
            f"ratio is {float(options['ratio']):g}, but policy 'always' asks for {said}: leave the ratio out, or take "
            "a policy that keeps to it, such as 'uniform'"
        )


def _takes(name: str) -> builtins.list[str]:
    if name not in METHODS:
        raise errors.unknown("method", name, METHODS)
    takes = inspect.signature(METHODS[name]).parameters
    named = [option for option, one in takes.items() if one.kind is not one.VAR_KEYWORD]
    policies = POLICIES.values() if len(named) < len(takes) else ()
    return [*dict.fromkeys([*named, *(option for one in policies for option in inspect.signature(one).parameters)])]
