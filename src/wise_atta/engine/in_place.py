"""Activations in place: where there is no graph, and not where there is one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

# Their backward needs their input, which in place is copied first: one more pass over the memory.
_NEED_INPUT = (nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Mish, nn.SiLU, nn.Threshold)
_MAKE_NEW = (_ConvNd, _BatchNorm, nn.Linear, nn.GroupNorm, nn.LayerNorm)


class InPlace:
    """Activations that are in place without a graph, and not with one, where they would copy their input.

    Only those of timm's norm layers and those that follow a layer in a plain sequence, and stand nowhere else: there
    nobody else sees their input, and what they return is used.
    """

    def __init__(self, module: nn.Module, compiled: bool) -> None:
        # What is compiled has no such copies, and would be compiled again at every change.
        owners = [] if compiled else list(module.modules())
        places = Counter(child for owner in owners for child in owner._modules.values())
        self._layers = [
            vars(layer)
            for owner in owners
            for before, layer in self._pairs(owner)
            if isinstance(before, _MAKE_NEW) and isinstance(layer, _NEED_INPUT) and layer.inplace and places[layer] == 1
        ]
        self._graph = False

    @staticmethod
    def _pairs(owner: nn.Module) -> Iterable[tuple[nn.Module, nn.Module]]:
        if type(owner).__module__ == "timm.layers.norm_act":
            return ((owner, child) for child in owner.children())
        return itertools.pairwise(owner) if type(owner) is nn.Sequential else ()

    def set(self, graph: bool) -> None:
        """What follows keeps a graph, or does not."""
        if graph != self._graph:
            self._graph = graph
            for layer in self._layers:
                layer["inplace"] = not graph
