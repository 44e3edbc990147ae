"""Which methods are there? One file each, each a short composition of when, what and how."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from wise_atta import errors
from wise_atta.methods.bn import bn
from wise_atta.methods.method import Method
from wise_atta.methods.source import source
from wise_atta.methods.tent import tent
from wise_atta.methods.wise import wise

__all__ = ["METHODS", "Method", "bn", "get", "options", "source", "tent", "wise"]

METHODS: dict[str, Callable[..., Method]] = {"source": source, "bn": bn, "tent": tent, "wise": wise}


def options(name: str) -> list[str]:
    """The names of the options that a method takes.

    >>> "lr" in options("tent"), "ratio" in options("tent")
    (True, False)
    """
    if name not in METHODS:
        raise errors.unknown("method", name, METHODS)
    return list(inspect.signature(METHODS[name]).parameters)


def get(name: str, **options: Any) -> Method:
    """A method by its name.

    >>> get("tent", lr=1e-3).name
    'tent'
    """
    if name not in METHODS:
        raise errors.unknown("method", name, METHODS)
    try:
        return METHODS[name](**options)
    except TypeError as error:
        raise errors.BadConfig(f"method {name!r}: {error}") from error
