"""Recipes: how a method makes its parts, and which part each option that it takes by name belongs to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

from wise_atta import errors, what
from wise_atta.methods.method import Method, asking
from wise_atta.when import POLICIES, Policy

Table: TypeAlias = dict[str, Mapping[str, object]]
Parameters: TypeAlias = dict[str, inspect.Parameter]


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a method makes a part of itself, where it is given none.

    Parameters
    ----------
    make, name
        A class or a function, and its name where it is a selector that has one.
    takes
        The options of the part.
    names
        What options of the part are called as options of the method, where that differs.
    defaults
        Options that the method sets, or recipes of parts within the part.
    """

    make: Callable[..., Any]
    name: str | None
    takes: Parameters
    names: Mapping[str, str]
    defaults: Mapping[str, Any]

    @property
    def options(self) -> Parameters:
        """The options of the part and of parts within, by their names in the method."""
        own, within = Parameters(), Parameters()
        for name, parameter in self.takes.items():
            default = self.defaults.get(name, parameter.default)
            if isinstance(default, Recipe):
                within |= default.options
            else:
                option = self.names.get(name, name)
                own[option] = parameter.replace(name=option, default=default, kind=parameter.KEYWORD_ONLY)
        return within | own

    def __call__(self, options: Mapping[str, Any]) -> Any:
        """The part, made with those of the options that it takes."""
        values = dict[str, Any]()
        for name in self.takes:
            default, option = self.defaults.get(name), self.names.get(name, name)
            if isinstance(default, Recipe):
                values[name] = default(options)
            elif option in options:
                values[name] = options[option]
            elif name in self.defaults:
                values[name] = default
        return self.make(**values)


def recipe(
    make: str | Callable[..., Any], *, rest: type | None = None, names: Mapping[str, str] | None = None, **defaults: Any
) -> Any:
    """A default for an argument of a method that is a part: see `Recipe`.

    `make` may be the name of a selector; `rest` is a class whose options it takes as well, where it passes them on.
    """
    made = what.SELECTORS[make] if isinstance(make, str) else make
    takes = ({} if rest is None else _takes(rest)) | _takes(made)
    return Recipe(made, make if isinstance(make, str) else None, takes, names or {}, defaults)


def options_of(method: Callable[..., Method]) -> Parameters:
    """Everything that a method takes by name, the options of its parts and of every policy included."""
    takes = dict(inspect.signature(method).parameters)
    named = {name: one for name, one in takes.items() if one.kind is not one.VAR_KEYWORD}
    policies = POLICIES.values() if len(named) < len(takes) else ()
    return {name: one for policy in policies for name, one in inspect.signature(policy).parameters.items()} | named


def check_known(method: str, options: Iterable[str], takes: Mapping[str, Any]) -> None:
    """Refuse an option that a method does not take."""
    for option in options:
        if option not in takes:
            raise errors.unknown(f"option of method {method!r}:", option, takes)


def published(table: Table, **asks: Any) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
    """Let a method take the options of its parts by name, and `preset=` fill in those that are not given.

    With defaults for `asking` the method takes its options too, and composes what it gives.

    Examples
    --------
    >>> from wise_atta.methods import eta
    >>> eta(preset="cifar10-c").update.lr, eta(preset="cifar10-c", lr=0.1).update.lr
    (0.001, 0.1)
    """

    def decorate(compose: Callable[..., Method]) -> Callable[..., Method]:
        own = _own(compose, asks)
        recipes = {name: one.default for name, one in own.items() if isinstance(one.default, Recipe)}
        inside = {option: one for recipe in recipes.values() for option, one in recipe.options.items()}

        @functools.wraps(compose)
        def method(**options: Any) -> Method:
            takes = options_of(method)
            check_known(compose.__name__, options, takes)
            _check_ratio(options, takes)
            filled = _filled(table, options)
            values = {name: value for name, value in filled.items() if name in own or name not in inside}
            values |= _parts(filled, recipes, {option for option in options if option not in own})
            if asks:
                composed = {name: values.pop(name) for name in _takes(compose) if name in values}
                values = composed | asking(**asks | values)
            return compose(**values)

        # The method's own arguments, and the options of its parts beside them.
        shown = {name: one.replace(default=recipes[name].name) if name in recipes else one for name, one in own.items()}
        signature = inspect.Signature(sorted((inside | shown).values(), key=lambda one: one.kind))
        method.__signature__ = signature  # type: ignore[attr-defined]  # as `inspect` has it
        return method

    return decorate


def imagenet_and_cifar(*, imagenet: Mapping[str, object], cifar10: Mapping[str, object]) -> Table:
    """Preset → option → value, where the public configurations have one for all four of ImageNet's benchmarks.

    Examples
    --------
    >>> [*imagenet_and_cifar(imagenet={"lr": 2.5e-4}, cifar10={"lr": 1e-3})]
    ['imagenet-c', 'imagenet-r', 'imagenet-k', 'imagenet-a', 'cifar10-c']
    """
    return {f"imagenet-{which}": imagenet for which in "crka"} | {"cifar10-c": cifar10}


def _own(compose: Callable[..., Method], asks: Mapping[str, Any]) -> Parameters:
    """What a method takes itself, with defaults for what it asks."""
    if not asks:
        return dict(inspect.signature(compose).parameters)
    takes = _takes(compose) | dict(inspect.signature(asking).parameters)
    return {name: one.replace(default=asks.get(name, one.default)) for name, one in takes.items()}


def _filled(table: Table, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, and those of the preset that are not given."""
    preset = options.get("preset")
    if preset is not None and preset not in table:
        raise errors.unknown("preset", str(preset), table)
    return {**table.get(preset or "", {}), **options}


def _takes(make: Callable[..., Any]) -> Parameters:
    return {name: one for name, one in inspect.signature(make).parameters.items() if one.kind is not one.VAR_KEYWORD}


def _parts(options: Mapping[str, Any], recipes: Mapping[str, Recipe], inner: Set[str]) -> dict[str, Any]:
    """Each part as it is given, or named, or made by its recipe; `inner` are options that were given for parts."""
    parts, homeless = dict[str, Any](), dict[str, set[str]]()
    for name, recipe in recipes.items():
        part = options.get(name)
        if part is None or part == recipe.name:
            parts[name] = recipe(options)
        elif not isinstance(part, str):
            parts[name], homeless[name] = part, inner & recipe.options.keys()
        elif recipe.name is None:
            raise errors.BadConfig(f"{name}={part!r}: give an object, such as {recipe.make.__name__}(…), not a name")
        else:
            parts[name] = what.selector(part, seed=options.get("seed", 0))
    elsewhere = {option for name in recipes.keys() - homeless for option in recipes[name].options}
    for name, inner in homeless.items():
        if inner - elsewhere:
            raise errors.BadConfig(f"{', '.join(sorted(inner - elsewhere))}: give these to the {name} object itself")
    return parts


def _check_ratio(options: Mapping[str, Any], takes: Parameters) -> None:
    """Refuse a ratio that the policy would not keep."""
    ratio, policy = options.get("ratio"), options.get("policy")
    if ratio is None:
        return
    if isinstance(policy, Policy):
        raise errors.BadConfig(f"ratio={ratio}: give it to the policy object itself, whose own ratio counts")
    labels = options.get("labels", takes["labels"].default if "labels" in takes else None)
    if policy == "always" and ratio != labels:
        asked = "all that its selector picks" if labels is None else f"{labels} (labels) of every batch"
        raise errors.BadConfig(
            f"ratio is {float(ratio):g}, but policy 'always' asks for {asked}: leave the ratio out, or take a policy "
            "that keeps to it, such as 'uniform'"
        )
