"""Replicas: structural copies of the user's module that share its frozen tensors, and how they run."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta.engine import moments, precision, recomputing
from wise_atta.engine.first_layer import FirstLayer
from wise_atta.engine.in_place import InPlace
from wise_atta.engine.precision import Precision
from wise_atta.model.copies import copy_structure


class Replica:
    """A structural copy of the user's module: its own module objects, the user's frozen tensors."""

    def __init__(self, model: nn.Module, head: str, adapted: Sequence[str], how: RunOptions) -> None:
        self.module = copy_structure(model)
        self.module.eval()
        for part in self.module.modules():
            if "grad_checkpointing" in vars(part):
                # timm's own, in eval mode too: blocks would run again after they were bound to another version.
                vars(part)["grad_checkpointing"] = False
        modules = dict(self.module.named_modules())
        self.head = modules[head]
        self.features: Tensor | None = None
        self.lease: weakref.ref[recomputing.Lease] | None = None
        self._widens = how.precision == "bf16"
        self.head.register_forward_pre_hook(self._keep_features, with_kwargs=True)
        self.norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm)]
        # Layers without running statistics (None) always normalise by the batch.
        self.source_buffers = [(norm.running_mean, norm.running_var) for norm in self.norms]
        for norm in self.norms:
            norm.num_batches_tracked = None
            norm.track_running_stats = True
            if isinstance(norm, nn.SyncBatchNorm):
                # As a plain layer: what other processes predict on at the same time is none of this stream's.
                norm.forward = types.MethodType(_BatchNorm.forward, norm)  # type: ignore[method-assign]
        wanted = set(adapted)
        # A tied parameter has several places and one name: the first.
        first_name: dict[int, str] = {}
        self.places: list[tuple[dict[str, Any], str, str, Convert | None]] = []
        for path, module in modules.items():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = first_name.setdefault(id(parameter), f"{path}.{key}" if path else key)
                convert = how.conversion(module, self.head, parameter)
                if name in wanted:
                    self.places.append((module._parameters, key, name, convert))
                elif convert is not None:
                    # By place, not by name: a tied tensor may be needed in two precisions.
                    narrow = how.frozen(f"{path}.{key}", parameter.data, convert)
                    module._parameters[key] = nn.Parameter(narrow, requires_grad=False)
        self._set_up(modules, how)

    def _adapts(self, layer: nn.Module) -> bool:
        return layer is self.head or any(own is layer._parameters for own, *_ in self.places)

    def _set_up(self, modules: Mapping[str, nn.Module], how: RunOptions) -> None:
        self.first = FirstLayer(self.module, self._adapts, how.compile)
        self.in_place = InPlace(self.module, how.compile)
        if self._widens:
            precision.without_autocast(self.head, how.device)
        if how.quick and not how.compile:
            for norm in self.norms:
                moments.quicken(norm) if how.reorders else precision.straight(norm)
        for name in how.blocks:
            recomputing.recompute(modules[name], lambda: None if self.lease is None else self.lease())
        self.run: Callable[..., Any] = torch.compile(self.module, dynamic=False) if how.compile else self.module

    def _keep_features(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._widens:
            args, kwargs = (
                tuple(map(precision.widen, args)),
                {name: precision.widen(value) for name, value in kwargs.items()},
            )
        self.features = args[0] if args else next(iter(kwargs.values()))
        return args, kwargs

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        for parameters, key, name, convert in self.places:
            parameters[key] = tensors[name] if convert is None else convert(tensors[name])


Convert: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class RunOptions:
    """How replicas run: in which precision and memory format, compiled, with which blocks recomputed.

    Frozen tensors that must be converted for it are converted once, for all replicas.
    """

    device: torch.device
    precision: Precision | None
    channels_last: bool
    compile: bool
    blocks: tuple[str, ...]
    _frozen: dict[str, Tensor] = field(default_factory=dict)

    @property
    def quick(self) -> bool:
        return self.precision is not None or self.channels_last or self.compile

    @property
    def reorders(self) -> bool:
        """Whether batch statistics are summed in an order that suits the CPU. Never unless something was asked for."""
        return self.quick and self.device.type == "cpu" and not self.compile

    def conversion(self, module: nn.Module, head: nn.Module, parameter: Tensor) -> Convert | None:
        """What is done to a parameter before the layer uses it, if anything."""
        narrow = self.precision == "bf16" and parameter.is_floating_point() and not precision.kept_in_fp32(module, head)
        turn = self.channels_last and parameter.dim() == 4
        if not narrow and not turn:
            return None

        def convert(tensor: Tensor) -> Tensor:
            tensor = tensor.bfloat16() if narrow else tensor
            return precision.channels_last(tensor) if turn else tensor

        return convert

    def frozen(self, place: str, tensor: Tensor, convert: Convert) -> Tensor:
        if place not in self._frozen:
            self._frozen[place] = convert(tensor)
        return self._frozen[place]
