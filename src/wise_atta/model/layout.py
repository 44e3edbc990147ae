"""Layout: which tensors of a module a specification means, and where they lie in one flat vector of values."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from wise_atta import errors

# By group: one tensor each, or the whole group as a slice of a flat vector.
Gradients: TypeAlias = Mapping[str, Sequence[Tensor] | Tensor]

Spec: TypeAlias = str | Sequence[str]

# Offsets in a flat vector are multiples of this, so that every view starts on a 256-byte boundary (float32).
_ALIGN = 64


@dataclass(eq=False)
class Version:
    """One immutable set of values for the adapted tensors: a flat vector and named views of it."""

    flat: Tensor
    layout: Layout
    grad: bool = True
    _tensors: dict[int, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    _whole: dict[int, Tensor] = field(default_factory=dict, repr=False)

    @property
    def whole(self) -> Tensor:
        """All values as one leaf, which a recorded network takes in place of the views."""
        if not self._whole:
            self._whole.setdefault(0, self.flat.detach().requires_grad_(True))
        return self._whole[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The views, made when they are first asked for: a recorded network takes the vector alone."""
        if not self._tensors:
            views = self.layout.views(self.flat)
            if self.grad:
                for tensor in views.values():
                    tensor.requires_grad_(True)
            # Of two threads that ask at once, both get the same leaves.
            self._tensors.setdefault(0, views)
        return self._tensors[0]


def wide(values: Tensor) -> Tensor:
    """Values that others add up to: those of half precision in float32, others as they are."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


class Layout:
    """Where each adapted tensor lies in the flat vector, and which slice each group of them takes."""

    def __init__(self, groups: Mapping[str, Sequence[str]], shapes: Mapping[str, torch.Size]) -> None:
        self.groups = {group: tuple(names) for group, names in groups.items()}
        self.shapes = {name: shapes[name] for names in groups.values() for name in names}
        self.slices: dict[str, slice] = {}
        self.total = 0
        self._pieces: list[int] = []
        for group, names in groups.items():
            start = self.total
            for name in names:
                values = shapes[name].numel()
                padding = -values % _ALIGN
                self._pieces += [values, padding] if padding else [values]
                self.total += values + padding
            self.slices[group] = slice(start, self.total)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of a flat vector, cut loose from its graph."""
        # One call cuts values and padding apart: a vector needs no view of its own.
        parts = iter(torch.split_with_sizes(flat.detach(), self._pieces) if self._pieces else ())
        views: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            part = next(parts)
            views[name] = part if len(shape) == 1 else part.view(shape)
            if shape.numel() % _ALIGN:
                next(parts)
        return views

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new flat vector with the values of these, among others; padding is zero."""
        first = tensors[next(iter(self.shapes), next(iter(tensors)))]
        flat = torch.zeros(self.total, dtype=first.dtype, device=first.device)
        for name, view in self.views(flat).items():
            view.copy_(tensors[name].detach())
        return flat


# -- which tensors ---------------------------------------------------------------------------------------------------


def select(model: nn.Module, head: str, spec: Spec) -> tuple[str, ...]:
    """The names of the parameters that a specification means, in the model's order. `head` is the name of a layer."""
    terms = [spec] if isinstance(spec, str) else list(spec)
    chosen: set[str] = set()
    for term in terms:
        if term.startswith("!"):
            chosen -= _match(model, head, term[1:])
            continue
        names = _match(model, head, term)
        if not names:
            raise errors.NothingToAdapt(_nothing(model, term))
        chosen |= names
    if not chosen:
        raise errors.NothingToAdapt(f"{terms} takes away everything that it names, so nothing is left to adapt")
    return tuple(name for name, p in model.named_parameters() if name in chosen and p.is_floating_point())


def _match(model: nn.Module, head: str, term: str) -> set[str]:
    # A tied parameter can be meant by any of its names; the layout knows it by its first.
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    if term == "all" or (term == "head" and not head):  # a linear layer by itself is all head
        return set(names.values())
    if term == "norm":
        return _norms(model, names)
    if term == "last-norm":
        return _last_stage(model, _norms(model, names))
    # "head" is the head wherever it is; a block that happens to have that name can still be meant by what is in it.
    of_head = term == "head" or term.startswith("head.")
    meant = _named((head + term.removeprefix("head")).removeprefix("."), names) if of_head else set[str]()
    return meant or _named(term, names)


def _norms(model: nn.Module, names: Mapping[str, str]) -> set[str]:
    """The tensors of normalisation layers."""
    return {
        names[f"{path}.{key}" if path else key]
        for path, module in model.named_modules()
        if _is_norm(module)
        for key, _ in module.named_parameters(recurse=False)
    }


def _named(term: str, names: Mapping[str, str]) -> set[str]:
    """The tensors of that name, of a block of that name, or that a glob means."""
    return {own for n, own in names.items() if n == term or n.startswith(term + ".") or fnmatch.fnmatchcase(n, term)}


def _last_stage(model: nn.Module, norms: set[str]) -> set[str]:
    """Norm tensors of `layer4` (ResNets), else of the last quarter of the norm layers; at least one layer is left.

    In a transformer of N blocks with one final norm that quarter is the last N/4 blocks and the final norm.
    """
    last = {name for name in norms if "layer4" in name.split(".")}
    if last:
        return last
    ordered = [name for name, _ in model.named_parameters() if name in norms]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in ordered))
    left = max(len(layers) * 3 // 4, 1)
    return {name for name in ordered if name.rpartition(".")[0] in layers[left:]}


def _nothing(model: nn.Module, term: str) -> str:
    if term == "norm":
        return (
            "the model has no normalisation layer with affine parameters, so there is nothing to adapt. "
            "Adapt other tensors instead, for example adapt='head' or the name of a block (for wise and hiltta "
            "norm='head')"
        )
    blocks = ", ".join(name for name, _ in model.named_children())
    return f"no parameter of the model matches {term!r}. Blocks of this model: {blocks or 'none'}"


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, _BatchNorm | nn.LayerNorm | nn.GroupNorm | _InstanceNorm):
        return True
    # Norm layers of other libraries (RMSNorm and the like) go by their name and a vector of weights.
    if "norm" not in type(module).__name__.lower():
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 1
