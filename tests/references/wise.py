"""What does `wise` compute? It asks for what drifts most; norm tensors learn from all, the head from labels.

Readings
--------
Both presets
- L_ent = mean of H over {H < E₀, not labelled}; entropy="all": mean over all n, labelled ones too. L_sup = Σ
  CE/|labelled|.
- drift = ‖p − p̄‖₂, p̄ of the anchor on the same batch under that batch's statistics. Asked: the granted largest by
  (score, tie), tie = `ties(batch, n)` in [0, 1), larger first; without `ties` the lower index first. Batches up to
  `perturbed_first` use eatta's perturbation score in place of drift. `class_rule`: eatta's, on whichever score is
  used.
- A batch without a term (nothing under E₀, nothing labelled): no step. `only_selected`: no step on an unlabelled
  batch.
- `supervise_norm=False`: norm tensors take no part in any L_sup term.

paper
- Labelled batch: one forward; norm takes one Nesterov step on λ_sup·L_sup + λ_ent·L_ent (the terms that exist);
  then the head (weight and bias; "bias"; "none") one step on head_weight·L_sup, recomputed from the features of
  that forward, detached, with the current head: own momentum, same learning rate. Unlabelled batch: norm steps on
  λ_ent·L_ent.
- `block`: in place of the head, all tensors of that module step on head_weight·L_sup of a fresh forward after the
  norm step, with momentum apart from that of the norm step (also for norm tensors inside the block).
- `pull`: after the steps of a batch that took any, θ ← (1−pull)·θ + pull·θ₀ for norm and head (or block) tensors.
- Anchor: norm and head (or block) tensors, θ̄ ← μθ̄ + (1−μ)θ once a batch, whether or not there was a step.

authors
- Unlabelled batch: ent_unlabelled·L_ent on norm and head part at the second learning rate (this gives the factor of
  42).
- Labelled batch: step 1 on norm with ent_labelled·L_ent + sup_first·L_sup at the first rate; step 2 a fresh
  forward, sup_second·L_sup on norm and head part at the second. One momentum buffer a tensor over all kinds of
  step.
- Anchor follows after each step taken (none on a batch without a step).
- E₀ as above; perturbation score in batches 1 to 4; eatta's class rule on, as in the published selector. A restart
  at a domain change is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from . import nets
from .eatta import ClassRule, sensitivity
from .plain import (
    Sgd,
    Step,
    Tensors,
    Truth,
    cross_entropy,
    entropies,
    follow,
    gradients,
    inside,
    look,
    mean,
    norm_tensors,
    snapshot,
    use_batch_statistics,
)

Ties = Callable[[int, int], Tensor]
Noise = Callable[[int, torch.Size], Tensor]


def drift(logits: Tensor, anchor_logits: Tensor) -> list[float]:
    pairs = zip(logits.detach(), anchor_logits.detach(), strict=True)
    return [float((z.softmax(dim=0) - a.softmax(dim=0)).norm()) for z, a in pairs]


def entropy_term(logits: Tensor, asked: list[int], fraction: float, which: str) -> Tensor | None:
    hs = entropies(logits)
    if which == "all":
        return mean(hs)
    e0 = fraction * math.log(logits.shape[1])
    sure = [h for i, h in enumerate(hs) if h.item() < e0 and i not in asked]
    return mean(sure) if sure else None


def weighted(*terms: tuple[float, Tensor | None]) -> Tensor | None:
    """The weighted sum of the terms that exist, or None."""
    present = [w * term for w, term in terms if term is not None]
    return torch.stack(present).sum() if present else None


def part_of(net: nn.Module, head: str, part: str) -> Tensors:
    """The head's weight and bias ("full"), its bias ("bias"), or nothing ("none")."""
    wanted = {"full": ("weight", "bias"), "bias": ("bias",), "none": ()}[part]
    return {f"{head}.{kind}": net.get_parameter(f"{head}.{kind}") for kind in wanted}


class Selector:
    """Which samples are asked for?"""

    def __init__(
        self,
        head: str,
        anchor: nn.Module,
        perturbed_first: int,
        sigma: float,
        class_rule: bool,
        noise: Noise | None,
        ties: Ties | None,
    ) -> None:
        self.head, self.anchor, self.perturbed_first, self.sigma = head, anchor, perturbed_first, sigma
        self.rule = ClassRule() if class_rule else None
        self.noise, self.ties = noise, ties

    def pick(
        self, number: int, net: nn.Module, x: Tensor, features: Tensor, logits: Tensor, granted: int
    ) -> tuple[list[int], list[float]]:
        if granted == 0:
            return [], []
        if number <= self.perturbed_first:
            assert self.noise is not None
            eps = self.noise(number, features.shape)
            scores = sensitivity(features, logits, net.get_submodule(self.head), eps, self.sigma)
        else:
            scores = drift(logits, self.anchor(x))
        tie = [-float(i) for i in range(len(x))] if self.ties is None else self.ties(number, len(x)).tolist()
        guesses = [int(z.argmax()) for z in logits]
        ranking = sorted(range(len(x)), key=lambda i: (-scores[i], -tie[i]))
        if self.rule is not None:
            ranking = self.rule.order(ranking, scores, guesses)
        asked = ranking[:granted]
        if self.rule is not None:
            self.rule.note(asked, scores, guesses)
        return asked, scores


def run_paper(
    net: nn.Module,
    batches: list[Tensor],
    *,
    head: str = "fc",
    labels: Truth,
    grants: list[int],
    ties: Ties | None = None,
    noise: Noise | None = None,
    frozen: tuple[str, ...] = (),
    whole: tuple[str, ...] = (),
    lr: float = 2.5e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    lambda_sup: float = 0.9,
    lambda_ent: float = 0.1,
    head_weight: float = 1.0,
    fraction: float = 0.4,
    mu: float = 0.9,
    perturbed_first: int = 0,
    sigma: float = 0.01,
    class_rule: bool = False,
    entropy: str = "filtered",
    head_part: str = "full",
    supervise_norm: bool = True,
    only_selected: bool = False,
    block: str | None = None,
    pull: float = 0.0,
) -> list[Step]:
    use_batch_statistics(net)
    norm = norm_tensors(net, frozen, whole)
    if block is None:
        supervised = part_of(net, head, head_part)
    else:
        supervised = {name: p for name, p in net.named_parameters() if inside(name, [block])}
    source = {name: p.detach().clone() for name, p in (norm | supervised).items()}
    anchor = deepcopy(net)
    anchor_tensors = dict(anchor.named_parameters())
    norm_rule = Sgd(lr, momentum, nesterov)
    head_rule = Sgd(lr, momentum, nesterov)
    selector = Selector(head, anchor, perturbed_first, sigma, class_rule, noise, ties)
    steps = []
    for number, (x, granted) in enumerate(zip(batches, grants, strict=True), start=1):
        features, logits = look(net, x, head)
        asked, scores = selector.pick(number, net, x, features, logits, granted)
        answers = {i: labels(number, i) for i in asked}
        losses = {}

        if asked or not only_selected:
            ent = entropy_term(logits, asked, fraction, entropy)
            sup = mean(cross_entropy(logits[i], y) for i, y in answers.items()) if asked else None
            loss = weighted((lambda_sup, sup if supervise_norm else None), (lambda_ent, ent))
            if loss is not None:
                norm_rule.step(norm, gradients(loss, norm))
                losses["norm"] = loss.item()
        if asked and supervised:
            again = net.get_submodule(head)(features.detach()) if block is None else net(x)
            loss = head_weight * mean(cross_entropy(again[i], y) for i, y in answers.items())
            head_rule.step(supervised, gradients(loss, supervised))
            losses["head"] = loss.item()
        if losses:
            follow(norm | supervised, source, 1 - pull)
        follow(anchor_tensors, norm | supervised, mu)

        extra = {f"anchor.{name}": anchor_tensors[name].detach().clone() for name in norm | supervised}
        extra["scores"] = torch.tensor(scores, dtype=torch.float64)
        steps.append(Step(logits.detach(), snapshot(net), asked, losses, extra))
    return steps


def run_authors(
    net: nn.Module,
    batches: list[Tensor],
    *,
    head: str = "fc",
    labels: Truth,
    grants: list[int],
    ties: Ties | None = None,
    noise: Noise | None = None,
    frozen: tuple[str, ...] = (),
    whole: tuple[str, ...] = (),
    lr: float = 5e-4,
    lr_second: float = 2e-4,
    momentum: float = 0.9,
    nesterov: bool = True,
    ent_unlabelled: float = 0.1,
    ent_labelled: float = 1.7,
    sup_first: float = 0.15,
    sup_second: float = 0.15,
    fraction: float = 0.4,
    mu: float = 0.9,
    perturbed_first: int = 4,
    sigma: float = 0.01,
    class_rule: bool = True,
    entropy: str = "filtered",
    head_part: str = "bias",
    supervise_norm: bool = True,
    only_selected: bool = False,
) -> list[Step]:
    use_batch_statistics(net)
    norm = norm_tensors(net, frozen, whole)
    top = part_of(net, head, head_part)
    anchor = deepcopy(net)
    anchor_tensors = dict(anchor.named_parameters())
    rule = Sgd(lr, momentum, nesterov)
    selector = Selector(head, anchor, perturbed_first, sigma, class_rule, noise, ties)

    def step(loss: Tensor | None, tensors: Tensors, rate: float) -> float:
        if loss is None or not tensors:
            return 0.0
        rule.step(tensors, gradients(loss, tensors), rate)
        follow(anchor_tensors, norm | top, mu)
        return loss.item()

    steps = []
    for number, (x, granted) in enumerate(zip(batches, grants, strict=True), start=1):
        features, logits = look(net, x, head)
        asked, scores = selector.pick(number, net, x, features, logits, granted)
        answers = {i: labels(number, i) for i in asked}
        losses = {}
        ent = entropy_term(logits, asked, fraction, entropy)
        if asked:
            sup = mean(cross_entropy(logits[i], y) for i, y in answers.items())
            loss = weighted((ent_labelled, ent), (sup_first, sup if supervise_norm else None))
            losses["first"] = step(loss, norm, lr)
            again = net(x)
            loss = sup_second * mean(cross_entropy(again[i], y) for i, y in answers.items())
            losses["second"] = step(loss, norm | top if supervise_norm else top, lr_second)
        elif not only_selected:
            losses["unlabelled"] = step(weighted((ent_unlabelled, ent)), norm | top, lr_second)

        extra = {f"anchor.{name}": anchor_tensors[name].detach().clone() for name in norm | top}
        extra["scores"] = torch.tensor(scores, dtype=torch.float64)
        steps.append(Step(logits.detach(), snapshot(net), asked, losses, extra))
    return steps


def run(net: nn.Module, batches: list[Tensor], *, preset: str = "paper", **constants: Any) -> list[Step]:
    """`run_paper` or `run_authors`, whose keyword arguments and defaults are the two presets."""
    return {"paper": run_paper, "authors": run_authors}[preset](net, batches, **constants)


# Which scenarios show a constant that the first of its preset does not.
SHOWN_BY: dict[str, dict[str, tuple[str, ...]]] = {
    "paper": {
        "perturbed_first": ("paper, perturbed first",),
        "sigma": ("paper, perturbed first",),
        "pull": ("paper, pulled to the source",),
    },
    "authors": {"mu": ("authors, drift early",), "sigma": ("authors, sharp head",)},
}


def scenarios() -> list[tuple[str, dict[str, Any]]]:
    common = {"labels": nets.truth(), "ties": nets.uniforms(), "noise": nets.normals(), "grants": [1, 0, 2, 3, 2]}
    paper = {**common, "net": nets.cnn(), "batches": nets.batches(seed=28)}
    authors = {**paper, "preset": "authors", "grants": [1, 0, 1, 1, 1]}
    several = {**authors, "grants": [1, 1, 0, 2, 1], "batches": nets.batches(seed=41)}
    return [
        ("paper", paper),
        ("paper, vit", {**paper, "net": nets.vit(), "head": "head"}),
        ("paper, entropy of all", {**paper, "entropy": "all"}),
        ("paper, head bias", {**paper, "head_part": "bias"}),
        ("paper, no head", {**paper, "head_part": "none"}),
        ("paper, norm unsupervised", {**paper, "supervise_norm": False}),
        ("paper, only selected batches", {**paper, "only_selected": True}),
        ("paper, block", {**paper, "block": "layer3"}),
        ("paper, pulled to the source", {**paper, "pull": 0.2}),
        ("paper, block pulled to the source", {**paper, "block": "layer3", "pull": 0.2}),
        ("paper, nothing sure, no head, pulled", {**paper, "fraction": 1e-9, "head_part": "none", "pull": 0.2}),
        ("paper, published tensors", {**paper, "frozen": ("layer4",), "whole": ("layer1",)}),
        ("paper, class rule", {**paper, "batches": nets.batches(seed=1), "class_rule": True}),
        ("paper, nothing sure", {**paper, "fraction": 1e-9}),
        (
            "paper, perturbed first",
            {
                **paper,
                "net": nets.cnn(scale=80.0),
                "batches": nets.batches(seed=34),
                "grants": [1, 2, 1, 1, 1],
                "perturbed_first": 2,
            },
        ),
        ("authors", authors),
        ("authors, vit", {**authors, "net": nets.vit(), "head": "head"}),
        ("authors, drift early", {**several, "perturbed_first": 1}),
        (
            "authors, sharp head",
            {**authors, "net": nets.cnn(scale=250.0), "batches": nets.batches(seed=28), "grants": [1] * 5},
        ),
        ("authors, entropy of all", {**authors, "entropy": "all"}),
        ("authors, full head", {**authors, "head_part": "full"}),
        ("authors, no head", {**authors, "head_part": "none"}),
        ("authors, norm unsupervised", {**authors, "supervise_norm": False}),
        ("authors, only selected batches", {**authors, "only_selected": True}),
        ("authors, no class rule", {**authors, "batches": nets.batches(), "class_rule": False}),
        ("authors, published tensors", {**authors, "frozen": ("layer4",), "whole": ("layer1",)}),
        ("authors, nothing sure", {**authors, "fraction": 1e-9}),
    ]
