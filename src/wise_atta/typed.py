"""What was typed: `NAME=VALUE` pairs and lists with commas, read the same way by every command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from wise_atta import errors

T = TypeVar("T")


def value(text: str) -> Any:
    """JSON where it is JSON, otherwise text.

    >>> value("1e-3"), value("true"), value("margin")
    (0.001, True, 'margin')
    """
    try:
        return json.loads(text)
    except ValueError:
        return text


def pairs(flag: str, texts: Sequence[str], read: Callable[[str], T] = value) -> dict[str, T]:
    """Names and values of a flag that is given once for each.

    >>> pairs("--option", ["lr=1e-3", "selector=margin"])
    {'lr': 0.001, 'selector': 'margin'}
    >>> pairs("--grid", ["lr=1e-3,1e-2"], lambda text: listed("--grid", text, value))
    {'lr': [0.001, 0.01]}
    >>> pairs("--option", ["lr"])
    Traceback (most recent call last):
    wise_atta.errors.BadConfig: --option lr: write NAME=VALUE
    """
    values: dict[str, T] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if not equals or not name:
            raise errors.BadConfig(f"{flag} {text}: write NAME=VALUE")
        values[name] = read(rest)
    return values


def listed(flag: str, text: str, kind: Callable[[str], T]) -> list[T]:
    """What stands between commas, one at least.

    >>> listed("--seeds", "0, 41,58", int)
    [0, 41, 58]
    >>> listed("--seeds", "0,one", int)
    Traceback (most recent call last):
    wise_atta.errors.BadConfig: --seeds 0,one: 'one' is no whole number
    """
    values = []
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            values.append(kind(part))
        except ValueError as error:
            raise errors.BadConfig(f"{flag} {text}: {part!r} is no {'whole ' * (kind is int)}number") from error
    if not values:
        raise errors.BadConfig(f"{flag}: at least one is needed, with commas between several")
    return values
