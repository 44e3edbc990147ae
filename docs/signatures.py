"""Which type has each of several parameters that a docstring explains together? Each its own, not that of the first."""

from __future__ import annotations

from typing import Any

import griffe


class Signatures(griffe.Extension):
    """Gives every documented parameter the type and default of its own, from the signature or from the field."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._mend(pkg)

    def _mend(self, thing: griffe.Object) -> None:
        if isinstance(thing, griffe.Class | griffe.Function) and thing.docstring is not None:
            for section in thing.docstring.parsed:
                if isinstance(section, griffe.DocstringSectionParameters):
                    for parameter in section.value:
                        _own(thing, parameter)
        for member in thing.members.values():
            if isinstance(member, griffe.Object):
                self._mend(member)


def _own(thing: griffe.Class | griffe.Function, parameter: griffe.DocstringParameter) -> None:
    if parameter.name in thing.parameters:
        signature = thing.parameters[parameter.name]
        parameter.annotation, parameter.value = signature.annotation, _text(signature.default)
        return
    # Fields of pydantic models are in no signature.
    field = thing.members.get(parameter.name)
    if isinstance(field, griffe.Attribute):
        parameter.annotation = field.annotation
        parameter.value = None if isinstance(field.value, griffe.ExprCall) else _text(field.value)


def _text(value: str | griffe.Expr | None) -> str | None:
    return None if value is None else str(value)
