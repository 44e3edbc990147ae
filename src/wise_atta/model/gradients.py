"""Gradients of a loss in the tensors of a version."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from wise_atta import errors
from wise_atta.model.layout import Version


def gradients_of(
    loss: Tensor, version: Version, names: Sequence[str], slope: Tensor | None, retain_graph: bool, whole: bool
) -> dict[str, Tensor]:
    """∂loss/∂tensor by name. `whole` says that the loss, or a part of it, may come from a recorded network."""
    if not loss.requires_grad:
        raise errors.NothingToAdapt(
            f"the logits do not depend on the adapted tensors ({names[0]}, …): does the model run them under "
            "torch.no_grad(), or detach what they give? Leave that out, or adapt tensors that come after it, for "
            "example adapt='head' (for wise and hiltta norm='head')"
        )
    if version._whole and whole:
        return _gradients_of_whole(loss, version, names, slope, retain_graph)
    tensors = [version.tensors[name] for name in names]
    try:
        gradients = torch.autograd.grad(
            loss, tensors, slope, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
        )
    except CheckpointError as error:
        raise errors.BadConfig(
            "the model recomputes activations in the backward by itself, when its tensors may be others "
            "already: turn that off in the model and use checkpointing=True, or name the blocks there"
        ) from error
    return dict(zip(names, gradients, strict=True))


def _gradients_of_whole(
    loss: Tensor, version: Version, names: Sequence[str], slope: Tensor | None, retain_graph: bool
) -> dict[str, Tensor]:
    # A recorded network depends on the vector, what is computed beside it on the views.
    apart = [version.tensors[name] for name in names] if version._tensors else []
    leaves = [version.whole, *apart]
    whole, *gradients = torch.autograd.grad(loss, leaves, slope, retain_graph=retain_graph, allow_unused=True)
    by_name = version.layout.views(torch.zeros_like(version.flat) if whole is None else whole)
    for name, gradient in zip(names, gradients, strict=False):
        by_name[name] = by_name[name] if gradient is None else by_name[name] + gradient
    return by_name
