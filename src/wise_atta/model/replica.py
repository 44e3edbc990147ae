"""Replicas: structural copies of the user's module that share its frozen tensors, each used by one thread at a time."""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta.engine import moments, precision, recomputing
from wise_atta.engine.first_layer import FirstLayer
from wise_atta.engine.in_place import InPlace
from wise_atta.model.batch_norms import BatchNorms
from wise_atta.model.copies import copy_structure
from wise_atta.model.run_options import Convert, RunOptions


class Replica:
    """A structural copy of the user's module: its own module objects, the user's frozen tensors."""

    def __init__(self, model: nn.Module, head: str, adapted: Collection[str], options: RunOptions) -> None:
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
        self._widens = options.precision == "bf16"
        self.head.register_forward_pre_hook(self._keep_features, with_kwargs=True)
        self.norms = BatchNorms(self.module, options)
        for norm in self.norms.layers:
            norm.num_batches_tracked = None
            norm.track_running_stats = True
            if isinstance(norm, nn.SyncBatchNorm):
                # As a plain layer: what other processes predict on at the same time is none of this stream's.
                norm.forward = types.MethodType(_BatchNorm.forward, norm)  # type: ignore[method-assign]
        # A tied parameter has several places and one name: the first.
        first_name: dict[int, str] = {}
        self.places: list[tuple[dict[str, Any], str, str, Convert | None]] = []
        for path, module in modules.items():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = first_name.setdefault(id(parameter), f"{path}.{key}" if path else key)
                convert = options.conversion(module, self.head, parameter)
                if name in adapted:
                    self.places.append((module._parameters, key, name, convert))
                elif convert is not None:
                    # By place, not by name: a tied tensor may be needed in two precisions.
                    narrow = options.frozen(f"{path}.{key}", parameter.data, convert)
                    module._parameters[key] = nn.Parameter(narrow, requires_grad=False)
        self._set_up(modules, options)

    def _adapts(self, layer: nn.Module) -> bool:
        return layer is self.head or any(own is layer._parameters for own, *_ in self.places)

    def _set_up(self, modules: Mapping[str, nn.Module], options: RunOptions) -> None:
        self.first = FirstLayer(self.module, self._adapts, options.compile)
        self.in_place = InPlace(self.module, options.compile)
        if self._widens:
            precision.without_autocast(self.head, options.device)
        if options.quick and not options.compile:
            for norm in self.norms.layers:
                moments.quicken(norm) if options.reorders else precision.straight(norm)
        for name in options.blocks:
            recomputing.recompute(modules[name], lambda: None if self.lease is None else self.lease())
        compiles = options.compile
        self.run: Callable[..., Any] = torch.compile(self.module, dynamic=False) if compiles else self.module

    def _keep_features(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._widens:
            args = tuple(map(precision.widen, args))
            kwargs = {name: precision.widen(value) for name, value in kwargs.items()}
        self.features = args[0] if args else next(iter(kwargs.values()))
        return args, kwargs

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the adapted tensors take these values."""
        for parameters, key, name, convert in self.places:
            parameters[key] = tensors[name] if convert is None else convert(tensors[name])


class Replicas:
    """The replicas in which the same tensors adapt: as many as there were forwards at one time."""

    def __init__(self, make: Callable[[], Replica]) -> None:
        self.make = make
        self.free = [make()]
        # A leased replica comes back when its graph dies, which may be while this thread holds the lock.
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def take(self) -> Iterator[Replica]:
        """A replica that nobody else uses until the end of this."""
        with self._lock:
            replica = self.free.pop() if self.free else None
        if replica is None:
            replica = self.make()
        try:
            yield replica
        finally:
            replica.features = None
            with self._lock:
                self.free.append(replica)
