"""Requests and replies of the HTTP API."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$", examples=["default"])]
Id = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$", examples=["17-3"])]
Person = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f]+$", examples=["ann"])]


class Model(BaseModel):
    """Nothing is taken that is not known."""

    model_config = ConfigDict(extra="forbid")


class Pictures(Model):
    """Pictures as JSON carries them."""

    pictures: list[str] = Field(
        min_length=1,
        max_length=4096,
        description="JPEG, PNG, WebP, BMP or .npy files in base64",
        examples=[["iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="]],
    )


class Guess(Model):
    """A class and how likely it is."""

    label: int = Field(examples=[3])
    name: str = Field(examples=["three"])
    probability: float = Field(examples=[0.91])


class Predicted(Model):
    """What the model says about one picture: the likeliest class, and the next ones."""

    label: int = Field(examples=[3])
    name: str = Field(examples=["three"])
    probability: float = Field(examples=[0.91])
    top: list[Guess]


class Predictions(Model):
    """The answer to a request."""

    request: str = Field(description="names the request in the log", examples=["5f0c4a8e9b1d4f7a"])
    stream: str = Field(examples=["default"])
    version: int = Field(description="place in the log up to which the weights had learned", examples=[1024])
    predictions: list[Predicted]


class OpenQuery(Model):
    """A question that was handed to the caller."""

    stream: str = Field(examples=["default"])
    query: str = Field(examples=["17-3"])
    audit: bool = Field(description="whether it serves to measure accuracy")
    asked_at: float = Field(description="seconds since 1970")
    lease_until: float = Field(description="until when nobody else gets it, in seconds since 1970")
    guesses: list[Guess]
    picture: str = Field(
        description="where its picture is; send the same token", examples=["/queries/default/17-3/picture"]
    )


class Queries(Model):
    """Questions for the caller, and how many there are."""

    queries: list[OpenQuery]
    open: int = Field(description="questions without an answer, in anybody's hands or nobody's")
    spent: int
    allowed: int
    now: float = Field(description="the service's clock, in seconds since 1970: leases are counted by it")


class Ref(Model):
    """Names a question."""

    stream: Name = "default"
    query: Id


class Release(Model):
    """Questions that go back to the others."""

    queries: list[Ref] = Field(min_length=1, max_length=1000)


class AnswerIn(Model):
    """One answer."""

    stream: Name = "default"
    query: Id
    label: Annotated[int, Field(strict=True, ge=0, le=10**9)] | Literal["cant_tell", "skip"] = Field(examples=[3])


class Answers(Model):
    """Answers; all of them count, or none."""

    answers: list[AnswerIn] = Field(min_length=1, max_length=1000)


class Taken(Model):
    """How the answers of a call were taken."""

    taken: int = Field(description="answers that count; one that was given before counts again")
    held: int = Field(description="answers that wait for a review")


class Reset(Model):
    """What returns to the source besides the model. The account never does."""

    policy: bool = Field(default=False, description="forget past scores too")


class Review(Model):
    """What becomes of held answers."""

    answers: list[Annotated[int, Field(ge=1, lt=2**63)]] = Field(min_length=1, max_length=1000, examples=[[12, 13]])
    accept: bool


class Held(Model):
    """An answer that waits for a review."""

    answer: int
    stream: str
    query: str
    by: str
    at: float
    label: int | None


class Revoke(Model):
    """Which labels never were: all those of a person, or those of some questions."""

    by: Person | None = None
    queries: list[Id] | None = Field(default=None, max_length=10_000)


class Revoked(Model):
    """What a revocation did."""

    answers: int = Field(description="answers that no longer count; their questions are open again")
    exact: bool = Field(description="whether the event log reached back; otherwise the state is an approximation")
    replayed: int = Field(description="events that were gone through again")


class Annotator(Model):
    """How often somebody's answers differ from the model's guess."""

    by: str
    answers: int
    differ: int
    low: float
    high: float
    suspicious: bool


class Accuracy(Model):
    """What the audit says: of `total` samples drawn at random, `right` were served right."""

    right: int
    total: int
    share: float
    low: float
    high: float


class Latency(Model):
    """Within which time half of the latest requests, and 99 in 100 of them, were answered; to 12 %."""

    requests: int
    p50_s: float
    p99_s: float


class Resolution(IntEnum):
    """Seconds that one point of a history covers."""

    FINE = 1
    MEDIUM = 10
    COARSE = 300


class Point(Model):
    """What happened to a stream within some seconds."""

    at: float = Field(description="when it began, in seconds since 1970")
    seconds: int
    requests: int
    pictures: int
    batches: int
    learned: int
    skipped: int
    entropy: float | None = Field(description="mean over the predictions, in nats")
    classes: dict[int, int] = Field(description="how often the commonest classes were predicted, by label")
    p50_s: float | None = Field(description="time within which half of the requests were answered")
    p99_s: float | None
    spent: int | None = Field(description="as it stood at the end; empty if nothing was known")
    allowed: int | None
    waiting: int | None
    drift: float | None


class Given(Model):
    """A label that somebody gave, and how old its question was by then."""

    at: float
    age_s: float
    audit: bool
    right: bool | None = Field(description="for an audit: whether the class that was served was the right one")


class Status(Model):
    """A stream at a glance."""

    stream: str
    method: str
    ratio: float = Field(description="labels per picture")
    audit: float = Field(description="share of them that measures accuracy")
    now: float = Field(description="the service's clock, in seconds since 1970")
    started: float = Field(description="when the service was started")
    version: int
    spent: int
    allowed: int
    seen: int = Field(description="pictures that the budget counts")
    requests: int
    pictures: int
    batches: int
    learned: int
    skipped: int
    failed: int
    fallbacks: int
    trips: int
    waiting: int = Field(description="micro-batches that wait for the learner")
    under_way: int = Field(description="pictures that wait for their prediction")
    drift: float = Field(description="relative distance of the adapted tensors from the source")
    questions: dict[str, int] = Field(description="how many questions are in which state")
    latency: Latency | None = Field(description="of the last five minutes")
    label_age_s: float | None = Field(description="mean time from question to label, over the latest hundred")
    oldest_open_s: float | None
    predicted: dict[str, int] = Field(description="how often each class was predicted since the start")
    accuracy: Accuracy | None = Field(description="of all audited samples; empty without an audit")
    recent: Accuracy | None = Field(description="of the latest 200 of them")


class NoticeOut(Model):
    """Something that the people who look after the service may want to know."""

    at: float
    stream: str | None
    kind: str
    body: dict[str, Any]


class Health(Model):
    """Whether it runs."""

    status: str = Field(examples=["ok"])


class Problem(Model):
    """Why a request was refused."""

    detail: Any = Field(examples=["picture 0: it begins like PNG but cannot be read (UnidentifiedImageError)"])
