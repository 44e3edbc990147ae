"""Refusals: modules, options, inputs and outputs that cannot be worked with, each with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor, nn

from wise_atta import errors, signals
from wise_atta.engine.precision import Precision, RunOptions
from wise_atta.stream import Inputs, leaves, size

if TYPE_CHECKING:
    from wise_atta.model.weights import Weights


def check_module(model: nn.Module) -> nn.Module:
    """The module inside wrappers, if it can be copied and run."""
    if isinstance(model, torch.jit.ScriptModule):
        raise errors.BadConfig("a scripted module cannot be adapted: give the module it was made from")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return check_module(model.module)
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise errors.BadConfig("layers of the model have no shape yet: run it once on a batch, then adapt it")
    inner = getattr(model, "_orig_mod", None)
    return check_module(inner) if isinstance(inner, nn.Module) else model


def check_head(model: nn.Module, head: str | None) -> str:
    """The name of the layer that turns features into logits: the one that is named, or else the last linear one."""
    names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
    known = [name for name in names.values() if name]
    if head is not None:
        if head not in known:
            raise errors.HeadNotFound(str(errors.unknown("layer", head, known)))
        return head
    declared = getattr(model, "get_classifier", None)
    if callable(declared):
        layer = declared()
        if isinstance(layer, nn.Linear) and id(layer) in names:
            return names[id(layer)]
    linear: list[str] = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise errors.HeadNotFound(
            "the model has no linear layer, so no head was found. Name the layer that turns features into logits "
            f"with head='…'. Layers: {', '.join(known)}"
        )
    return linear[-1]


def check_classes(classes: Sequence[int] | None) -> Tensor | None:
    """The classes that can occur, as indices."""
    if classes is None:
        return None
    if len(set(classes)) != len(classes) or len(classes) < 2 or min(classes) < 0:
        raise errors.BadConfig("classes must be indices of the model's classes, at least two, none of them twice")
    return torch.as_tensor(list(classes), dtype=torch.long)


def check_options(options: RunOptions) -> None:
    """Refuse ways to run that do not exist here, or that exclude each other."""
    precision, graphs, compile = options.precision, options.graphs, options.compile
    if precision is not None and precision not in get_args(Precision):
        raise errors.unknown("precision", precision, get_args(Precision))
    if precision is not None and options.dtype != torch.float32:
        raise errors.BadConfig(f"precision={precision!r} needs a model in float32, this one is {options.dtype}")
    if graphs and options.device.type != "cuda":
        raise errors.BadConfig(
            f"graphs=True needs a CUDA device, the model is on {options.device}: move the model there first, or leave "
            "graphs out"
        )
    if options.blocks and (graphs or compile):
        raise errors.BadConfig(
            "checkpointing runs parts of the network again in the backward, which neither graphs nor compile know "
            "of: leave them out, or leave checkpointing out"
        )
    if compile and torch.__version__ < "2.5":  # versions, not texts: 2.11 is newer
        raise errors.BadConfig(
            f"compile=True needs torch 2.5 or newer, this is {torch.__version__}: it takes the adapted tensors for "
            "constants"
        )


def check_statistics(name: str, options: RunOptions) -> None:
    """Refuse a mode of statistics that a compiled network with BatchNorm layers cannot have."""
    if options.compile and name not in ("batch", "source"):
        raise errors.BadConfig(
            f"compile=True with BatchNorm layers needs statistics='batch' or 'source', not {name!r}: "
            "the others are computed between the layers"
        )


def no_logits(output: object, inputs: Inputs) -> errors.BadInput:
    """What a model returned instead of logits."""
    what = f"shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    alone = " for one sample: does it squeeze() the batch away? Late labels come one by one"
    return errors.BadInput(
        f"the model must return logits [n, C] or an object with .logits, not {what}{alone if size(inputs) == 1 else ''}"
    )


def check_classes_of(logits: Tensor, classes: Tensor | None) -> None:
    """Refuse a model with too few outputs."""
    if logits.shape[1] == 1:
        raise errors.BadInput(
            "the model gives one logit a sample, which leaves nothing to choose from: for two classes wrap it so "
            "that it returns two logits, 0 and that one"
        )
    if classes is not None and int(classes.max()) >= logits.shape[1]:
        raise errors.BadConfig(f"classes names class {int(classes.max())}, the model has {logits.shape[1]}")


@torch.no_grad()
def check_head_of(model: nn.Module, head: str, logits: Tensor, again: Tensor | None) -> bool:
    """Refuse a head that does not give the logits: selection and the head step would work on something else.

    `again` is what it gives for the features, if it was called. Whether all is well; NaN and Inf leave it open.
    """
    if again is not None:
        scale = logits.abs().max().clamp_min(1)
        if again.shape == logits.shape and ((again - logits).abs().max() <= 1e-3 * scale).item():
            return True
        if not logits.isfinite().all().item():
            return False
    outputs = logits.shape[1]
    fitting = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.out_features == outputs]
    if fitting == [head]:
        raise errors.HeadNotFound(
            f"the model does not return what layer {head!r} gives, its only linear layer with "
            f"{outputs} outputs. Leave out what follows it (a softmax, say), so that the model returns "
            "logits, or name the layer that does turn features into the logits with head='…'"
        )
    raise errors.HeadNotFound(
        f"layer {head!r} does not turn features into the logits. Name the layer that does with "
        f"head='…'. Linear layers with {outputs} outputs: {', '.join(fitting) or 'none'}"
    )


def all_finite(inputs: Inputs, *outputs: Tensor) -> Tensor:
    """Whether there is neither NaN nor Inf in a batch and in what the model made of it."""
    tensors = [*outputs, *(leaf for leaf in leaves(inputs) if leaf.is_floating_point())]
    finite = signals.all_finite(tensors[0]) if tensors else torch.ones((), dtype=torch.bool)
    for tensor in tensors[1:]:
        finite = finite & signals.all_finite(tensor)
    return finite


def not_finite(weights: Weights, inputs: Inputs) -> errors.NotFinite:
    """Where NaN or Inf in a batch or its logits come from, and what to do."""
    if not all_finite(inputs):
        return errors.NotFinite("the inputs hold NaN or Inf: clean them before they reach the model")
    if torch.equal(weights.live.flat, weights.source_flat()):
        return errors.NotFinite(
            "the logits hold NaN or Inf although the inputs do not, and the adapted tensors are the source's: the "
            "model itself gives them. To leave classes out, name the others with classes=… and mask none with -inf"
        )
    return errors.NotFinite(
        "the logits hold NaN or Inf although the inputs do not: if the source model is sound, the adapted tensors "
        "have diverged; call reset() and lower the learning rate"
    )
