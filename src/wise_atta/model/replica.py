"""Replicas: structural copies of the user's module that share its frozen tensors, each used by one thread at a time."""

from __future__ import annotations

import contextlib
import copy
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wise_atta import errors
from wise_atta.engine import layers, moments, precision
from wise_atta.engine.precision import Convert, RunOptions
from wise_atta.model.statistics import BatchNorms


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
        self.lease: weakref.ref[layers.Lease] | None = None
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
                    place = f"{path}.{key}"
                    if place not in options.frozen:
                        options.frozen[place] = convert(parameter.data)
                    module._parameters[key] = nn.Parameter(options.frozen[place], requires_grad=False)
        self._set_up(modules, options)

    def _set_up(self, modules: Mapping[str, nn.Module], options: RunOptions) -> None:
        adapting = [self.head._parameters, *(own for own, *_ in self.places)]
        self.first = layers.FirstLayer(
            self.module, lambda layer: any(own is layer._parameters for own in adapting), options.compile
        )
        self.in_place = layers.in_place(self.module, options.compile)
        if self._widens:
            precision.without_autocast(self.head, options.device)
        if options.quick and not options.compile:
            for norm in self.norms.layers:
                moments.quicken(norm) if options.reorders else precision.straight(norm)
        for name in options.blocks:
            layers.recompute(modules[name], lambda: None if self.lease is None else self.lease())
        compiles = options.compile
        self.run: Callable[..., Any] = torch.compile(self.module, dynamic=False) if compiles else self.module

    def _keep_features(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._widens:
            args = tuple(map(precision.widen, args))
            kwargs = {name: precision.widen(value) for name, value in kwargs.items()}
        self.features = args[0] if args else next(iter(kwargs.values()))
        return args, kwargs


class Replicas:
    """The replicas in which the same tensors adapt: as many as there were forwards at one time."""

    def __init__(self, make: Callable[[], Replica]) -> None:
        self.make = make
        self.free = [make()]
        # A leased replica comes back when its graph dies, which may be while this thread holds the lock.
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def take(self, tensors: Mapping[str, Tensor]) -> Iterator[Replica]:
        """A replica whose adapted tensors take these values, and that nobody else uses until the end of this."""
        with self._lock:
            replica = self.free.pop() if self.free else None
        if replica is None:
            replica = self.make()
        try:
            for parameters, key, name, convert in replica.places:
                parameters[key] = tensors[name] if convert is None else convert(tensors[name])
            yield replica
        finally:
            replica.features = None
            with self._lock:
                self.free.append(replica)


def copy_structure(model: nn.Module) -> nn.Module:
    """A copy of the module tree that shares every tensor with it.

    Parameters are seen through detached twins, which use the same memory but never collect a gradient.
    """
    shared: dict[int, Any] = {
        id(t): nn.Parameter(t.detach(), requires_grad=False) if isinstance(t, nn.Parameter) else t
        for module in model.modules()
        for t in _tensors(vars(module))
    }
    return _copied(model, shared)


def copy_whole(model: nn.Module) -> nn.Module:
    """A copy of the module with tensors of its own; those that a forward left in it are cut loose from their graph."""
    tensors = [tensor for module in model.modules() for tensor in _tensors(vars(module))]
    return _copied(model, {id(t): t.detach().clone() for t in tensors if not t.is_leaf})


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors that a module keeps in its attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _copied(model: nn.Module, known: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, known)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError) as error:
        raise errors.BadConfig(
            f"the model cannot be copied: {error}. Keep what cannot be (locks, open files, …) out of the module, or "
            "give it a __deepcopy__"
        ) from error
