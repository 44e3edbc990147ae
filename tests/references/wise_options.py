"""wise with everything that the library makes optional beside the paper and the published code, as two programs.

The shipped programs, `wise_atta.reference.wise` and `wise_published`, are what remains of these with all options left
alone; a test holds one to the other. Options: `head_part` ("full", "bias", "none"), `block` (a module that takes the
supervised step in place of the head, by a fresh forward, with a momentum of its own), `supervise_norm` (off: norm
tensors take no part in any L_sup), `only_selected` (no step on an unlabelled batch), `pull` (after the steps of a batch
θ ← (1 − pull)·θ + pull·θ₀), `first` (so many batches are asked by eatta's perturbation score), `class_rule` (eatta's).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from wise_atta.reference import wise, wise_published
from wise_atta.reference.common import (
    Answer,
    Optimizers,
    descend,
    follow,
    inside,
    look,
    norm_tensors,
    use_batch_statistics,
)
from wise_atta.reference.eatta import ClassRule, normal, sensitivity
from wise_atta.reference.wise import any_of, drift, l_ent, l_sup, largest, utility

Adapt = Callable[[nn.Module], list[nn.Parameter]]


def part_of(head: nn.Module, part: str) -> list[nn.Parameter]:
    wanted = {"full": ("weight", "bias"), "bias": ("bias",), "none": ()}[part]
    return [head.get_parameter(name) for name in wanted]


def selection(
    anchor: nn.Module, head: nn.Module, first: int, sigma: float, class_rule: bool, noise: Any, ties: Any
) -> Callable[..., list[int]]:
    """What is asked of batch t."""
    rule = ClassRule()

    @torch.no_grad()
    def ask(t: int, x: Tensor, features: Tensor, logits: Tensor, k: int) -> list[int]:
        if not k:
            return []
        if t <= first:
            scores = sensitivity(features, logits, head, noise(t, features.shape), sigma)
        else:
            scores = drift(logits, anchor(x))
        ranking = largest(scores, ties(t, len(x)), len(x))
        guesses = logits.argmax(dim=1).tolist()
        return rule.pick(ranking, scores.tolist(), guesses, k) if class_rule else ranking[:k]

    return ask


def paper(
    model: nn.Module,
    stream: Iterable[Tensor],
    answer: Answer,
    decide: Callable[[float], int],
    *,
    head: str = "fc",
    adapt: Adapt = norm_tensors,
    optimizer: Optimizers = wise.SGD,
    lambda_sup: float = 0.9,
    lambda_ent: float = 0.1,
    lambda_head: float = 1.0,
    fraction: float = 0.4,
    filtered: bool = True,
    mu: float = 0.9,
    first: int = 0,
    sigma: float = 0.01,
    class_rule: bool = False,
    head_part: str = "full",
    supervise_norm: bool = True,
    only_selected: bool = False,
    block: str | None = None,
    pull: float = 0.0,
    noise: Callable[[int, torch.Size], Tensor] = normal,
    ties: Callable[[int, int], Tensor] = any_of,
) -> Iterator[Tensor]:
    use_batch_statistics(model)
    source, anchor = deepcopy(model), deepcopy(model)
    classifier = model.get_submodule(head)
    if block is None:
        top = part_of(classifier, head_part)
    else:
        top = [p for name, p in model.named_parameters() if inside(name, [block])]
    norm_steps = optimizer(adapt(model))
    top_steps = optimizer(top) if top else None
    ask = selection(anchor, classifier, first, sigma, class_rule, noise, ties)
    for t, x in enumerate(stream, start=1):
        features, logits = look(model, x, head)
        yield logits.detach()
        tau_ent = fraction * math.log(logits.shape[1])
        asked = ask(t, x, features, logits, decide(utility(logits, tau_ent)))
        labels = {i: answer(t, i) for i in asked}

        stepped = False
        if labels or not only_selected:
            total = lambda_ent * l_ent(logits, asked, tau_ent if filtered else None)
            if supervise_norm:
                total = total + lambda_sup * l_sup(logits, labels)
            if total.requires_grad:
                descend(norm_steps, total)
                stepped = True
        if labels and top_steps is not None:
            again = classifier(features.detach()) if block is None else model(x)
            descend(top_steps, lambda_head * l_sup(again, labels))
            stepped = True
        if stepped and pull:
            follow(model, source, 1 - pull)
        follow(anchor, model, mu)


def authors(
    model: nn.Module,
    stream: Iterable[Tensor],
    answer: Answer,
    decide: Callable[[float], int],
    *,
    head: str = "fc",
    adapt: Adapt = norm_tensors,
    optimizer: Optimizers = wise_published.SGD,
    second_lr: float = 2e-4,
    unlabelled: float = 0.1,
    ent: float = 1.7,
    sup: float = 0.15,
    sup_second: float = 0.15,
    fraction: float = 0.4,
    filtered: bool = True,
    mu: float = 0.9,
    first: int = 4,
    sigma: float = 0.01,
    class_rule: bool = True,
    head_part: str = "bias",
    supervise_norm: bool = True,
    only_selected: bool = False,
    noise: Callable[[int, torch.Size], Tensor] = normal,
    ties: Callable[[int, int], Tensor] = any_of,
) -> Iterator[Tensor]:
    use_batch_statistics(model)
    anchor = deepcopy(model)
    classifier = model.get_submodule(head)
    norm, top = adapt(model), part_of(classifier, head_part)
    steps = optimizer([*norm, *top])
    first_lr = steps.param_groups[0]["lr"]
    ask = selection(anchor, classifier, first, sigma, class_rule, noise, ties)

    def step(loss: Tensor, tensors: list[nn.Parameter], lr: float) -> None:
        if not loss.requires_grad or not tensors:
            return
        steps.zero_grad()
        for p, g in zip(tensors, torch.autograd.grad(loss, tensors), strict=True):
            p.grad = g
        steps.param_groups[0]["lr"] = lr
        steps.step()
        follow(anchor, model, mu)

    for t, x in enumerate(stream, start=1):
        features, logits = look(model, x, head)
        yield logits.detach()
        tau_ent = fraction * math.log(logits.shape[1])
        asked = ask(t, x, features, logits, decide(utility(logits, tau_ent)))
        labels = {i: answer(t, i) for i in asked}
        entropy = l_ent(logits, asked, tau_ent if filtered else None)
        if labels:
            first_loss = ent * entropy
            step(first_loss + sup * l_sup(logits, labels) if supervise_norm else first_loss, norm, first_lr)
            step(sup_second * l_sup(model(x), labels), [*norm, *top] if supervise_norm else top, second_lr)
        elif not only_selected:
            step(unlabelled * entropy, [*norm, *top], second_lr)


PROGRAMS = {"paper": paper, "authors": authors}

# What the shipped programs do not have, by the names of the scenarios.
OPTIONS = {
    "paper": {
        "block",
        "class_rule",
        "frozen",
        "head_part",
        "head_weight",
        "only_selected",
        "perturbed_first",
        "pull",
        "supervise_norm",
        "whole",
    },
    "authors": {"class_rule", "entropy", "head_part", "only_selected", "supervise_norm"},
}
