"""Methods: one file each, each a short composition of when, what and how."""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from wise_atta import errors
from wise_atta.methods.bn import bn as bn
from wise_atta.methods.cema import cema as cema
from wise_atta.methods.cotta import cotta as cotta
from wise_atta.methods.eata import eata as eata
from wise_atta.methods.eatta import eatta as eatta
from wise_atta.methods.eta import eta as eta
from wise_atta.methods.hiltta import hiltta as hiltta
from wise_atta.methods.method import Method as Method
from wise_atta.methods.recipes import check_known, options_of
from wise_atta.methods.roid import roid as roid
from wise_atta.methods.sar import sar as sar
from wise_atta.methods.simatta import simatta as simatta
from wise_atta.methods.source import source as source
from wise_atta.methods.table import ROWS, Row as Row
from wise_atta.methods.tent import tent as tent
from wise_atta.methods.wise import wise as wise

METHODS: dict[str, Callable[..., Method]] = {
    make.__name__: make for make in (source, bn, tent, eta, eata, sar, cotta, roid, simatta, hiltta, cema, eatta, wise)
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
    """The names of the options that a method takes, those of its parts and of its policy included.

    >>> "lr" in options("tent"), "ratio" in options("tent"), "horizon" in options("wise")
    (True, False, True)
    """
    return [*options_of(factory(name))]


def factory(name: str) -> Callable[..., Method]:
    """What makes the method of that name: one of ours, one that a package offers, or ``"package.module:factory"``.

    Packages offer theirs under the entry point group ``wise_atta.methods``. A name of ours is ours.
    """
    if name in METHODS:
        return METHODS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        offered = {point.name: point for point in entry_points(group="wise_atta.methods")}
        if name not in offered:
            raise errors.unknown("method", name, [*METHODS, *offered])
        module, attribute = offered[name].module, offered[name].attr
    if not module or not attribute:
        raise errors.UnknownName(f"method {name!r}: a method of your own is named as package.module:factory")
    try:
        make = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise errors.UnknownName(f"method {name!r} cannot be loaded from {module}:{attribute}: {error}") from error
    if not callable(make):
        raise errors.BadConfig(f"method {name!r} is a {type(make).__name__}: name a function that returns a Method")
    return make


def get(name: str, **options: Any) -> Method:
    """A method by its name.

    >>> get("tent", lr=1e-3).name
    'tent'
    """
    make = factory(name)
    takes = inspect.signature(make).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in takes):
        check_known(name, options, options_of(make))
    try:
        method = make(**options)
    except TypeError as error:
        raise errors.BadConfig(f"method {name!r}: {error}") from error
    if not isinstance(method, Method):
        raise errors.BadConfig(f"method {name!r} gave a {type(method).__name__}: a factory returns a Method")
    return method
