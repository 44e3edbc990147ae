"""What the references share: entropy, the tensors that adapt, batch statistics, one step, a seed for each draw."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

# The class of sample i in batch t, batches counted from 1.
Answer = Callable[[int, int], int]
# Tensors → what takes steps on them, such as partial(torch.optim.SGD, lr=1e-3).
Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def entropy(logits: Tensor) -> Tensor:
    """H(p) = −Σ_c p_c·log p_c of each row, p = softmax(z)."""
    log_p = logits.log_softmax(dim=1)
    return -(log_p.exp() * log_p).sum(dim=1)


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a name lies in one of the modules: blocks.1 holds blocks.1.norm, not blocks.10."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def norm_tensors(model: nn.Module, without: Iterable[str] = ()) -> list[nn.Parameter]:
    """Weights and biases of the normalisation layers, except those inside the modules `without`."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
    layers = [layer for name, layer in model.named_modules() if isinstance(layer, kinds) and not inside(name, without)]
    return [p for layer in layers for p in layer.parameters()]


def use_batch_statistics(model: nn.Module) -> None:
    """Evaluation mode, but every BatchNorm layer normalises by mean and biased variance of the batch it is given."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean = module.running_var = None


def look(model: nn.Module, x: Tensor, head: str) -> tuple[Tensor, Tensor]:
    """Features, which are what the module named `head` is given, and logits."""
    seen: list[Tensor] = []
    hook = model.get_submodule(head).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits = model(x)
    hook.remove()
    return seen[0], logits


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of the optimizer down the gradient of the loss."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, momentum: float) -> None:
    """θ̄ ← momentum·θ̄ + (1 − momentum)·θ, over all parameters."""
    for slow, p in zip(average.parameters(), model.parameters(), strict=True):
        slow.copy_(momentum * slow + (1 - momentum) * p)


def chance(*key: object) -> torch.Generator:
    """A generator seeded by its key."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
