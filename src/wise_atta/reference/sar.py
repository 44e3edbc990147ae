"""SAR: a sharpness-aware entropy step, and a return to the source near collapse (Niu et al., ICLR 2023)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from wise_atta.reference.common import Optimizers, entropy, norm_tensors, use_batch_statistics
from wise_atta.reference.toy import toy

# The public configuration for a ResNet on ImageNet-C: no Nesterov here. For a ViT the rate is 1e-3.
SGD = partial(torch.optim.SGD, lr=2.5e-4, momentum=0.9)

# The last stage, which does not adapt: of a ResNet, and of a ViT with twelve blocks.
RESNET_LAST = ("layer4",)
VIT_LAST = ("blocks.9", "blocks.10", "blocks.11", "norm")


@torch.no_grad()
def assign(tensors: list[nn.Parameter], values: list[Tensor]) -> None:
    for p, value in zip(tensors, values, strict=True):
        p.copy_(value)


@torch.no_grad()
def climb(tensors: list[nn.Parameter], gradient: tuple[Tensor, ...], rho: float) -> None:
    """θ' = θ + ρ·g/‖g‖, the norm over all tensors together."""
    length = torch.stack([g.norm() for g in gradient]).norm()
    for p, g in zip(tensors, gradient, strict=True):
        p.add_(rho * g / length)


def run(
    model: nn.Module,
    stream: Iterable[Tensor],
    *,
    frozen: tuple[str, ...] = RESNET_LAST,
    optimizer: Optimizers = SGD,
    fraction: float = 0.4,
    rho: float = 0.05,
    average: float = 0.9,
    restore_below: float = 0.2,
) -> Iterator[Tensor]:
    """Yields the logits of each batch, then descends the entropy from the worst point nearby.

    S₁ = {H(θ) < E₀}, S₂ = {i ∈ S₁ : H(θ') < E₀}, E₀ = fraction·ln C. The gradient at θ' of L = mean H(θ') over S₂ moves
    θ. m, the moving average of L, is left as it is where S₁ or S₂ is empty; where it falls below `restore_below`,
    tensors and momentum return to the source and m begins anew.
    """
    use_batch_statistics(model)
    adapted = norm_tensors(model, without=frozen)
    source = [p.detach().clone() for p in adapted]
    steps = optimizer(adapted)
    m: float | None = None
    for x in stream:
        logits = model(x)
        yield logits.detach()
        e0 = fraction * math.log(logits.shape[1])
        h = entropy(logits)
        s1 = h < e0
        if not s1.any():
            continue
        here = [p.detach().clone() for p in adapted]
        climb(adapted, torch.autograd.grad(h[s1].mean(), adapted), rho)
        h = entropy(model(x))
        s2 = s1 & (h < e0)
        if not s2.any():
            assign(adapted, here)
            continue
        loss = h[s2].mean()
        steps.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # at θ'
        assign(adapted, here)
        steps.step()  # from θ
        m = loss.item() if m is None else average * m + (1 - average) * loss.item()
        if m < restore_below:
            assign(adapted, source)
            steps, m = optimizer(adapted), None


def example() -> str:
    """On the toy stream.

    >>> example()
    '13 % wrong, 0 labels'
    """
    made = toy()
    return made.error(run(made.model, made.stream, optimizer=partial(SGD, lr=0.01)))


if __name__ == "__main__":
    print(example())
