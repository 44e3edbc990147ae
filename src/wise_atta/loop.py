"""The loop that every method follows: predict, ask, learn."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from wise_atta import errors, labelling
from wise_atta.anchor import Anchor
from wise_atta.controls import Controls
from wise_atta.engine.ahead import Ahead
from wise_atta.engine.direct import Direct, Parts, Seen
from wise_atta.guard import Guard
from wise_atta.how import Update, remember
from wise_atta.model import Forward, Weights, checks
from wise_atta.prediction import Learned, Prediction, Step, Unlearned
from wise_atta.stream import Batch, Inputs
from wise_atta.what import Drift, Selector
from wise_atta.when import Count, Decision, Never, Policy, Utility
from wise_atta.who import Answer, AnswerLike, Asked, Query, Questions


class Adapter(Controls):
    """A classifier that adapts while it predicts and asks for few labels.

    Most people make one with `wise_atta.adapt`; this is the loop under it, with its parts given one by one.

    Parameters
    ----------
    classifier
        The model, laid out for the tensors that `update` adapts.
    update
        How it learns.
    policy, utility
        When it asks: who decides, and the score that the decision is made on.
    selector, labels
        What it asks: which samples of a selected batch, and how many at most (None: as many as the selector picks).
    questions
        Who answers, and what becomes of late answers.
    anchor
        The slow copy that drift is measured against; made if a part needs it.
    shadow
        Adapt, but answer with the source model.
    guard
        Who watches for collapse and goes back to the last good state, if anybody.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        classifier: Weights,
        update: Update,
        *,
        policy: Policy | None = None,
        utility: Utility | None = None,
        selector: Selector | None = None,
        labels: int | None = 1,
        questions: Questions | None = None,
        anchor: Anchor | None = None,
        shadow: bool = False,
        guard: Guard | None = None,
    ) -> None:
        super().__init__()
        _check(labels, guard)
        self.classifier = classifier
        self.update = update
        self.policy = Never() if policy is None else policy
        self.utility = Count() if utility is None else utility
        self.selector = Drift() if selector is None else selector
        self.labels = labels
        self.questions = Questions() if questions is None else questions
        self.shadow = shadow
        self.guard = guard
        self._asks = not isinstance(self.policy, Never)
        if anchor is None and self._asks and (self.utility.needs_anchor or self.selector.needs_anchor):
            anchor = Anchor()
        self.anchor = anchor
        classifier.repeats = anchor is not None or update.runs_again
        update.start(classifier, anchor)
        # Its parts may be replaced. Without the proxy it would live on until the garbage collector finds the cycle.
        parts: Parts = weakref.proxy(self)
        self.questions.start(lambda labels: parts.policy.refund(labels), update.teacher_cost)
        if anchor is not None:
            anchor.start(classifier.live)
        if guard is not None:
            guard.start(classifier, update, anchor)
        self.engine = (Ahead if classifier.quick else Direct)(parts)

    # -- predict ------------------------------------------------------------------------------------------------

    def predict(self, x: Inputs | Batch, *, ask: bool = True, learn: bool = True) -> Prediction:
        """Predict on a batch and decide whether, and about what, to ask.

        Parameters
        ----------
        x
            A tensor [n, …], a tree of tensors, or a `Batch`. It is not copied: leave its values alone until `learn`.
        ask
            Whether questions may be asked about it.
        learn
            Whether `learn` will follow. With both False this is plain inference: nothing changes, and other threads may
            do the same at the same time.
        """
        batch = x if isinstance(x, Batch) else Batch(x)
        count = self.classifier.check(batch.inputs)
        learn = learn and not self._frozen
        ask = ask and not self._frozen and self._asks
        # Where an account counts samples, a batch is whatever has arrived.
        fixed = self.policy.account.per == "batch"
        if ask and fixed and self._number == 0 and self.labels is not None and self.labels > count:
            raise errors.BadConfig(
                f"labels={self.labels} a batch, but the first batch has {count} samples: ask for at most as many as a "
                "batch holds"
            )
        if not (ask or learn):
            with torch.inference_mode(False), torch.no_grad():
                return self._infer(batch)
        with self._lock, self._amid(), torch.inference_mode(False), torch.no_grad():
            try:
                return self._predict(batch, count, ask, learn)
            except errors.NotFinite as error:
                if self.guard is None or not checks.all_finite(batch.inputs):
                    raise
                with self.classifier.at_once():
                    self.guard.rescue(self._number + 1)
                return self._predict(batch, count, ask, learn, tripped=str(error))

    def _infer(self, batch: Batch) -> Prediction:
        forward = self._answering(batch.inputs)
        logits = forward.logits if self.shadow else self.update.output(forward)
        (finite,) = self.classifier.send(checks.all_finite(batch.inputs, forward.logits).double().unsqueeze(0))()
        if not finite:
            raise checks.not_finite(self.classifier, batch.inputs)
        return Prediction(logits, spent=self.policy.spent, allowed=self.policy.allowed)

    def _predict(self, batch: Batch, count: int, ask: bool, learn: bool, tripped: str | None = None) -> Prediction:
        began, work = time.perf_counter(), replace(self.classifier.work)
        want = (count if self.labels is None else min(self.labels, count)) if ask else 0
        self._drop_graph()
        seen = self.engine.look(batch.inputs, self._number + 1, self._age + 1, want=want, count=count, learn=learn)
        # Questions of earlier batches that still wait move to the host: here, where the device has nothing to do.
        self.questions.keep()
        if not seen.finite:
            raise checks.not_finite(self.classifier, batch.inputs)
        forward = seen.forward
        # A copy: what the caller does to it must not reach what is learned.
        scored = (self._answering(batch.inputs).logits if self.shadow else self.update.output(forward)).clone()
        queries = self._ask(batch, seen, want, count) if ask else []
        self._number += 1
        self._age += 1
        taught = self.questions.taught
        out = Prediction(
            logits=scored,
            queries=[] if taught else queries,
            sent=queries if taught else [],
            utility=seen.score,
            spent=self.policy.spent,
            allowed=self.policy.allowed,
            number=self._number,
            view=seen.view,
        )
        # A policy of one's own may grant what it did not foresee: then the forward is repeated, with its graph.
        out._unlearned = Unlearned(
            owner=self if learn else None,
            inputs=batch.inputs,
            forward=forward if learn and not (queries and seen.used_up) else None,
            asked=tuple(query.id for query in queries),
            decision=self.policy.last if ask else Decision(),
            tripped=tripped,
            work=self.classifier.work - work,
            seconds=time.perf_counter() - began,
        )
        if learn:
            self._latest = out
        return out

    def _ask(self, batch: Batch, seen: Seen, want: int, count: int) -> list[Query]:
        """Decide how many questions this batch is worth, and ask them about the samples that the selector picks."""
        free = self.questions.free
        granted = want if free else self.policy.decide(seen.score, want=want, samples=count)
        if not granted:
            return []
        undo = remember(self.selector)
        try:
            rows = self.engine.pick(seen, granted)
            if len(rows) > granted:
                raise errors.BadConfig(
                    f"the selector {type(self.selector).__name__} picked {len(rows)} samples where the budget grants "
                    f"{granted}: pick(view, k) gives at most k rows"
                )
            queries = self.questions.about(batch, self._number + 1, rows, seen.view.logits)
            self.questions.ask(queries, labelling.context(seen.forward, self.questions))
        except BaseException:
            if not free:
                self.policy.undo()
            undo()
            raise
        if len(queries) < granted and not free:
            self.policy.refund(granted - len(queries))
        return queries

    def _answering(self, inputs: Inputs) -> Forward:
        """The forward of what answers requests: the source in the shadow, else what was published last, read once."""
        model, published = self.classifier, self.classifier.published
        if self.shadow:
            return model.forward(inputs, version=model.source(), statistics="source")
        return model.forward(inputs, version=published.version, running=published.running)

    # -- learn --------------------------------------------------------------------------------------------------

    def learn(self, out: Prediction, answers: Mapping[str, AnswerLike] | None = None) -> Step:
        """Learn from a prediction's batch, and from whatever labels have arrived, for any batch.

        Parameters
        ----------
        out
            What `predict` gave, used once.
        answers
            Question id → class, `Answer`, `CANT_TELL`, `SKIP`, or None for "not yet".
        """
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            with self._amid():
                step = self._learn(out, {} if answers is None else answers)
            for callback in self._callbacks:
                callback(step)
            return step

    def _learn(self, out: Prediction, answers: Mapping[str, AnswerLike]) -> Step:
        began, work, now = time.perf_counter(), replace(self.classifier.work), self._number
        batch = out.unlearned_by(self, self._frozen)
        new = self.questions.read(answers)
        todo, stale = ([], []) if self._frozen else self.questions.due(new, out.number, now)
        updates = not self._frozen and bool(not self.update.only_selected or batch.asked or todo)
        undo = remember(self.classifier, self.update, self.anchor, self.guard)
        with self.classifier.at_once():
            try:
                done = self._update(out, batch, todo) if updates else Learned(batch.forward, tripped=batch.tripped)
                if not self._frozen:
                    self._follow(batch, done.forward)
                learned = [*(item.query.id for item in todo), *done.taught]
                new |= {query_id: Answer(label) for query_id, label in done.taught.items()}
                expired = self.questions.settle(new, learned, stale, out.number, now)
            except BaseException:
                # Memory has run out, say. The graph may be used up: learned again, the batch takes a new forward.
                undo()
                if updates:
                    batch.redo = batch.redo if batch.forward is None else self.engine.failed(batch.forward)
                    batch.drop_graph()
                raise
        out._unlearned, out._learned = None, True
        self._latest = None if self._latest is out else self._latest
        return Step.of(
            out,
            batch,
            self.policy,
            learned=tuple(learned),
            late=sum(item.query.batch != out.number for item in todo),
            stale=tuple(stale),
            expired=tuple(expired),
            counts=self.questions.counts,
            losses=done.losses,
            work=self.classifier.work - (work - batch.work),
            seconds=batch.seconds + time.perf_counter() - began,
            tripped=done.tripped,
        )

    def _update(self, out: Prediction, batch: Unlearned, todo: Sequence[Asked]) -> Learned:
        """Learn from a batch and the labels that are due with it; where the guard trips, from its last good state."""
        forward, redo, tripped = batch.forward, batch.redo, batch.tripped
        if self.guard is not None and out.view is not None and tripped is None:
            tripped = self.guard.check(out.view, batch.inputs)
            forward, redo = (forward, redo) if tripped is None else (None, None)
        if forward is None or (self.update.needs_graph and not forward.logits.requires_grad):
            forward = self.engine.again(batch.inputs, redo)
        taught = self.update.consult(forward, self.open, len(out.sent)) if self.questions.taught else {}
        labels = labelling.labels(todo, forward, out.number, self._number, self.questions)
        return Learned(forward, self.update.learn(forward, labels), taught, tripped)

    def _follow(self, batch: Unlearned, forward: Forward | None) -> None:
        """Let moving statistics and the anchor follow."""
        self.classifier.commit(batch.statistics if forward is None else forward.statistics)
        if self.anchor is not None and not self.update.moves_anchor:
            self.anchor.follow(self.classifier.live)

    def step(self, x: Inputs | Batch) -> Prediction:
        """Predict on a batch, hand its questions to the annotator, and learn from what has been answered.

        Where annotator or `learn` fails, the prediction is `latest`. No label is lost, and `learn` can still take it.
        """
        taught = self.questions.taught
        if self.annotator is None and self._asks and not taught:
            raise errors.BadConfig("step needs an annotator to answer: give one, or use predict and learn")
        with self._lock:
            out = self.predict(x)
            try:
                if self.annotator is not None and not taught:
                    self.questions.hand_over(out.queries, self._number)
                    self.questions.collect(self._number)
                self.learn(out)
            except Exception as error:
                if self._latest is out:
                    error.add_note(
                        f"Batch {out.number} is predicted and was not learned: adapter.latest is its prediction, and "
                        "adapter.learn(adapter.latest) learns it with the answers that have come."
                    )
                raise
            return out


def _check(labels: int | None, guard: object) -> None:
    if labels is not None and labels < 1:
        raise errors.BadConfig(f"labels (a batch) must be at least 1, not {labels}")
    if guard is not None and not isinstance(guard, Guard):
        raise errors.BadConfig(f"guard must be a Guard, True or None, not {guard!r}")
