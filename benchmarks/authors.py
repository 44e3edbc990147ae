"""What does the published code do with a batch? Its sequence of operations told again, as a peer to be timed against.

Written from the description of it, not from its text. What is not described is done in the cheaper way, so that the
peer is rather too fast than too slow. The operations, in their order, and where each is described:

At the start
1. The model is copied whole, and once more for the anchor; the state of model and optimizer is copied a third time, to
   reset to ("copies the model").
2. Evaluation mode, BatchNorm on batch statistics; norm tensors and the head's bias learn, all else takes no gradient
   ("head: bias only"). SGD with Nesterov momentum 0.9.

Every batch
3. A forward that predicts, without a graph; the logits are what is scored.
4. The utility, #{H < E₀}, is read back to the host (eq. 2).
5. The policy: round(r·T) labels at most, the rate corrected by the debt over H_c = 40 batches, the quantile by numpy
   over a window of 250 ("budget": needs T).

A batch that is not selected
6. A second forward, with its graph: 0.1·L_ent on norm tensors and head bias at the second learning rate, one backward,
   one step. L_ent is the mean over H < E₀; the count of these is read back ("none left: no step").
7. The anchor: every parameter of the model is averaged, μ = 0.9, one by one ("over every parameter").

A batch that is selected
8. The anchor's forward; drift ‖p − p̄‖₂ of every sample, the largest outside the classes asked for just before (EATTA's
   rule). In the first 4 batches the perturbation score in its place: features + N(0, 0.01²) through the head.
9. Step 1: a forward with its graph, 1.7·L_ent + 0.15·L_sup on the norm tensors, the head frozen, one backward, one step
   at the first learning rate; the anchor as in 7.
10. Step 2: a fresh forward, 0.15·L_sup on norm tensors and head bias, one backward, one step at the second learning
    rate; the anchor as in 7, for the second time.

So a selected batch costs four forwards, two backwards and two averages of every parameter, another two, one and one.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Clock = Callable[[str], contextlib.AbstractContextManager[Any]]
NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)


def head_of(model: nn.Module) -> nn.Linear:
    """The last linear layer."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def use_batch_statistics(model: nn.Module) -> None:
    """Evaluation mode, but BatchNorm layers have only the batch to normalise with."""
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None


def norm_tensors(model: nn.Module) -> list[nn.Parameter]:
    """The affine tensors of normalisation layers."""
    return [p for module in model.modules() if isinstance(module, NORMS) for p in module.parameters(recurse=False)]


def entropy(logits: Tensor) -> Tensor:
    """H of every row."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


class Authors:
    """The published sequence around one model.

    Parameters
    ----------
    model
        Copied, never changed.
    ratio, length
        Labels a batch, and how many batches there will be.
    lr, second_lr
        Learning rates of the two steps.
    clock
        Told what is being done, for a split of the time; does nothing unless given.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ratio: float = 0.5,
        length: int = 782,
        lr: float = 5e-4,
        second_lr: float = 2e-4,
        clock: Clock = contextlib.nullcontext,
        seed: int = 0,
    ) -> None:
        self.model = copy.deepcopy(model)
        use_batch_statistics(self.model)
        self.model.requires_grad_(False)
        self.head = head_of(self.model)
        self.norms = norm_tensors(self.model)
        for tensor in (*self.norms, self.head.bias):
            tensor.requires_grad_(True)
        self.optimizer = torch.optim.SGD([*self.norms, self.head.bias], lr=lr, momentum=0.9, nesterov=True)
        self.model_state = copy.deepcopy(self.model.state_dict())
        self.optimizer_state = copy.deepcopy(self.optimizer.state_dict())
        self.anchor = copy.deepcopy(self.model).requires_grad_(False)
        self.lr, self.second_lr = lr, second_lr
        self.clock = clock
        self.budget, self.ratio = round(ratio * length), round(ratio * length) / length
        self.generator = np.random.default_rng(seed)
        self.noise = torch.Generator(self.head.weight.device).manual_seed(seed)
        self.scores: deque[float] = deque(maxlen=250)
        self.seen = self.spent = self.forwards = self.backwards = 0
        self.just_asked: int | None = None
        self.last_score: dict[int, float] = {}
        self.features: Tensor
        self.head.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.features = args[0].detach()

    def step(self, x: Tensor, truth: list[int]) -> Tensor:
        """Predict on a batch, ask about a sample of it if the policy wants to, and learn."""
        self.forwards += 1
        with self.clock("forward"), torch.no_grad():
            logits = self.model(x)
        with self.clock("loss"):
            limit = 0.4 * math.log(logits.shape[1])
            score = float((entropy(logits) < limit).sum().item())
        with self.clock("policy"):
            selected = self.decide(score)
        rows = [self.pick(x, logits)] if selected else []
        self.learn(x, rows, [truth[row] for row in rows])
        return logits

    def decide(self, score: float) -> bool:
        """Algorithm 1, its rate corrected for the number of labels that T allows, and a cap."""
        self.seen += 1
        debt = self.ratio * self.seen - self.spent
        rate = min(max(self.ratio + debt / 40, 0.0), 1.0)
        if self.spent >= self.budget:
            selected = False
        elif debt > 1:
            selected = True
        elif not self.scores:
            selected = bool(self.generator.random() < rate)
        else:
            selected = bool(score >= np.quantile(np.array(self.scores), 1 - rate))
        self.scores.append(score)
        self.spent += selected
        return selected

    def pick(self, x: Tensor, logits: Tensor) -> int:
        """The sample to ask about."""
        probs = logits.softmax(1)
        with torch.no_grad():
            if self.seen <= 4:
                shape, kind = self.features.shape, self.features
                noise = torch.randn(shape, generator=self.noise, device=kind.device, dtype=kind.dtype)
                nudged = self.head(kind + 0.01 * noise).softmax(1)
                predicted = probs.argmax(1, keepdim=True)
                scores = (nudged.gather(1, predicted) - probs.gather(1, predicted)).abs().squeeze(1)
            else:
                scores = self.drift(x, probs)
        with self.clock("policy"):
            values, classes = scores.tolist(), probs.argmax(1).tolist()
            order = sorted(range(len(values)), key=lambda row: -values[row])
            fresh = [row for row in order if self._is_fresh(classes[row], values[row])]
            row = (fresh or order)[0]
            self.just_asked, self.last_score[classes[row]] = classes[row], values[row]
        return row

    def drift(self, x: Tensor, probs: Tensor) -> Tensor:
        """‖p − p̄‖₂ of every sample; a forward of the anchor."""
        self.forwards += 1
        with self.clock("anchor"), torch.no_grad():
            return (probs - self.anchor(x).softmax(1)).norm(dim=1)

    def _is_fresh(self, predicted: int, score: float) -> bool:
        return predicted != self.just_asked or score > self.last_score[predicted]

    def learn(self, x: Tensor, rows: list[int], labels: list[int]) -> None:
        """One step of an unlabelled batch, two of a labelled one."""
        if not rows:
            with self.clock("forward"):
                logits = self._forward(x)
            loss = self._entropy(logits, rows)
            if loss is not None:
                self._step(0.1 * loss, self.second_lr)
            return
        targets = torch.tensor(labels, device=x.device)
        self.head.bias.requires_grad_(False)
        with self.clock("forward"):
            logits = self._forward(x)
        loss = self._entropy(logits, rows)
        supervised = 0.15 * functional.cross_entropy(logits[rows], targets)
        self._step(supervised if loss is None else 1.7 * loss + supervised, self.lr)
        self.head.bias.requires_grad_(True)
        with self.clock("forward"):
            logits = self._forward(x)
        self._step(0.15 * functional.cross_entropy(logits[rows], targets), self.second_lr)

    def _forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        logits: Tensor = self.model(x)
        return logits

    def _entropy(self, logits: Tensor, rows: list[int]) -> Tensor | None:
        with self.clock("loss"):
            values = entropy(logits)
            keep = values.detach() < 0.4 * math.log(logits.shape[1])
            keep[rows] = False
            return values[keep].mean() if keep.any() else None

    def _step(self, loss: Tensor, lr: float) -> None:
        self.backwards += 1
        with self.clock("backward"):
            loss.backward()
        with self.clock("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.optimizer.zero_grad()
            with torch.no_grad():
                for slow, tensor in zip(self.anchor.parameters(), self.model.parameters(), strict=True):
                    slow.mul_(0.9).add_(tensor, alpha=0.1)
