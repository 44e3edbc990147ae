"""Which constants did others publish for which benchmark? Named presets, over which explicit arguments win."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeAlias

from wise_atta import errors
from wise_atta.methods.method import Method

P = ParamSpec("P")

Table: TypeAlias = dict[str, Mapping[str, object]]


def published(*, imagenet: Mapping[str, object], cifar10: Mapping[str, object]) -> Table:
    """Preset → argument → value, where the public configurations have one for all four of ImageNet's benchmarks.

    Examples
    --------
    >>> [*published(imagenet={"lr": 2.5e-4}, cifar10={"lr": 1e-3})]
    ['imagenet-c', 'imagenet-r', 'imagenet-k', 'imagenet-a', 'cifar10-c']
    """
    return {f"imagenet-{which}": imagenet for which in "crka"} | {"cifar10-c": cifar10}


def presets(table: Table) -> Callable[[Callable[P, Method]], Callable[P, Method]]:
    """Let a method's `preset=` fill in the arguments that were not given.

    Examples
    --------
    >>> from wise_atta.methods import eta
    >>> eta(preset="cifar10-c").update.lr, eta(preset="cifar10-c", lr=0.1).update.lr
    (0.001, 0.1)
    """

    def decorate(make: Callable[P, Method]) -> Callable[P, Method]:
        @functools.wraps(make)
        def chosen(*args: P.args, **kwargs: P.kwargs) -> Method:
            name = kwargs.get("preset")
            if name is None:
                return make(*args, **kwargs)
            if not isinstance(name, str) or name not in table:
                raise errors.unknown("preset", str(name), table)
            for argument, value in table[name].items():
                kwargs.setdefault(argument, value)
            return make(*args, **kwargs)

        return chosen

    return decorate
