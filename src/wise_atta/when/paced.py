"""When is a batch worth a label? When its score is high among the recent ones and the budget is on schedule."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from wise_atta import errors
from wise_atta.when.account import Account, Per, Ratio, whole
from wise_atta.when.policies import Policy
from wise_atta.when.window import Window

Ties = Literal["share", "accept"]
Preset = Literal["paper", "authors"]
_T = TypeVar("_T")


class BudgetPaced(Policy):
    """Budget-paced batch selection (section 3.1, Algorithm 1), under an account that cannot be overdrawn.

    A batch is selected when its score reaches the (1 − r̃_t) quantile of the last W scores, where r̃_t = r + d_t/H_c
    rises with the debt d_t = r·t − u. A policy more than `slack` labels behind asks whatever the score. With k labels a
    batch, batches are selected at the rate r̃_t/k.

    Parameters
    ----------
    ratio
        Labels per batch (or per sample), r. Between 0 and the labels a batch takes.
    window
        How many recent scores a batch is compared with, W.
    warmup
        Scores needed before they are compared, M. Until then batches are drawn at random at the rate r.
    horizon
        Over how many batches a debt is to be made up for, H_c. 50 unless given; 40 under preset="authors".
    slack
        How many labels the policy may fall behind, that is, save for better batches, δ. 5 unless given; 1 under a
        preset.
    credit
        How many labels may be spent ahead of r·t. 0 unless given.
    total
        A limit for the whole stream, or None.
    ties
        What to do with a score that also occurs in the window: "share" admits it with the probability that makes the
        rate come out at r̃_t (the default), "accept" always admits a score that equals the threshold (the paper).
    per
        "batch" or "sample".
    preset
        "paper": Algorithm 1 as printed, that is ties="accept" and unlimited credit. It overspends where scores tie.
        "authors": the published code: round(r·T) labels wherever they fall, r replaced by round(r·T)/T, ties="accept",
        and a warm-up that draws at r̃_t. A preset settles ties, credit, total and per; window, warmup, horizon and slack
        are the algorithm's own parameters and can be given with it.
    length
        The number of batches T, which preset="authors" needs.
    seed
        Of the draws in the warm-up and among ties.

    Examples
    --------
    >>> policy = BudgetPaced(ratio=0.5, slack=2)
    >>> [policy.decide(score) for score in (3, 1, 4, 1, 5, 9, 2, 6)]
    [0, 0, 1, 0, 1, 1, 0, 1]
    >>> policy.spent, policy.allowed
    (4, 4)
    """

    def __init__(
        self,
        ratio: Ratio = 0.2,
        *,
        window: int = 250,
        warmup: int = 1,
        horizon: float | None = None,
        slack: float | None = None,
        credit: float | None = None,
        total: int | None = None,
        ties: Ties | None = None,
        per: Per = "batch",
        preset: Preset | None = None,
        length: int | None = None,
        seed: int = 0,
    ) -> None:
        if preset not in (None, *get_args(Preset)):
            raise errors.unknown("preset", str(preset), get_args(Preset))
        if (length is None) == (preset == "authors"):
            raise errors.BadConfig(
                "preset='authors' and length, the number of batches of the stream, are given together or not at all. "
                "To spend a whole budget on a stream of known length, wrap the policy in Exhaust"
            )
        if preset is None:
            if credit == math.inf:
                raise errors.BadConfig("credit without limit is Algorithm 1 as printed: say preset='paper'")
            account = Account(ratio, per=per, credit=credit or 0, total=total)
        else:
            account = Account(ratio, credit=math.inf) if length is None else Account.for_length(ratio, length)
            _settle(preset, "per", per, account.per)
            _settle(preset, "credit", credit, account.credit)
            _settle(preset, "total", total, account.total)
            _settle(preset, "ties", ties, "accept")
        super().__init__(account, seed)

        self.ratio = ratio
        self.window = whole("window", window, least=1)
        self.warmup = whole("warmup", warmup, least=1)
        self.horizon = float((40 if preset == "authors" else 50) if horizon is None else horizon)
        self.slack = float((1 if preset else 5) if slack is None else slack)
        self.credit, self.total, self.per = account.credit, account.total, account.per
        self.ties: Ties = ties or ("accept" if preset else "share")
        self.preset, self.length = preset, length
        if self.warmup > self.window:
            raise errors.BadConfig(f"warmup={warmup} scores never fit in window={window}: the warm-up would not end")
        if not self.horizon > 0 or not self.slack >= 0:
            raise errors.BadConfig(f"horizon={horizon} must be above 0 and slack={slack} must be 0 or more")
        if self.ties not in get_args(Ties):
            raise errors.unknown("way with ties", str(ties), get_args(Ties))
        self._scores = Window(self.window)
        if preset == "paper":
            warnings.warn(
                "preset='paper' is Algorithm 1 as printed: its credit has no limit, and where scores tie it spends "
                "more labels than the ratio allows",
                stacklevel=_outside(),
            )

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        # Pacing is in floats, in the order of Algorithm 1; only the account has to be exact.
        ratio, spent = self._ratio, self.account.spent
        target = ratio * self.account.seen
        rate = min(max((ratio * units + (target - spent) / self.horizon) / want, 0.0), 1.0)
        if spent + self.slack < target:
            return want, math.nan, rate
        if len(self._scores) < self.warmup:
            if self.preset != "authors":
                rate = min(ratio * units / want, 1.0)
            return want * self._draw(rate), math.nan, rate
        threshold = self._scores.quantile(1 - rate)
        return want * self._admits(score, threshold, rate), threshold, rate

    def _bounds(self, want: int, units: int) -> tuple[int, int]:
        most = super()._bounds(want, units)[1]
        behind = self.account.spent + self.slack < self._ratio * self.account.seen
        return most if behind else 0, most

    def _admits(self, score: float, threshold: float, rate: float) -> bool:
        if self.account.available < 1:
            return False  # without a draw: whatever comes of it, no label is there to be spent
        if self.ties == "share":
            above, tied = self._scores.rank(score)
            if tied:
                # Of every n batches like those in the window, `above` are admitted before this one, r̃·n are to be.
                return self._draw((rate * len(self._scores) - above) / tied)
        return score >= threshold

    def _push(self, score: float) -> None:
        self._scores.push(score)

    def _pull(self) -> None:
        self._scores.pull()

    def reset(self, history: bool = True, account: bool = True) -> None:
        super().reset(history, account)
        if history:
            self._scores = Window(self.window)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scores": list(self._scores)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._match(state)
        try:
            scores = np.asarray(state["scores"], dtype=np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise errors.StateMismatch(f"the scores of the saved policy cannot be read: {error}") from error
        if scores.ndim != 1 or len(scores) > self.window or not np.isfinite(scores).all():
            raise errors.StateMismatch(f"the saved policy must have at most {self.window} finite scores in a row")
        super().load_state_dict(state)
        self._scores = Window(self.window, scores.tolist())


def _outside() -> int:
    """The stack level of the first caller outside this package: the line that a warning should point at."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "wise_atta":
        frame, level = frame.f_back, level + 1
    return level


def _settle(preset: str, name: str, given: _T | None, fixed: _T) -> None:
    if given is not None and given != fixed:
        raise errors.BadConfig(
            f"{name}={given!r} contradicts preset={preset!r}, which has {name}={fixed!r}: leave out one of the two"
        )
