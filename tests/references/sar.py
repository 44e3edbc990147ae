"""What does `sar` compute? A sharpness-aware entropy step on sure samples, and a return to the source near collapse.

Readings
--------
- Climb: θ' = θ + ρ·g/‖g‖, ‖g‖ over all adapted tensors together, g = ∇ mean_{H<E₀} H at θ.
- Second loss L' = mean over {i : H(θ)ᵢ < E₀ and H(θ')ᵢ < E₀} of H(θ')ᵢ; its gradient at θ' moves θ (not θ') by SGD.
- e = L' at the first, then e ← 0.9·e + 0.1·L'. e < 0.2 after a step: adapted tensors and momentum as at the start,
  e empty.
- No sample passes the first filter, or none the second: θ as before the batch, no step, e unchanged.
- The last stage is named by the caller (`frozen`); its norm tensors take part neither in the step nor in ‖g‖.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .plain import (
    Sgd,
    Step,
    assign,
    entropies,
    gradients,
    length,
    mean,
    norm_tensors,
    snapshot,
    use_batch_statistics,
)

VIT_LAST = ("blocks.9", "blocks.10", "blocks.11", "norm")


def run(
    net: nn.Module,
    batches: list[Tensor],
    *,
    frozen: tuple[str, ...] = ("layer4",),
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = False,
    fraction: float = 0.4,
    rho: float = 0.05,
    average: float = 0.9,
    restore_below: float = 0.2,
) -> list[Step]:
    use_batch_statistics(net)
    adapted = norm_tensors(net, frozen)
    source = {name: p.detach().clone() for name, p in adapted.items()}
    rule = Sgd(lr, momentum, nesterov)
    e: float | None = None
    steps = []
    for x in batches:
        logits = net(x)
        e0 = fraction * math.log(logits.shape[1])
        first = entropies(logits)
        sure = [i for i, h in enumerate(first) if h.item() < e0]
        losses = {"kept": float(len(sure)), "restored": 0.0}
        if sure:
            here = {name: p.detach().clone() for name, p in adapted.items()}
            g = gradients(mean(first[i] for i in sure), adapted)
            with torch.no_grad():
                for name, p in adapted.items():
                    p += rho * g[name] / length(g)
            second = entropies(net(x))
            still = [i for i in sure if second[i].item() < e0]
            if still:
                loss = mean(second[i] for i in still)
                g = gradients(loss, adapted)
                losses["second"] = loss.item()
            assign(adapted, here)
            if still:
                rule.step(adapted, g)
                e = loss.item() if e is None else average * e + (1 - average) * loss.item()
                losses["average"] = e
                if e < restore_below:
                    assign(adapted, source)
                    rule = Sgd(lr, momentum, nesterov)
                    e = None
                    losses["restored"] = 1.0
        steps.append(Step(logits.detach(), snapshot(net), losses=losses))
    return steps


# Which scenarios show a constant that the first does not.
SHOWN_BY: dict[str, tuple[str, ...]] = {
    "average": ("nearly restores", "restores at 0.2"),
    "restore_below": ("restores at 0.2",),
}


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("defaults", {"net": nets.cnn(), "batches": nets.batches()}),
        ("vit", {"net": nets.vit(), "batches": nets.batches(), "frozen": VIT_LAST, "lr": 1e-3}),
        ("restores at 0.2", {"net": nets.cnn(scale=31.0), "batches": nets.batches(seed=71)}),
        ("nearly restores", {"net": nets.cnn(scale=34.0), "batches": nets.batches(seed=4)}),
    ]
