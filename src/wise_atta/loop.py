"""The loop that every method follows: predict, ask, learn."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wise_atta import errors, saving
from wise_atta.anchor import Anchor
from wise_atta.engine.ahead import Ahead
from wise_atta.engine.direct import Direct, Seen, all_finite
from wise_atta.guard import Guard
from wise_atta.how import Labels, Late, Update, remember
from wise_atta.model import Classifier, Forward, Statistics
from wise_atta.prediction import Prediction, Step, Unlearned
from wise_atta.stream import Batch, Inputs, tree_map
from wise_atta.what import Drift, Selector
from wise_atta.when import Count, Never, Policy, Utility
from wise_atta.who import Annotator, Answer, Answered, AnswerLike, Counts, Query, Questions, as_batch


class Adapter:
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
        classifier: Classifier,
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
        if labels is not None and labels < 1:
            raise errors.BadConfig(f"labels (a batch) must be at least 1, not {labels}")
        if guard is not None and not isinstance(guard, Guard):
            raise errors.BadConfig(f"guard must be a Guard, True or None, not {guard!r}")
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
        self.questions.start(self.policy.refund, update.teacher_cost)
        if anchor is not None:
            anchor.start(classifier.live)
        if guard is not None:
            guard.start(classifier, update, anchor)
        engine = Ahead if classifier.quick else Direct
        self.engine = engine(classifier, anchor, update, self.policy, self.utility, self.selector, self.questions)
        self._number = 0
        self._age = 0
        self._frozen = False
        self._latest: Prediction | None = None
        self._callbacks: list[Callable[[Step], None]] = []
        self._lock = threading.RLock()
        self._half_done = False

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
                if self.guard is None or not all_finite(batch.inputs):
                    raise
                self.guard.rescue(self._number + 1)
                return self._predict(batch, count, ask, learn, tripped=str(error))

    def _infer(self, batch: Batch) -> Prediction:
        forward = self._answering(batch.inputs)
        logits = forward.logits if self.shadow else self.update.output(forward)
        (finite,) = self.classifier.send(all_finite(batch.inputs, forward.logits).double().unsqueeze(0))()
        self._require_finite(batch.inputs, bool(finite))
        return Prediction(logits, spent=self.policy.spent, allowed=self.policy.allowed)

    def _predict(self, batch: Batch, count: int, ask: bool, learn: bool, tripped: str | None = None) -> Prediction:
        began, work = time.perf_counter(), replace(self.classifier.work)
        want = (count if self.labels is None else min(self.labels, count)) if ask else 0
        self._drop_graph()
        seen = self.engine.look(batch.inputs, self._number + 1, self._age + 1, want=want, count=count, learn=learn)
        # Questions of earlier batches that still wait move to the host: here, where the device has nothing to do.
        self.questions.keep()
        self._require_finite(batch.inputs, seen.finite)
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
        if learn:
            # A policy of one's own may grant what it did not foresee: then the forward is repeated, with its graph.
            usable = forward if not queries or forward.notes is None or forward.notes.early is None else None
            out._unlearned = Unlearned(
                owner=self,
                inputs=batch.inputs,
                forward=usable,
                asked=tuple(query.id for query in queries),
                decision=self.policy.last,
                tripped=tripped,
                work=self.classifier.work - work,
                seconds=time.perf_counter() - began,
            )
            self._latest = out
        return out

    def _ask(self, batch: Batch, seen: Seen, want: int, count: int) -> list[Query]:
        """Decide how many questions this batch is worth, and ask them about the samples that the selector picks."""
        free = self.questions.free
        granted = want if free else self.policy.decide(seen.score, want=want, samples=count)
        before = self.selector.state_dict()
        try:
            rows = self.engine.pick(seen, granted) if granted else []
            if len(rows) > granted:
                raise errors.BadConfig(
                    f"the selector {type(self.selector).__name__} picked {len(rows)} samples where the budget grants "
                    f"{granted}: pick(view, k) gives at most k rows"
                )
            queries = self.questions.about(batch, self._number + 1, rows, seen.view.logits)
            self.questions.ask(queries, [self._context(seen.forward)] * len(queries))
        except BaseException:
            if not free:
                self.policy.undo()
            self.selector.load_state_dict(before)
            raise
        if len(queries) < granted and not free:
            self.policy.refund(granted - len(queries))
        return queries

    def _answering(self, inputs: Inputs) -> Forward:
        if self.shadow:
            return self.classifier.forward(inputs, version=self.classifier.source(), statistics="source")
        return self.classifier.forward(inputs)

    def _drop_graph(self) -> None:
        """At most one graph is alive: an older prediction keeps its input, and `learn` repeats its forward."""
        if self._latest is not None and self._latest._unlearned is not None:
            self._latest._unlearned.drop_graph()
            self._latest._unlearned.redo = None
        self._latest = None

    def _require_finite(self, inputs: Inputs, finite: bool) -> None:
        if finite:
            return
        if not all_finite(inputs):
            raise errors.NotFinite("the inputs hold NaN or Inf: clean them before they reach the model")
        if torch.equal(self.classifier.live.flat, self.classifier.source_flat()):
            raise errors.NotFinite(
                "the logits hold NaN or Inf although the inputs do not, and the adapted tensors are the source's: the "
                "model itself gives them. To leave classes out, name the others with classes=… and mask none with -inf"
            )
        raise errors.NotFinite(
            "the logits hold NaN or Inf although the inputs do not: if the source model is sound, the adapted tensors "
            "have diverged; call reset() and lower the learning rate"
        )

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
        batch = self._unlearned(out)
        new = self.questions.read(answers)
        todo, stale = ([], []) if self._frozen else self.questions.due(new, out.number, now)
        updates = not self._frozen and bool(not self.update.only_selected or batch.asked or todo)
        forward, tripped = batch.forward, batch.tripped
        losses: dict[str, Tensor] = {}
        taught: dict[str, int] = {}
        undo = remember(self.classifier, self.update, self.anchor, self.guard)
        try:
            if updates:
                redo = batch.redo
                if self.guard is not None and tripped is None and out.view is not None:
                    tripped = self.guard.check(out.view, batch.inputs)
                    forward, redo = (forward, redo) if tripped is None else (None, None)
                if forward is None or (self.update.needs_graph and not forward.logits.requires_grad):
                    forward = self.engine.again(batch.inputs, redo)
                if self.questions.taught:
                    taught = self.update.consult(forward, self.open, len(out.sent))
                losses = self.update.learn(forward, self._labels(todo, forward, out.number))
            if not self._frozen:
                self.classifier.commit(batch.statistics if forward is None else forward.statistics)
            if self.anchor is not None and not self._frozen and not self.update.moves_anchor:
                self.anchor.follow(self.classifier.live)
            learned = [*(item.id for item in todo), *taught] if updates else []
            new |= {query_id: Answer(label) for query_id, label in taught.items()}
            expired = self.questions.settle(new, learned, stale, out.number, now)
        except BaseException:
            # Memory has run out, say. The graph may be used up: learned again, the batch takes a new forward.
            undo()
            if updates:
                batch.redo = batch.redo if batch.forward is None else self.engine.failed(batch.forward)
                batch.drop_graph()
            raise
        out._unlearned, out._learned = None, True
        if self._latest is out:
            self._latest = None
        return Step(
            number=out.number,
            samples=len(out),
            utility=out.utility,
            threshold=batch.decision.threshold,
            rate=batch.decision.rate,
            debt=batch.decision.debt,
            asked=batch.asked,
            learned=tuple(learned),
            late=sum(item.query.batch != out.number for item in todo) if updates else 0,
            stale=tuple(stale),
            expired=tuple(expired),
            spent=self.policy.spent,
            allowed=self.policy.allowed,
            counts=self.counts,
            losses=losses,
            work=self.classifier.work - work + batch.work,
            seconds=batch.seconds + time.perf_counter() - began,
            tripped=tripped,
        )

    def _unlearned(self, out: Prediction) -> Unlearned:
        """What `learn` needs of a prediction, or why it cannot be learned."""
        if out._learned:
            raise errors.AlreadyLearned(f"batch {out.number} was learned already: call predict again for a new batch")
        batch = out._unlearned
        if batch is None and self._frozen:
            return Unlearned(self, out.logits, None)
        if batch is None or batch.owner is not self:
            raise errors.BadInput("this prediction cannot be learned: it came from plain inference or another adapter")
        return batch

    @contextlib.contextmanager
    def _amid(self) -> Iterator[None]:
        """Within this nothing can be saved: what belongs together is changed one by one."""
        self._half_done = True
        try:
            yield
        finally:
            self._half_done = False

    def _context(self, forward: Forward) -> dict[str, Any] | None:
        """What a late label's sample is normalised with."""
        used = forward.statistics if self.questions.context == "own" else None
        return None if used is None else {"values": used.values, "batch": used.batch}

    def _labels(self, todo: Sequence[Answered], forward: Forward, number: int) -> Labels:
        """The labels of this batch, read off its forward, and those of earlier ones, each with its own input."""
        prompt = [item for item in todo if item.query.batch == number]
        late = [item for item in todo if item.query.batch != number]
        return Labels(
            rows=[item.query.index for item in prompt],
            labels=[item.label for item in prompt],
            weights=[item.answer.weight for item in prompt],
            places=[(item.query.batch, item.query.index) for item in (*prompt, *late)],
            late=[self._late(item, forward) for item in late],
        )

    def _late(self, item: Answered, forward: Forward) -> Late:
        inputs = tree_map(lambda leaf: leaf.to(self.classifier.device), as_batch(item.query))
        statistics: Statistics | Literal["source"] | None = forward.statistics
        if self.questions.context == "source":
            statistics = "source"
        elif self.questions.context == "own" and item.context is not None:
            statistics = Statistics(item.context["values"].to(self.classifier.device), item.context["batch"])
        return Late(inputs, item.label, self.questions.weight_of(item, self._number), statistics)

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

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def annotator(self) -> Annotator | None:
        """Who answers in `step`."""
        return self.questions.annotator

    @annotator.setter
    def annotator(self, annotator: Annotator | None) -> None:
        self.questions.annotator = annotator

    def answer(self, answers: Mapping[str, AnswerLike]) -> None:
        """Record answers without a batch at hand. Their labels are learned with the next `learn`."""
        with self._lock:
            self.questions.answer(answers)

    def show(self, ids: Sequence[str]) -> None:
        """Note that somebody has seen these questions: they stay charged even if they expire."""
        with self._lock:
            self.questions.show(ids)

    def give_up(self, ids: Sequence[str]) -> None:
        """Close open questions without an answer. The labels of those that nobody has seen return to the account."""
        with self._lock:
            self.questions.give_up(ids)

    @property
    def counts(self) -> Counts:
        """How many questions were asked, shown, answered, learned, not tellable and expired."""
        return self.questions.counts

    @property
    def open(self) -> list[Query]:
        """Questions that wait for an answer, oldest first."""
        return self.questions.open

    # -- looking at it ------------------------------------------------------------------------------------------

    @property
    def latest(self) -> Prediction | None:
        """The latest prediction that waits for `learn`, if any: after a `step` that failed, the one of its batch."""
        return self._latest

    @property
    def number(self) -> int:
        """How many batches it has seen."""
        return self._number

    def on_step(self, callback: Callable[[Step], None]) -> None:
        """Call `callback(step)` after every `learn`."""
        self._callbacks.append(callback)

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name}={getattr(self, name)!r}" for name in ("classifier", "policy", "utility", "selector", "update")
        )
        return f"Adapter({parts})"

    # -- steering it --------------------------------------------------------------------------------------------

    def freeze(self, frozen: bool = True) -> None:
        """Stop asking and learning (or go on). Answers that arrive meanwhile are kept and learned later."""
        with self._lock:
            self._frozen = frozen

    def export(self) -> nn.Module:
        """A plain `nn.Module` with the adapted weights, for the same inputs as the original."""
        with self._lock:
            return self.classifier.export(self.update.predicts())

    def reset(self, *, model: bool = True, policy: bool = False, account: bool = False) -> None:
        """Return to the source.

        Parameters
        ----------
        model
            Tensors, anchor, optimizer and running quantities.
        policy
            What the policy remembers of past scores.
        account
            The labels spent and earned, and with them every open question.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if model:
                self.update.reset()
                self.classifier.reset_statistics()
                self._drop_graph()
                self._begin()
            self._forget(policy, account)

    def restart(self, *, policy: bool = True, account: bool = True) -> None:
        """Let anchor and selector begin anew at the current tensors, as the published code does at a new domain."""
        with self._lock:
            self._begin()
            self._forget(policy, account)

    def _begin(self) -> None:
        self._age = 0
        self.selector.reset()
        if self.anchor is not None:
            self.anchor.start(self.classifier.live)
        if self.guard is not None:
            self.guard.reset()

    def _forget(self, policy: bool, account: bool) -> None:
        self.policy.reset(history=policy, account=account)
        if account:
            self.questions.reset()

    # -- keeping it ---------------------------------------------------------------------------------------------

    def __reduce__(self) -> Any:
        raise errors.WiseAttaError(
            "an adapter is neither copied nor pickled: make another around the same model with the same options, and "
            "load_state_dict() there what state_dict() gives here"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on to the same bits: about three times the adapted tensors, never the model."""
        with self._lock:
            if self._half_done:
                # Another thread has waited for the lock: only a handler of signals comes in the middle.
                raise errors.WiseAttaError(
                    "a state cannot be saved in the middle of predict or learn, where a signal has interrupted them: "
                    "let the handler set a flag, and save when the call is done"
                )
            return saving.state_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. A state of another model, method or version is refused and changes nothing."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            saving.load(self, state)
            self._drop_graph()
