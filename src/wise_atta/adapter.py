"""The loop that every method follows: predict, ask, learn."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from wise_atta import errors, signals
from wise_atta.anchor import Anchor
from wise_atta.engine import host
from wise_atta.guard import Guard
from wise_atta.how import Labels, Late, Update, remember
from wise_atta.model import Classifier, Forward, Statistics, Work
from wise_atta.stream import Batch, Inputs, leaves, tree_map
from wise_atta.view import View
from wise_atta.what import Drift, Selector
from wise_atta.when import Count, Decision, Never, Policy, Utility
from wise_atta.who import Annotator, Answered, AnswerLike, Counts, Desk, Query, as_batch

Context: TypeAlias = Literal["own", "current", "source"]
_VERSION = 1
# Late labels that are learned with one batch, each by a forward and a graph of its own; the others wait for the next.
_LATE = 8


@dataclass(eq=False)
class Prediction:
    """What `predict` gives. It owns its forward; `learn` consumes it once.

    Attributes
    ----------
    logits
        [n, C], computed before any update on this batch, detached.
    queries
        The questions about this batch, at most what the budget allows; often empty.
    sent
        The same where the method has a teacher of its own: it answers them, nobody else is asked.
    utility
        The batch's score, or NaN if none was computed.
    spent
        Labels charged so far.
    allowed
        How many could have been.
    number
        Of the batch, from 1; 0 after plain inference.
    view
        The batch as the model saw it; None after plain inference.
    """

    logits: Tensor
    queries: list[Query] = field(default_factory=list)
    sent: list[Query] = field(default_factory=list)
    utility: float = float("nan")
    spent: int = 0
    allowed: float = 0
    number: int = 0
    view: View | None = field(default=None, repr=False)
    _inputs: Inputs | None = field(default=None, repr=False)
    _forward: Forward | None = field(default=None, repr=False)
    _statistics: Statistics | None = field(default=None, repr=False)
    # Of a forward that `learn` failed with, where its objective was prepared: whether its update was begun early, too.
    _begun: bool | None = field(default=None, repr=False)
    _owner: Adapter | None = field(default=None, repr=False)
    _decision: Decision = field(default_factory=Decision, repr=False)
    _learned: bool = field(default=False, repr=False)
    _tripped: str | None = field(default=None, repr=False)
    _seconds: float = field(default=0.0, repr=False)
    _work: Work = field(default_factory=Work, repr=False)

    def __len__(self) -> int:
        return len(self.logits)


@dataclass(frozen=True)
class Step:
    """What happened with one batch, for records and callbacks.

    Attributes
    ----------
    number
        Of the batch, from 1.
    samples
        How many it had.
    utility
        Its score, or NaN if none was computed.
    threshold
        The score from which on a batch was selected; it, `rate` and `debt` are the policy's `Decision`.
    rate
        The share of batches that was to be selected at that moment.
    debt
        The labels by which the policy was behind before it decided.
    asked
        The questions about this batch.
    learned
        The questions whose labels were learned with it.
    late
        How many of those were about earlier batches.
    stale
        Labels that came too late to be learned.
    expired
        Questions that were closed without an answer.
    spent
        Labels charged so far.
    allowed
        How many could have been.
    counts
        How many questions came how far, of all batches.
    losses
        Tensors, read only by who wants them; `skipped` is 1 where nothing in the batch was worth a step.
    work
        How often the network was run.
    seconds
        How long `predict` and `learn` took.
    tripped
        Why the guard went back to a good state, where it did.
    """

    number: int
    samples: int
    utility: float
    threshold: float
    rate: float
    debt: float
    asked: tuple[str, ...]
    learned: tuple[str, ...]
    late: int
    stale: tuple[str, ...]
    expired: tuple[str, ...]
    spent: int
    allowed: float
    counts: Counts
    losses: Mapping[str, Tensor]
    work: Work
    seconds: float
    tripped: str | None = None


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
    annotator
        Who answers, for `step`. With `predict` and `learn` the caller does. Not asked where `update` has a teacher.
    anchor
        The slow copy that drift is measured against; made if a part needs it.
    context
        How a late label's sample is normalised in BatchNorm nets: with the statistics of its ``"own"`` batch, of the
        ``"current"`` batch, or of the ``"source"``.
    late_weight
        The age, in batches, at which a late label counts half: at age a its loss is weighted by 1/(1 + a/late_weight).
        None: all count alike.
    late_limit
        A label more than so many batches old is recorded and stays charged, but is not learned. None: all are learned.
        Of many that come at once, eight are learned with each batch: every one takes a forward and a graph of its own.
    expires_after
        Number of batches after which `learn` drops an open question; None keeps it open.
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
        annotator: Annotator | None = None,
        anchor: Anchor | None = None,
        context: Context = "own",
        late_weight: float | None = None,
        late_limit: int | None = None,
        expires_after: int | None = None,
        shadow: bool = False,
        guard: Guard | None = None,
    ) -> None:
        if context not in get_args(Context):
            raise errors.unknown("context", context, get_args(Context))
        if labels is not None and labels < 1:
            raise errors.BadConfig(f"labels (a batch) must be at least 1, not {labels}")
        if late_weight is not None and not 0 < late_weight < math.inf:
            raise errors.BadConfig(f"late_weight must be None or an age above 0 batches, not {late_weight}")
        for name, batches in (("late_limit", late_limit), ("expires_after", expires_after)):
            if batches is not None and batches < 0:
                raise errors.BadConfig(f"{name} must be None or 0 batches or more, not {batches}")
        if annotator is not None and not isinstance(annotator, Annotator):
            raise errors.BadConfig(
                f"annotator={annotator!r} is no annotator: wrap a function (question → answer) in who.Callback"
            )
        if guard is not None and not isinstance(guard, Guard):
            raise errors.BadConfig(f"guard must be a Guard, True or None, not {guard!r}")
        self.classifier = classifier
        self.update = update
        self.policy = Never() if policy is None else policy
        self.utility = Count() if utility is None else utility
        self.selector = Drift() if selector is None else selector
        self.labels = labels
        self.annotator = annotator
        self.context: Context = context
        self.late_weight = late_weight
        self.late_limit = late_limit
        self.expires_after = expires_after
        self.shadow = shadow
        asks = not isinstance(self.policy, Never)
        if anchor is None and asks and (self.utility.needs_anchor or self.selector.needs_anchor):
            anchor = Anchor()
        self.anchor = anchor
        classifier.repeats = anchor is not None or update.runs_again
        update.start(classifier, anchor)
        if anchor is not None:
            anchor.start(classifier.live)
        self.guard = guard
        if guard is not None:
            guard.start(classifier, update, anchor)
        self._asks = asks
        self._number = 0
        self._age = 0
        self._frozen = False
        self._desk: Desk | None = None
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
                if self.guard is None or not _finite(batch.inputs):
                    raise
                self.guard.rescue(self._number + 1)
                out = self._predict(batch, count, ask, learn)
                out._tripped = str(error)
                return out

    def _infer(self, batch: Batch) -> Prediction:
        forward = self._answering(batch.inputs)
        logits = forward.logits if self.shadow else self.update.output(forward)
        (all_finite,) = self._send(_all_finite(batch.inputs, forward.logits).double().unsqueeze(0))()
        self._require_finite(batch.inputs, logits, bool(all_finite))
        return Prediction(logits, spent=self.policy.spent, allowed=self.policy.allowed)

    def _predict(self, batch: Batch, count: int, ask: bool, learn: bool) -> Prediction:
        began, work = time.perf_counter(), replace(self.classifier.work)
        want = (count if self.labels is None else min(self.labels, count)) if ask else 0
        least, most = self._foresee(want, count)
        # Where only selected batches learn, it is not known yet whether this one will. On an accelerator a graph takes
        # memory but no time, so it is kept just in case; on a CPU fresh memory costs time too.
        unsure = self.update.only_selected and (most == 0 or self.classifier.device.type == "cpu")
        graph = learn and self.update.needs_graph and not unsure
        self._drop_graph()
        # It is certain that nothing but the batch itself will be learned, if it is.
        alone = most == 0 and (self._desk is None or self._desk.clear)
        forward = self.classifier.forward(batch.inputs, grad=graph, keep=not alone or self.update.needs_statistics)
        logits = forward.logits.detach()
        number = self._number + 1
        view = self._view(number, forward)
        # The one copy to the host of this batch: whether all is finite, the score, and what is worth learning from.
        finite = _all_finite(batch.inputs, logits)
        numbers = [finite.double(), *([self.utility(view).double()] if ask else [])]
        prepared = None
        if graph and self.classifier.quick and self.update.objective is not None:
            prepared = forward.prepared = self.update.objective.prepare(logits)
        sent = torch.stack(numbers)
        if prepared is not None:
            sent = torch.cat([sent, prepared.keep.to(sent)])
        ranked = self._ranking() if least else None
        if ranked is not None:
            # It is certain that questions will be asked: the scores of the samples go along.
            sent = torch.cat([sent, ranked.scores(view).to(sent)])
        arrived = self._send(sent)
        if prepared is not None and alone:
            # The device need not wait for the host.
            self.update.start_early(forward)
            forward.first = None
        read = arrived()
        if self._desk is not None:
            # Questions of earlier batches that still wait move to the host: here, where the device has nothing to do.
            self._desk.keep()
        all_finite, score = read[0], read[1] if ask else float("nan")
        scores = len(numbers) if prepared is None else len(numbers) + count
        if prepared is not None:
            prepared.kept = read[len(numbers) : scores]
        self._require_finite(batch.inputs, logits, bool(all_finite))
        scored = self._answering(batch.inputs).logits if self.shadow else self.update.output(forward)
        # A copy: what the caller does to it must not reach what is learned.
        scored = scored.clone()

        queries: list[Query] = []
        if ask:
            granted = want if self._free else self.policy.decide(score, want=want, samples=count)
            before = self.selector.state_dict()
            try:
                if granted and ranked is not None:
                    rows = ranked.best(view, granted, read[scores:])
                else:
                    rows = self.selector.pick(view, granted) if granted else []
                if len(rows) > granted:
                    raise errors.BadConfig(
                        f"the selector {type(self.selector).__name__} picked {len(rows)} samples where the budget "
                        f"grants {granted}: pick(view, k) gives at most k rows"
                    )
                context = self._context(forward) if rows else None
                queries = self._questions(batch, number, rows, logits)
                self._ask(queries, context, logits.shape[1])
            except BaseException:
                if not self._free:
                    self.policy.undo()
                self.selector.load_state_dict(before)
                raise
            if len(queries) < granted and not self._free:
                self.policy.refund(granted - len(queries))
        self._number = number
        self._age += 1
        out = Prediction(
            logits=scored,
            queries=[] if self._taught else queries,
            sent=queries if self._taught else [],
            utility=score,
            spent=self.policy.spent,
            allowed=self.policy.allowed,
            number=number,
            view=view,
        )
        if learn:
            # A policy of one's own may grant what it did not foresee: then the forward is repeated, with its graph.
            out._forward = None if queries and forward.early is not None else forward
            out._inputs, out._owner = batch.inputs, self
            self._latest = out
        if ask:
            out._decision = self.policy.last
        out._work = self.classifier.work - work
        out._seconds = time.perf_counter() - began
        return out

    def _foresee(self, want: int, count: int) -> tuple[int, int]:
        """The fewest and the most questions that this batch can bring, as far as it pays to know."""
        if not self.classifier.quick or want == 0:
            return 0, want
        return (want, want) if self._free else self.policy.foresee(want, samples=count)

    def _ranking(self) -> Selector | None:
        """The selector, if it is one that picks by its scores alone and these may be worked out ahead."""
        known = isinstance(self.selector, Selector) and type(self.selector).pick is Selector.pick
        return self.selector if known else None

    def _send(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Set numbers on their way to the host: whether all is finite, the score, … What is given waits for them."""
        (places,), wait = host.send([numbers])

        def arrived() -> list[float]:
            wait()
            read: list[float] = places.tolist()
            return read

        return arrived

    def _questions(self, batch: Batch, number: int, rows: Sequence[int], logits: Tensor) -> list[Query]:
        return [Query.of(batch, number, row, logits) for row in rows]

    def _view(self, number: int, forward: Forward) -> View:
        # The closures must not hold the forward: a view may outlive its graph.
        inputs, version, alive = forward.inputs, forward.version, weakref.ref(forward)
        anchor_now = None if self.anchor is None else self.anchor.now()

        def anchor_logits() -> Tensor:
            if anchor_now is None:
                raise errors.BadConfig("drift needs an anchor: give the adapter anchor=Anchor()")
            return self.classifier.forward(inputs, version=anchor_now(), keep=False, beside=alive()).logits

        return View(
            number,
            forward.logits.detach(),
            forward.features.detach(),
            head=lambda features: self.classifier.head(features, version),
            anchor=anchor_logits,
            age=self._age + 1,
        )

    def _answering(self, inputs: Inputs) -> Forward:
        if self.shadow:
            return self.classifier.forward(inputs, version=self.classifier.source(), statistics="source")
        return self.classifier.forward(inputs)

    def _context(self, forward: Forward) -> dict[str, Any] | None:
        """What a late label's sample is normalised with."""
        used = forward.statistics if self.context == "own" else None
        return None if used is None else {"values": used.values, "batch": used.batch}

    def _ask(self, queries: Sequence[Query], context: dict[str, Any] | None, classes: int) -> None:
        if self._desk is None:
            self._desk = Desk(classes, expires_after=self.expires_after)
        if queries:
            self._desk.ask(queries, [context] * len(queries))

    def _drop_graph(self) -> None:
        """At most one graph is alive: an older prediction keeps its input, and `learn` repeats its forward."""
        if self._latest is not None:
            self._let_go(self._latest)
            self._latest._begun = None
            self._latest = None

    def _let_go(self, out: Prediction) -> None:
        """Drop the graph of a prediction; its statistics are still to move the average."""
        if out._forward is not None:
            out._statistics = out._forward.statistics
        out._forward = None

    def _require_finite(self, inputs: Inputs, logits: Tensor, finite: bool) -> None:
        if finite:
            return
        if not _finite(inputs):
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
        began, work = time.perf_counter(), replace(self.classifier.work)
        if out._learned:
            raise errors.AlreadyLearned(f"batch {out.number} was learned already: call predict again for a new batch")
        if out._owner is not self and not (self._frozen and out._owner is None):
            raise errors.BadInput("this prediction cannot be learned: it came from plain inference or another adapter")
        new = self._checked(answers)
        todo, stale = self._sift(out, [*self._pending(), *new])
        asked = [*out.queries, *out.sent]
        updates = not self._frozen and (not self.update.only_selected or bool(asked) or bool(todo))
        losses: dict[str, Tensor] = {}
        taught: dict[str, int] = {}
        forward = out._forward
        tripped = out._tripped
        undo = remember(self.classifier, self.update, self.anchor, self.guard)
        try:
            if updates:
                assert out._inputs is not None and out.view is not None
                begun = out._begun
                if self.guard is not None and tripped is None:
                    tripped = self.guard.check(out.view, out._inputs)
                    forward, begun = (forward, begun) if tripped is None else (None, None)
                if forward is None or (self.update.needs_graph and not forward.logits.requires_grad):
                    forward = self.classifier.forward(out._inputs, grad=self.update.needs_graph)
                    if begun is not None:
                        self._begin_again(forward, early=begun)
                taught = self.update.consult(forward, self.open, len(out.sent)) if self._taught else {}
                answers = {**answers, **taught}
                losses = self.update.learn(forward, self._labels(out, forward, todo))
            if not self._frozen:
                self.classifier.commit(out._statistics if forward is None else forward.statistics)
            if self.anchor is not None and not self._frozen and not self.update.moves_anchor:
                self.anchor.follow(self.classifier.live)
            learned = [*(item.id for item in todo), *taught] if updates else []
            expired = self._settle(out.number, answers, learned, stale)
        except BaseException:
            # Memory has run out, say. The graph may be used up: learned again, the batch takes a new forward.
            undo()
            if updates:
                if out._forward is not None and out._forward.prepared is not None:
                    out._begun = out._forward.early is not None
                self._let_go(out)
            raise
        out._inputs = out._forward = out._statistics = out._owner = None
        out._learned = True
        if self._latest is out:
            self._latest = None
        last = out._decision
        done = self.classifier.work - work
        return Step(
            number=out.number,
            samples=len(out),
            utility=out.utility,
            threshold=last.threshold,
            rate=last.rate,
            debt=last.debt,
            asked=tuple(query.id for query in asked),
            learned=tuple(learned),
            late=sum(item.query.batch != out.number for item in todo) if updates else 0,
            stale=tuple(stale),
            expired=tuple(expired),
            spent=self.policy.spent,
            allowed=self.policy.allowed,
            counts=self.counts,
            losses=losses,
            work=Work(
                done.forwards + out._work.forwards,
                done.gradient_forwards + out._work.gradient_forwards,
                done.backwards + out._work.backwards,
            ),
            seconds=out._seconds + time.perf_counter() - began,
            tripped=tripped,
        )

    def _begin_again(self, forward: Forward, early: bool) -> None:
        """Do with a forward what `predict` did with one that failed: its sums are taken in that order again."""
        assert self.update.objective is not None
        with torch.no_grad():
            prepared = forward.prepared = self.update.objective.prepare(forward.logits.detach())
            if early:
                self.update.start_early(forward)
        assert prepared is not None
        prepared.kept = prepared.keep.double().tolist()

    @contextlib.contextmanager
    def _amid(self) -> Iterator[None]:
        """Within this nothing can be saved: what belongs together is changed one by one."""
        self._half_done = True
        try:
            yield
        finally:
            self._half_done = False

    def _sift(self, out: Prediction, answered: list[Answered]) -> tuple[list[Answered], list[str]]:
        """The labels to learn now, and the ids of those that came too late for it. Frozen, it is not settled yet."""
        if self._frozen:
            return answered, []
        limit = math.inf if self.late_limit is None else self.late_limit
        late = [item for item in answered if item.query.batch != out.number]
        stale = [item.id for item in late if item.age_at(self._number) > limit]
        # What is learned again grows no older by waiting, so what is new goes first.
        timely = sorted((item for item in late if item.age_at(self._number) <= limit), key=lambda i: i.age is not None)
        left = {*stale, *(item.id for item in timely[_LATE:])}
        return [item for item in answered if item.id not in left], stale

    def _labels(self, out: Prediction, forward: Forward, todo: Sequence[Answered]) -> Labels:
        prompt = [item for item in todo if item.query.batch == out.number]
        late = [item for item in todo if item.query.batch != out.number]
        return Labels(
            rows=[item.query.index for item in prompt],
            labels=[item.label for item in prompt],
            weights=[item.answer.weight for item in prompt],
            places=[(item.query.batch, item.query.index) for item in (*prompt, *late)],
            late=[self._late(item, forward) for item in late],
        )

    def _late(self, item: Answered, forward: Forward) -> Late:
        inputs = tree_map(lambda leaf: leaf.to(self.classifier.device), as_batch(item.query))
        statistics: Statistics | Literal["source"] | None
        if self.context == "source":
            statistics = "source"
        elif self.context == "own" and item.context is not None:
            values = item.context["values"].to(self.classifier.device)
            statistics = Statistics(values, item.context["batch"])
        else:
            statistics = forward.statistics
        weight = item.answer.weight
        if self.late_weight is not None:
            weight /= 1 + item.age_at(self._number) / self.late_weight
        return Late(inputs, item.label, weight, statistics)

    def _checked(self, answers: Mapping[str, AnswerLike]) -> list[Answered]:
        if answers and self._taught:
            raise errors.BadInput("the method's own teacher answers its questions: give it no answers")
        if self._desk is not None:
            return self._desk.check(answers)
        if answers:
            raise _never_asked(next(iter(answers)))
        return []

    def _pending(self) -> list[Answered]:
        return [] if self._desk is None else self._desk.pending

    def _settle(
        self, number: int, answers: Mapping[str, AnswerLike], learned: Sequence[str], stale: Sequence[str]
    ) -> list[str]:
        if self._desk is None:
            return []
        if answers:
            self._desk.answer(answers)
        if learned:
            self._desk.learned(learned, self._number)
        if stale:
            self._desk.dismiss(stale)
        expired, unseen = self._desk.expire(number)
        self._refund(unseen)
        return expired

    def _refund(self, labels: int) -> None:
        if labels and not self._free:
            self.policy.refund(labels)

    def answer(self, answers: Mapping[str, AnswerLike]) -> None:
        """Record answers without a batch at hand. Their labels are learned with the next `learn`."""
        with self._lock:
            self._checked(answers)
            if self._desk is not None:
                self._desk.answer(answers)

    def show(self, ids: Sequence[str]) -> None:
        """Note that somebody has seen these questions: they stay charged even if they expire."""
        with self._lock:
            if self._desk is not None:
                self._desk.show(ids)
            elif ids:
                raise _never_asked(ids[0])

    def give_up(self, ids: Sequence[str]) -> None:
        """Close open questions without an answer. The labels of those that nobody has seen return to the account."""
        with self._lock:
            if self._desk is not None:
                self._refund(self._desk.give_up(ids))
            elif ids:
                raise _never_asked(ids[0])

    def step(self, x: Inputs | Batch) -> Prediction:
        """Predict on a batch, hand its questions to the annotator, and learn from what has been answered.

        Where annotator or `learn` fails, the prediction is `latest`. No label is lost, and `learn` can still take it.
        """
        if self.annotator is None and self._asks and not self._taught:
            raise errors.BadConfig("step needs an annotator to answer: give one, or use predict and learn")
        with self._lock:
            out = self.predict(x)
            try:
                if self.annotator is not None and not self._taught:
                    self._hand_over(out.queries)
                    closing = [] if self._desk is None else self._desk.closing(self._number)
                    # An annotator hands each answer over once, so it is recorded before anything else can fail.
                    self._record(self.annotator.answers(self._number, last=closing))
                    self.show(self.annotator.shown(self._number))
                self.learn(out)
            except Exception as error:
                if self._latest is out:
                    error.add_note(
                        f"Batch {out.number} is predicted and was not learned: adapter.latest is its prediction, and "
                        "adapter.learn(adapter.latest) learns it with the answers that have come."
                    )
                raise
            return out

    def _hand_over(self, queries: Sequence[Query]) -> None:
        assert self.annotator is not None
        try:
            self.annotator.ask(queries, self._number)
        except BaseException:
            # Nobody has them: no label is spent.
            if self._desk is not None:
                self._desk.withdraw([query.id for query in queries])
            self._refund(len(queries))
            raise

    def _record(self, answers: Mapping[str, AnswerLike]) -> None:
        """Record an annotator's answers one by one: that one is refused costs no other."""
        refused: list[errors.WiseAttaError] = []
        for query_id, answer in answers.items():
            # After a `learn` by hand an annotator does not know yet that a question has expired.
            if self._desk is not None and self._desk.has_expired(query_id):
                continue
            try:
                self.answer({query_id: answer})
            except errors.WiseAttaError as error:
                refused.append(error)
        if refused:
            raise refused[0]

    @property
    def _taught(self) -> bool:
        """Whether the method has a teacher of its own, who answers in `learn` when it is time."""
        return self.update.teacher_cost is not None

    @property
    def _free(self) -> bool:
        """Labels that cost nothing are not rationed: the policy is not asked and the account not charged."""
        if self._taught:
            return self.update.teacher_cost == 0
        return self.annotator is not None and self.annotator.cost == 0

    # -- looking at it ------------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        """How many questions were asked, shown, answered, learned, not tellable and expired."""
        return Counts() if self._desk is None else self._desk.counts

    @property
    def open(self) -> list[Query]:
        """Questions that wait for an answer, oldest first."""
        return [] if self._desk is None else self._desk.open

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
        if account and self._desk is not None:
            self._desk.reset()
            if self.annotator is not None:
                self.annotator.reset()

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
            running = self.classifier.running
            return {
                "version": _VERSION,
                "model": self.classifier.fingerprint(),
                "parts": self._parts(),
                "number": self._number,
                "age": self._age,
                "frozen": self._frozen,
                "update": self.update.state_dict(),
                "anchor": None if self.anchor is None else self.anchor.state_dict(),
                "running": None if running is None else running.detach().cpu().clone(),
                "policy": self.policy.state_dict(),
                "selector": self.selector.state_dict(),
                "desk": None if self._desk is None else self._desk.state_dict(),
                "annotator": None if self.annotator is None else self.annotator.state_dict(),
                "guard": None if self.guard is None else self.guard.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. A state of another model, method or version is refused and changes nothing."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._check_state(state)
            before = self.state_dict()
            try:
                self._load(state)
            except Exception as error:
                self._load(before)
                if isinstance(error, errors.WiseAttaError):
                    raise
                raise errors.StateMismatch(f"the state could not be read: {error!r}") from error

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise errors.StateMismatch(f"a state is what state_dict() gave, not a {type(state).__name__}")
        if state.get("version") != _VERSION:
            raise errors.StateMismatch(
                f"the state is of version {state.get('version')!r}, this is version {_VERSION}: save it again with the "
                "release that wrote it, or start from the source"
            )
        saved, parts = state.get("parts", {}), self._parts()
        differ = [
            f"{name} {saved.get(name)} there, {part} here" for name, part in parts.items() if saved.get(name) != part
        ]
        if differ:
            raise errors.StateMismatch(
                f"the state is of another method: {'; '.join(differ)}. Load it into an adapter with the same parts"
            )
        theirs, own = state.get("model", {}), self.classifier.fingerprint()
        if theirs != own:
            differs = sorted(key for key in own if theirs.get(key) != own[key])
            raise errors.StateMismatch(
                f"the state belongs to another model: {', '.join(differs)} of its tensors differ. "
                "Load it into an adapter of the same model and weights"
            )

    def _load(self, state: Mapping[str, Any]) -> None:
        if state["desk"] is None:
            self._desk = None
        else:
            self._desk = Desk(state["desk"]["classes"], expires_after=self.expires_after)
            self._desk.load_state_dict(state["desk"])
        self.policy.load_state_dict(state["policy"])
        self.selector.load_state_dict(state["selector"])
        if self.annotator is not None and state["annotator"] is not None:
            self.annotator.load_state_dict(state["annotator"])
        if self.anchor is not None and state["anchor"] is not None:
            self.anchor.load_state_dict(state["anchor"])
        running = state["running"]
        self.classifier.running = None if running is None else running.to(self.classifier.device, copy=True)
        self._number, self._age, self._frozen = state["number"], state["age"], state["frozen"]
        self.update.load_state_dict(state["update"])
        if self.guard is not None:
            self.guard.load_state_dict(state["guard"])
        self._drop_graph()

    def _parts(self) -> dict[str, str]:
        names = ("update", "policy", "utility", "selector", "anchor", "guard")
        parts = {name: type(getattr(self, name)).__name__ for name in names}
        objective = type(getattr(self.update, "objective", None)).__name__
        return parts | {"objective": objective, "statistics": self.classifier.statistics}


def _never_asked(query_id: str) -> errors.UnknownQuery:
    return errors.UnknownQuery(f"question {query_id!r} was never asked: no question was asked yet")


def _finite(inputs: Inputs) -> bool:
    return all(bool(signals.all_finite(leaf)) for leaf in leaves(inputs) if leaf.is_floating_point())


def _all_finite(inputs: Inputs, logits: Tensor) -> Tensor:
    finite = signals.all_finite(logits)
    for leaf in leaves(inputs):
        if leaf.is_floating_point():
            finite = finite & signals.all_finite(leaf)
    return finite
