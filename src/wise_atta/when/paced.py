"""Budget-paced selection: a batch is worth a label if its score is high lately and the budget is on schedule."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import numpy as np

from wise_atta import errors
from wise_atta.part import above, at_least
from wise_atta.when.account import Account, Per, Ratio, whole
from wise_atta.when.policies import Policy
from wise_atta.when.window import Window

Ties = Literal["share", "accept"]
Preset = Literal["paper", "authors"]


@dataclass(eq=False)
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

    ratio: Ratio = 0.2
    _: KW_ONLY
    window: int = 250
    warmup: int = 1
    horizon: float | None = None
    slack: float | None = None
    credit: float | None = None
    total: int | None = None
    ties: Ties | None = None
    per: Per = "batch"
    preset: Preset | None = None
    length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        account = self._account()
        super().__init__(account, self.seed)
        self.credit, self.total, self.per = account.credit, account.total, account.per
        self.ties = self.ties or ("accept" if self.preset else "share")
        if self.ties not in get_args(Ties):
            raise errors.unknown("way with ties", str(self.ties), get_args(Ties))
        self.window = whole("window", self.window, least=1)
        self.warmup = whole("warmup", self.warmup, least=1)
        if self.warmup > self.window:
            raise errors.BadConfig(
                f"warmup={self.warmup} scores never fit in window={self.window}: the warm-up would not end"
            )
        horizon, slack = (40, 1) if self.preset == "authors" else (50, 1 if self.preset else 5)
        self.horizon = self._horizon = float(horizon if self.horizon is None else self.horizon)
        self.slack = self._slack = float(slack if self.slack is None else self.slack)
        above(0, horizon=self.horizon)
        at_least(0, slack=self.slack)
        self._scores: Window = Window(self.window)
        if self.preset == "paper":
            warnings.warn(
                "preset='paper' is Algorithm 1 as printed: its credit has no limit, and where scores tie it spends "
                "more labels than the ratio allows",
                stacklevel=_outside(),
            )

    def _account(self) -> Account:
        """The account that preset, ratio and limits make together."""
        if self.preset not in (None, *get_args(Preset)):
            raise errors.unknown("preset", str(self.preset), get_args(Preset))
        if (self.length is None) == (self.preset == "authors"):
            raise errors.BadConfig(
                "preset='authors' and length, the number of batches of the stream, are given together or not at all. "
                "To spend a whole budget on a stream of known length, wrap the policy in Exhaust"
            )
        if self.preset is None:
            if self.credit == math.inf:
                raise errors.BadConfig("credit without limit is Algorithm 1 as printed: say preset='paper'")
            return Account(self.ratio, per=self.per, credit=self.credit or 0, total=self.total)
        fixed = (
            Account(self.ratio, credit=math.inf) if self.length is None else Account.for_length(self.ratio, self.length)
        )
        settled = {"per": fixed.per, "credit": fixed.credit, "total": fixed.total, "ties": "accept"}
        for name, value in settled.items():
            own = getattr(self, name)
            if own is not None and own != value:
                raise errors.BadConfig(
                    f"{name}={own!r} contradicts preset={self.preset!r}, which has {name}={value!r}: leave out one "
                    "of the two"
                )
        return fixed

    def _wish(self, score: float, want: int, units: int) -> tuple[int, float, float]:
        # Pacing is in floats, in the order of Algorithm 1; only the account has to be exact.
        ratio, spent = self._ratio, self.account.spent
        target = ratio * self.account.seen
        rate = min(max((ratio * units + (target - spent) / self._horizon) / want, 0.0), 1.0)
        if spent + self._slack < target:
            return want, math.nan, rate
        if len(self._scores) < self.warmup:
            if self.preset != "authors":
                rate = min(ratio * units / want, 1.0)
            return want * self._draw(rate), math.nan, rate
        threshold = self._scores.quantile(1 - rate)
        return want * self._admits(score, threshold, rate), threshold, rate

    def _bounds(self, want: int, units: int) -> tuple[int, int]:
        most = super()._bounds(want, units)[1]
        behind = self.account.spent + self._slack < self._ratio * self.account.seen
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
