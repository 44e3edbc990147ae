"""Settings of the service, and what of them is refused before it starts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from wise_atta import errors, methods, when
from wise_atta.data.models import SourceModel
from wise_atta.loop import Adapter
from wise_atta.who import Context
from wise_atta.wrap import adapt

# Seconds, days and requests beyond it are a slip, and clocks cannot count so far.
_MOST = 10**9


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may weigh, and how many may come.

    Parameters
    ----------
    body
        Bytes of a request.
    pixels
        Pixels of all pictures of a request together, as their headers declare them.
    rate, burst
        Requests per second and caller, and how many may come at once before that counts. 0 lifts the limit.
    failures
        Wrong tokens a minute from one address before it has to wait.
    patience
        Seconds within which a request has to arrive in whole.
    """

    body: int = 32 * 2**20
    pixels: int = 64 * 10**6
    rate: float = 0.0
    burst: int = 100
    failures: int = 10
    patience: float = 60.0

    def __post_init__(self) -> None:
        _require(self, "body", "pixels", "burst", "failures", least=1)
        _require(self, "rate", "patience")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a service runs.

    Parameters
    ----------
    database
        A SQLAlchemy URL. SQLite (``sqlite:///wise-atta.db``) or PostgreSQL (``postgresql+psycopg://…``).
    streams
        The names of the streams; each has its own adapter and account.
    method, options
        What adapts, by name, and its options.
    ratio
        Labels per sample, all streams alike.
    audit
        Which share of these goes to samples drawn at random, to measure accuracy with.
    statistics
        What BatchNorm layers normalise with. ``"source"`` and ``"ema"`` (served with the average as it stands) keep an
        answer independent of the other pictures in its micro-batch; ``"batch"`` and ``"mixed"`` do not.
    context, late_weight, late_limit
        How the sample of a late label is normalised, the age at which it counts half, and the age beyond which it is
        not learned any more, both in learned micro-batches; see `Adapter`. Late labels can ruin a model and did less
        harm the less they counted (`wise-atta delay`), hence the weight.
    guard
        Whether collapse is watched for.
    classes
        Names of the classes; the model's own, or numbers, if not given.
    max_batch, max_wait_ms
        A micro-batch closes at so many pictures, or when its first one has waited so long; up to twice as long
        while the learner is behind and pictures keep coming. A request may hold `max_batch` pictures at most.
    max_queue
        Pictures of a stream under way before requests are refused with 429.
    max_lag
        Micro-batches that wait for the learner before further ones are skipped.
    checkpoint_s, checkpoint_events
        A checkpoint is written when either so many seconds or so many events have passed.
    checkpoints
        How many are kept, closer together the younger they are.
    lease_s
        How long a question that was handed to somebody is kept from others.
    keep_log
        Days for which the event log, with every picture, is kept; 0 keeps it until the next checkpoint only. As many
        checkpoints again are kept with it, evenly over these days; it ends at one of them, so up to a tenth later.
    retain
        Days after which the pictures of questions are deleted; 0 keeps them.
    threads
        Threads of one forward. Part of what makes a replay come out the same.
    seed
        Of all draws.
    """

    database: str = "sqlite:///wise-atta.db"
    streams: tuple[str, ...] = ("default",)
    method: str = "wise"
    options: Mapping[str, Any] = field(default_factory=dict)
    ratio: float | str = 0.01
    audit: float | str = 0.1
    statistics: str = "source"
    context: Context = "own"
    late_weight: float | None = 10.0
    late_limit: int | None = None
    guard: bool = True
    classes: tuple[str, ...] | None = None
    max_batch: int = 64
    max_wait_ms: float = 10.0
    max_queue: int = 1024
    max_lag: int = 32
    checkpoint_s: float = 60.0
    checkpoint_events: int = 500
    checkpoints: int = 10
    lease_s: float = 120.0
    keep_log: float = 0.0
    retain: float = 0.0
    threads: int = 1
    seed: int = 0
    limits: Limits = field(default_factory=Limits)

    @property
    def recipe(self) -> str:
        """All that decides what an event teaches a given model: the same recipe and log give the same weights.

        Examples
        --------
        >>> Settings().recipe == Settings(max_batch=8).recipe, Settings().recipe == Settings(options={"lr": 1}).recipe
        (True, False)
        """
        names = ("method", "statistics", "context", "late_weight", "late_limit", "guard", "threads", "seed")
        return repr([*(getattr(self, name) for name in names), sorted(self.options.items())])

    def __post_init__(self) -> None:
        if not self.streams or len(set(self.streams)) != len(self.streams):
            raise errors.BadConfig(f"streams={list(self.streams)}: name at least one, and none twice")
        for name in self.streams:
            if not (0 < len(name) <= 64 and all(c.isascii() and (c.isalnum() or c in "-_.") for c in name)):
                raise errors.BadConfig(f"stream {name!r}: use up to 64 letters, digits, and any of -_.")
        _require(self, "max_batch", "max_queue", "max_lag", "checkpoint_events", "checkpoints", "threads", least=1)
        _require(self, "max_wait_ms", "checkpoint_s", "lease_s", "keep_log", "retain")
        if self.max_queue < self.max_batch:
            raise errors.BadConfig(f"max_queue={self.max_queue} cannot hold one batch of max_batch={self.max_batch}")
        if self.rate > 1:
            raise errors.BadConfig(f"ratio={self.ratio} labels per picture: a picture takes one label, so give 0 to 1")
        if not 0 <= self.audit_share <= 1:
            raise errors.BadConfig(f"audit={self.audit} is a share of the budget: give 0 to 1")

    @property
    def audit_share(self) -> Fraction:
        return when.account.exact(self.audit)

    @property
    def rate(self) -> Fraction:
        return when.account.exact(self.ratio)

    @property
    def audit_rate(self) -> Fraction:
        """Labels per sample for the audit."""
        return self.rate * self.audit_share


def _require(settings: object, *names: str, least: int = 0) -> None:
    for name in names:
        # Written so that NaN, which is neither more nor less than anything, is refused.
        if not least <= getattr(settings, name) <= _MOST:
            raise errors.BadConfig(f"{name}={getattr(settings, name)} must be at least {least}, and {_MOST} at most")


def build(model: SourceModel, settings: Settings) -> Adapter:
    """The adapter of one stream: the account counts samples, has no unlimited credit, and people answer."""
    options = dict(settings.options)
    preset = str(options.get("preset", ""))
    if preset.partition("/")[0] in ("paper", "authors"):
        raise errors.BadConfig(
            f"preset={preset!r} does not keep the budget at every moment, and a service has to: leave it out"
        )
    taken = methods.options(settings.method)
    if "ratio" in taken:
        options |= {"ratio": settings.rate - settings.audit_rate, "per": "sample"}
    if "seed" in taken:
        options.setdefault("seed", settings.seed)
    adapter = adapt(
        model.module,
        settings.method,
        **options,
        statistics=settings.statistics,
        mean=model.mean,
        std=model.std,
        guard=settings.guard,
        context=settings.context,
        late_weight=settings.late_weight,
        late_limit=settings.late_limit,
    )
    if adapter.update.teacher_cost is not None:
        raise errors.BadConfig(f"method {settings.method!r} asks a teacher model, not people: a service has none")
    policy = adapter.policy
    if not isinstance(policy, when.Never) and not (
        policy.account.per == "sample" and policy.account.credit < float("inf")
    ):
        raise errors.BadConfig(
            f"{policy!r} does not pace labels per sample: a service needs policy='paced' or 'uniform'"
        )
    return adapter


def class_names(model: SourceModel, chosen: tuple[str, ...] | None, outputs: int) -> tuple[str, ...]:
    """What the classes are called: as given, as the model says, or by number."""
    names = chosen if chosen is not None else model.classes
    if names is None:
        return tuple(str(number) for number in range(outputs))
    if len(names) != outputs:
        raise errors.BadConfig(f"{len(names)} names for a model of {outputs} classes: give one name a class, in order")
    return tuple(names)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
