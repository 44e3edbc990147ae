"""Distillation from a stronger model that adapts too, on few samples, again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from wise_atta import errors, signals
from wise_atta.anchor import Anchor
from wise_atta.how.labels import Labels
from wise_atta.how.optimizer import Optimizer, check_rate
from wise_atta.how.replay import Draw, Replay, stack
from wise_atta.how.update import OneGroup, Question, skipped
from wise_atta.model import Forward, Weights
from wise_atta.part import SAVED_AS, Part, at_least, running, saved
from wise_atta.signals import trust
from wise_atta.stream import Inputs, tree_map


@dataclass(eq=False)
class Tutor(Part):
    """A stronger model that adapts as well: one step on the mean of exp(E₀ − H)·H over what it is shown.

    Parameters
    ----------
    teacher
        A module is run as the student's is, with the same normalisation of inputs and the same subset of classes, and
        batch renormalisation. Give a `Classifier` where it is to be otherwise, or to adapt other tensors than norm's.
    lr, momentum
        Of its SGD.
    below
        E₀ as a share of ln C.
    """

    teacher: nn.Module | Weights = field(repr=False)
    _: KW_ONLY
    lr: float = 2.5e-4
    momentum: float = 0.9
    below: float = 0.4

    def __post_init__(self) -> None:
        if self.teacher is None:
            raise errors.BadConfig("there is no teacher: give teacher=, a stronger model of the same classes")
        if not isinstance(self.teacher, nn.Module | Weights):
            raise errors.BadConfig(f"the teacher must be a module or a Classifier, not {type(self.teacher).__name__}")
        check_rate(self.lr)

    def start(self, student: Weights) -> None:
        """Get ready to teach this student. What the teacher runs is counted as the student's work."""
        if hasattr(self, "model"):
            raise errors.BadConfig("this Tutor teaches for another adapter already: make one for each")
        teacher = self.teacher
        model = teacher if isinstance(teacher, Weights) else student.like(teacher, statistics="renorm")
        if isinstance(teacher, Weights):
            theirs, own = (m.outputs if m.classes is None else len(m.classes) for m in (teacher, student))
        else:
            theirs, own = model.outputs, student.outputs
        if None not in (theirs, own):
            _require_same(theirs, own)
        model.work = student.work
        self.model = model
        self.optimizer = Optimizer(model, lr=self.lr, momentum=self.momentum, nesterov=False)

    def adapt(self, inputs: Inputs) -> None:
        """One step on a batch."""
        forward = self.model.forward(self._moved(inputs), grad=True)
        entropy = signals.entropy(forward.logits)
        loss = (trust(entropy, forward.logits.shape[1], self.below) * entropy).mean()  # mean of exp(E₀ − H)·H
        self.optimizer.step(self.model.gradients(loss, forward.version, list(self.model.layout.groups)))
        self.model.commit(forward.statistics)

    def logits(self, inputs: Inputs) -> Tensor:
        """What it thinks of a batch now."""
        return self.model.forward(self._moved(inputs)).logits

    def _moved(self, inputs: Inputs) -> Inputs:
        device, dtype = self.model.device, self.model.dtype
        return tree_map(lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype), inputs)

    def reset(self) -> None:
        self.optimizer.reset()
        self.model.reset_statistics()

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "running": saved(self.model.running)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        running = state["running"]
        self.model.running = None if running is None else running.to(self.model.device, copy=True)


@dataclass(kw_only=True, eq=False, repr=False)
class Distillation(OneGroup):
    """Learn from a teacher of one's own, in batches of questions that have queued up, and from replayed ones (CEMA).

    With every full queue the teacher takes a step on it; then the student takes one on queue and replayed samples, with
    the logits that the teacher now has for all of them. A batch of which nothing was sent takes a step on replayed
    samples alone. The loss is the mean of

        entropy·exp(E₀ − H)·H + exp(E₀ − H′)·(kl·KL(p′‖p) + ce·(−log p_y)),  y = arg max p′

    with p and H the student's, p′ and H′ the teacher's.

    Parameters
    ----------
    tutor
        The teacher.
    cost
        What one of its labels costs: 1, or 0, which takes the budget out of play.
    adapt
        Which tensors of the student.
    lr, momentum, nesterov, optimizer
        Of the student, see `Optimizer`.
    entropy, kl, ce
        Weights of the three losses.
    below
        E₀ as a share of ln C.
    queue
        How many questions the teacher takes at a time.
    replayed, alone
        How many past samples come beside a queue, and how many where a batch sends nothing.
    ready
        Nothing is replayed before so many are stored.
    size, draw, seed
        The buffer, see `Replay`. A sample enters it when the student has learned from it.
    """

    needs_graph = False

    tutor: Tutor = field(kw_only=False, metadata={SAVED_AS: "tutor"})
    cost: int = 1
    lr: float = 2.5e-3
    nesterov: bool = False
    entropy: float = 3.0
    kl: float = 3.0
    ce: float = 1.0
    below: float = 0.4
    queue: int = 32
    replayed: int = 96
    alone: int = 128
    ready: int = 256
    size: int | None = 300
    draw: Draw | None = field(default=None, repr=False)
    seed: int = 0
    replay: Replay = running(key="replay")
    _steps: int = running(0, key="steps")

    def prepare(self) -> None:
        if self.cost not in (0, 1):
            raise errors.BadConfig(f"a teacher's label costs 1 like any other, or 0 where it is free, not {self.cost}")
        at_least(2, queue=self.queue)
        at_least(0, replayed=self.replayed, alone=self.alone, ready=self.ready)
        if self.size is not None and self.size < self.ready:
            raise errors.BadConfig(
                f"a buffer of size {self.size} never holds the {self.ready} samples that replay waits for"
            )
        self.replay = Replay(self.size, draw=self.draw, seed=self.seed)
        self.teacher_cost = self.cost
        self._losses: dict[str, Tensor] = {}
        self._sent = 0

    def start(self, model: Weights, anchor: Anchor | None = None) -> None:
        self.tutor.start(model)
        super().start(model, anchor)

    def consult(self, forward: Forward, questions: Sequence[Question], sent: int) -> dict[str, int]:
        # The statistics that samples are distilled with know of this batch.
        self.model.commit(forward.statistics)
        self._sent = sent
        answers: dict[str, int] = {}
        for begin in range(0, len(questions) - self.queue + 1, self.queue):
            full = questions[begin : begin + self.queue]
            inputs = stack([query.input for query in full], self.model.device)
            self.tutor.adapt(inputs)
            classes = self._distil([query.input for query in full] + self._past(self.replayed))[: self.queue]
            self.replay.add(inputs, classes, [(query.batch, query.index) for query in full])
            answers |= {query.id: label for query, label in zip(full, classes, strict=True)}
        return answers

    def learn(self, forward: Forward, labels: Labels) -> dict[str, Tensor]:
        if not self._sent:
            past = self._past(self.alone)
            if len(past) < 2:
                return skipped()
            self._distil(past)
        # Empty where samples were sent that wait for the queue to fill.
        losses, self._losses = self._losses, {}
        return losses

    def _past(self, count: int) -> list[Inputs]:
        if len(self.replay) < self.ready:
            return []
        return [kept.inputs for kept in self.replay.sample(count, self._steps)]

    def _distil(self, samples: Sequence[Inputs]) -> list[int]:
        """One step of the student towards the teacher; gives the teacher's classes."""
        inputs = stack(samples, self.model.device)
        forward = self.model.forward(inputs, grad=True)
        logits, target = forward.logits, self.tutor.logits(inputs).to(forward.logits)
        _require_same(target.shape[1], logits.shape[1])
        n_classes, sure = logits.shape[1], target.argmax(dim=1)
        own, theirs = signals.entropy(logits), signals.entropy(target)
        ent = trust(own, n_classes, self.below) * own  # exp(E₀ − H)·H
        weight = trust(theirs, n_classes, self.below)  # exp(E₀ − H′)
        log_p, log_t = logits.log_softmax(dim=1), target.log_softmax(dim=1)
        kl = weight * (log_t.exp() * (log_t - log_p)).sum(dim=1)  # KL(p′‖p)
        ce = weight * functional.nll_loss(log_p, sure, reduction="none")  # −log p_y, y = arg max p′
        loss = (self.entropy * ent + self.kl * kl + self.ce * ce).mean()
        self.descend(loss, forward.version)
        self._steps += 1
        self._losses = {"loss": loss.detach()}
        classes: list[int] = sure.tolist()
        return classes

    def snapshot(self) -> dict[str, Tensor]:
        teacher, running = self.tutor.model.live.flat, self.tutor.model.running
        return super().snapshot() | {"teacher": teacher} | ({} if running is None else {"running": running})

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        super().restore(snapshot)
        self.tutor.optimizer.forget()
        self.tutor.optimizer.move(snapshot["teacher"])
        self.tutor.model.running = snapshot.get("running")


def _require_same(theirs: int | None, own: int | None) -> None:
    if theirs != own:
        raise errors.BadConfig(
            f"the teacher has {theirs} classes and the student {own}: give a teacher of the same classes, or a "
            "Classifier with classes=… that names the student's"
        )
