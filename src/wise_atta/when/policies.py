"""Policies: which batches are worth a label. Those that do not look at the score, and what all have in common."""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Any

from wise_atta import errors, rng
from wise_atta.when.account import Account, Per, Ratio, matching, whole
from wise_atta.when.window import Window

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """How the last decision came about; NaN where a number played no part.

    Parameters
    ----------
    threshold
        τ_t, the score from which on a batch was selected.
    rate
        r̃_t, the share of batches that was to be selected at that moment.
    debt
        d_t = r·t − u, the labels by which the policy was behind before it decided.
    """

    threshold: float = math.nan
    rate: float = math.nan
    debt: float = math.nan


class Policy:
    """Decides, batch by batch, how many labels to ask for, and never more than its account allows.

    A policy of one's own overrides `_wish`; the account, undo, state and repr come from here. Keyword arguments of the
    constructor are kept as attributes of the same name.

    Parameters
    ----------
    account
        What may be spent.
    seed
        Of the policy's draws, if it makes any.
    """

    def __init__(self, account: Account, seed: int = 0) -> None:
        self.account = account
        self.seed = operator.index(seed)
        self.last = Decision()
        self._ratio = float(account.rate)
        self._undo: tuple[int, int, Decision] | None = None
        # The scores that decisions were made on, where these look at them.
        self._scores: Window | None = None

    def decide(self, score: float, want: int = 1, samples: int = 1) -> int:
        """The labels granted for this batch, 0 to `want`. One call a batch, in order.

        Parameters
        ----------
        score
            The batch's utility; higher is more wanted.
        want
            How many labels the batch would take (k).
        samples
            The batch's size, which counts under per="sample".
        """
        score = float(score) + 0.0  # −0.0 becomes 0.0, so that equal scores have equal bits
        if not math.isfinite(score):
            raise errors.NotFinite(f"the utility of the batch is {score}: look for NaN or Inf in its logits")
        want = whole("want", want, errors.BadInput)
        samples = whole("samples", samples, errors.BadInput, least=1)
        if self.account.seen == 0:
            self._check(want)

        units = self.account.units(samples)
        self.account.earn(units)
        debt = self._ratio * self.account.seen - self.account.spent
        wish, threshold, rate = self._wish(score, want, units) if want else (0, math.nan, math.nan)
        granted = int(min(wish, self.account.available))
        self.account.spend(granted)
        if self._scores is not None:
            self._scores.push(score)
        self._undo = units, granted, self.last
        self.last = Decision(threshold, rate, debt)
        return granted

    def foresee(self, want: int = 1, samples: int = 1) -> tuple[int, int]:
        """The fewest and the most labels that `decide` can grant the next batch, whatever its score. Changes nothing.

        >>> policy = Uniform(0.5)
        >>> policy.foresee(), policy.decide(0.0), policy.foresee(), policy.decide(0.0)
        ((0, 0), 0, (1, 1), 1)
        """
        units = self.account.units(samples)
        self.account.earn(units)
        try:
            return self._bounds(want, units)
        finally:
            self.account.take_back(units, 0)

    def undo(self) -> None:
        """Take back the last `decide`, as if it had not been called. Only one, and only before labels are returned."""
        if self._undo is None:
            raise errors.BadInput(
                "there is no decision to undo: only the last one can be taken back, once, and before a refund"
            )
        units, granted, last = self._undo
        self.account.take_back(units, granted)
        if self._scores is not None:
            self._scores.pull()
        self.last, self._undo = last, None

    def refund(self, labels: int) -> None:
        """Return labels whose query expired before anyone was shown it. It settles the last decision."""
        self.account.refund(labels)
        # The labels may be those of the last decision: taking it back as well would return them twice.
        self._undo = None

    @property
    def spent(self) -> int:
        """Labels charged so far."""
        return self.account.spent

    @property
    def seen(self) -> int:
        """Batches (or samples, under per="sample") seen so far."""
        return self.account.seen

    @property
    def allowed(self) -> float:
        """Labels that may have been charged by now."""
        return self.account.allowed

    def reset(self, history: bool = True, account: bool = True) -> None:
        """Forget the scores seen (`history`), what was seen and spent (`account`), or both."""
        if account:
            self.account.reset()
        if history and self._scores is not None:
            self._scores = Window(self._scores.size)
        self.last, self._undo = Decision(), None

    def state_dict(self) -> dict[str, Any]:
        return {**self._header(), "account": self.account.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._match(state)
        self.account.load_state_dict(state.get("account", {}))
        self.last, self._undo = Decision(), None

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options().items())
        return f"{type(self).__name__}({options})"

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        """Labels wished for, threshold and rate. `account.seen` counts this batch already, `account.spent` does not."""
        raise NotImplementedError

    def _bounds(self, want: int, units: int) -> tuple[int, int]:
        """What `foresee` gives. The account counts this batch already."""
        return 0, int(min(want, self.account.available))

    def _check(self, want: int) -> None:
        """Refuse, at the first batch, a ratio that no number of labels a batch can reach."""
        if self.account.per == "batch" and 0 < want < self.account.rate:
            raise errors.BadConfig(
                f"ratio={self.account.ratio} labels a batch, but a batch is asked for {want}: lower the ratio to "
                f"{want} or less, or ask for more labels a batch"
            )

    def _draw(self, probability: float) -> bool:
        """True with that probability; the draw depends on the seed and on how much was seen, on nothing else."""
        if probability <= 0 or probability >= 1:
            return probability > 0
        return bool(rng.numpy(self.seed, "policy", self.account.seen).random() < probability)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def _header(self) -> dict[str, Any]:
        # The ratio is left to the account, which compares it exactly.
        options = {name: value for name, value in self._options().items() if name not in ("ratio", "policy")}
        return {"version": _VERSION, "policy": type(self).__name__, "options": options}

    def _match(self, state: Mapping[str, Any]) -> None:
        """Raise `StateMismatch` unless the state is that of a policy of the same class and options."""
        name, header = type(self).__name__, self._header()
        options = header.pop("options")
        matching(name, header, state)
        matching(name, options, state.get("options", {}))


class _Blind(Policy):
    """A policy that does not look at the score, so that it is known beforehand what it will grant."""

    def _bounds(self, want: int, units: int) -> tuple[int, int]:
        wish = self._wish(0.0, want, units)[0] if want else 0
        granted = int(min(wish, self.account.available))
        return granted, granted


@dataclass(eq=False)
class Uniform(_Blind):
    """Spreads the labels evenly: asks as soon as ⌊r·t⌋ has grown by as many labels as a batch takes.

    Parameters
    ----------
    ratio
        Labels per batch (or per sample).
    total
        A limit for the whole stream, or None.
    per
        "batch" or "sample".

    Examples
    --------
    >>> policy = Uniform(0.4)
    >>> [policy.decide(0.0) for _ in range(10)]
    [0, 0, 1, 0, 1, 0, 0, 1, 0, 1]
    """

    ratio: Ratio = 0.2
    _: KW_ONLY
    total: int | None = None
    per: Per = "batch"

    def __post_init__(self) -> None:
        super().__init__(Account(self.ratio, per=self.per, total=self.total))
        self.total = self.account.total

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        due = self.account.earned(self.account.seen) >= self.account.spent + want
        return want * due, math.nan, min(self._ratio * units / want, 1.0)


@dataclass(eq=False)
class Random(_Blind):
    """Leaves it to chance which batches are asked for.

    Without a length each batch is drawn with probability r, and a draw that the account does not allow at that moment
    is lost, so that with credit=0 somewhat fewer than r·t labels are spent. `exact=True` draws round(r·T) batches out
    of T without replacement; its limit is that number alone, wherever in the stream the labels fall.

    Parameters
    ----------
    ratio
        Labels per batch (or per sample).
    exact, length
        Draw round(ratio · length) of `length` batches.
    credit
        How many labels may be spent ahead of ratio · seen.
    total
        A limit for the whole stream, or None.
    per
        "batch" or "sample".
    seed
        Of the draws.

    Examples
    --------
    >>> policy = Random(0.3, exact=True, length=10)
    >>> sum(policy.decide(0.0) for _ in range(10))
    3
    """

    ratio: Ratio = 0.2
    _: KW_ONLY
    exact: bool = False
    length: int | None = None
    credit: int = 0
    total: int | None = None
    per: Per = "batch"
    seed: int = 0

    def __post_init__(self) -> None:
        own = self.per != "batch" or self.credit or self.total is not None
        if self.exact != (self.length is not None) or (self.exact and own):
            raise errors.BadConfig(
                "Random(exact=True) needs length, the number of batches of the stream, and sets its own credit and "
                "total: give exact=True with ratio, length and seed, or neither exact nor length"
            )
        if self.length is None:
            account = Account(self.ratio, per=self.per, credit=self.credit, total=self.total)
        else:
            account = Account.for_length(self.ratio, self.length)
            self._order = rng.numpy(self.seed, "policy").permutation(self.length)
        super().__init__(account, self.seed)

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        rate = min(self._ratio * units / want, 1.0)
        if not self.exact:
            return want * self._draw(rate), math.nan, rate
        # Drawn are the first of the order that together take the whole budget.
        batch = self.account.seen - 1
        drawn = batch < len(self._order) and int(self._order[batch]) * want < self.account.allowed
        return want * drawn, math.nan, rate


@dataclass(eq=False)
class Always(_Blind):
    """Asks on every batch.

    Parameters
    ----------
    labels
        How many labels a batch gets at most.
    total
        A limit for the whole stream, or None.

    Examples
    --------
    >>> policy = Always(labels=3, total=5)
    >>> [policy.decide(0.0, want=3) for _ in range(3)]
    [3, 2, 0]
    """

    labels: int = 1
    _: KW_ONLY
    total: int | None = None

    def __post_init__(self) -> None:
        self.labels = whole("labels", self.labels, least=1)
        super().__init__(Account(self.labels, total=self.total))
        self.total = self.account.total

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        return min(want, self.labels), math.nan, 1.0

    def _check(self, want: int) -> None:
        """Fewer labels than it would give are no contradiction."""


class Never(_Blind):
    """Never asks.

    Examples
    --------
    >>> Never().decide(1.0)
    0
    """

    def __init__(self) -> None:
        super().__init__(Account(0))

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        return 0, math.nan, 0.0


@dataclass(eq=False)
class Exhaust(Policy):
    """Makes a policy spend ⌊r·T⌋ labels, no fewer and no more, so that policies are compared on the same number.

    Labels all batches that remain once the rest of the budget covers them (section 4.3). It reckons with as many labels
    on every later batch as on this one.

    Parameters
    ----------
    policy
        The policy that decides until then, one that counts per batch. A copy of it is used.
    length
        The number of batches of the stream (T).

    Examples
    --------
    >>> policy = Exhaust(Random(0.5), length=10)
    >>> sum(policy.decide(0.0) for _ in range(10))
    5
    """

    policy: Policy
    _: KW_ONLY
    length: int

    def __post_init__(self) -> None:
        if self.policy.account.per != "batch":
            raise errors.BadConfig("Exhaust counts batches: give it a policy with per='batch'")
        self.policy, self.length = copy.deepcopy(self.policy), whole("length", self.length, least=1)
        super().__init__(self.policy.account)
        budget = self.account.earned(self.length)
        self._budget = budget if self.account.total is None else min(budget, self.account.total)
        self.account.total = self._budget

    def decide(self, score: float, want: int = 1, samples: int = 1) -> int:
        granted = self.policy.decide(score, want, samples)
        more = self._due(self.account, want, granted)
        self.account.spend(more)
        self._undo = 0, more, self.last
        self.last = self.policy.last
        return granted + more

    def foresee(self, want: int = 1, samples: int = 1) -> tuple[int, int]:
        least, most = self.policy.foresee(want, samples)
        ahead = copy.copy(self.account)
        ahead.earn(1)
        due = self._due(ahead, want)
        return max(least, due), max(most, due)

    def _due(self, account: Account, want: int, granted: int = 0) -> int:
        """What the rest of the budget holds beyond `want` labels for every later batch is due now."""
        surplus = self._budget - account.spent - want * max(0, self.length - account.seen)
        return int(max(0, min(surplus, want - granted, account.available)))

    def undo(self) -> None:
        super().undo()
        self.policy.undo()

    def reset(self, history: bool = True, account: bool = True) -> None:
        self.policy.reset(history, account)
        super().reset(history, account)

    def state_dict(self) -> dict[str, Any]:
        return {**self._header(), "inner": self.policy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._match(state)
        self.policy.load_state_dict(state.get("inner", {}))
        self.last, self._undo = Decision(), None


def early(policy: Policy, *, length: int, delay: int, labels: int = 1) -> Policy:
    """The same policy, made to spend a stream's whole budget while answers can still come before its end.

    Answers that take `delay` batches reach no question of the last `delay` ones. So none is asked there, and the
    ⌊r·T⌋ labels are spent on the batches before: at a higher rate, ahead of r·t, and never more than ⌊r·T⌋.

    Parameters
    ----------
    policy
        When to ask, at a ratio per batch.
    length
        The number of batches of the stream (T).
    delay
        How many batches an answer is expected to take.
    labels
        How many labels a batch takes at most; where the time is too short for the budget, every batch is asked for.

    Examples
    --------
    >>> policy = early(Uniform(0.5), length=10, delay=3)
    >>> [policy.decide(0.0) for _ in range(10)]
    [0, 1, 1, 0, 1, 1, 1, 0, 0, 0]
    """
    options = policy._options()
    if policy.account.per != "batch" or "ratio" not in options or options.get("preset") is not None:
        raise errors.BadConfig(
            f"{policy!r} has no ratio per batch that could be raised: give paced without a preset, uniform or random"
        )
    asked = whole("length", length, least=1) - whole("delay", delay)
    if asked <= 0:
        return Never()
    rate = min(Fraction(policy.account.earned(length), asked), Fraction(whole("labels", labels, least=1)))
    if options.get("length") is not None:
        options["length"] = asked
    return Exhaust(type(policy)(**options | {"ratio": rate}), length=asked)
