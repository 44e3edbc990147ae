"""Questions, whoever answers them, and what becomes of the answers.

Questions (`Query`) go to an annotator and are kept as `Questions` until their labels are learned. One batch, in the
order in which nothing that somebody looked at is returned, and nothing that was answered in time is lost:

>>> import torch
>>> from wise_atta.stream import Batch
>>> questions, annotator_ = Questions(classes=3, expires_after=2), Delayed(Oracle(lambda query: 1), batches=2)
>>> for now in range(1, 6):
...     queries = [Query.of(Batch(torch.rand(4, 2)), number=now, index=0, logits=torch.zeros(4, 3))]
...     questions.ask(queries)
...     annotator_.ask(queries, now)
...     new = questions.answer(annotator_.answers(now, last=questions.closing(now)))
...     questions.show(annotator_.shown(now))
...     returned = questions.give_up(questions.closing(now))
...     questions.close(item.id for item in questions.pending)
>>> questions.counts
Counts(asked=5, shown=5, answered=3, learned=3, cant_tell=0, expired=0, stale=0)
"""

from __future__ import annotations

from typing import Any, Final

from wise_atta.part import make
from wise_atta.who.annotators import (
    Annotator as Annotator,
    Callback as Callback,
    Direct as Direct,
    Oracle as Oracle,
    Teacher as Teacher,
)
from wise_atta.who.inbox import Inbox as Inbox
from wise_atta.who.query import (
    CANT_TELL as CANT_TELL,
    SKIP as SKIP,
    Answer as Answer,
    AnswerLike as AnswerLike,
    Query as Query,
    Verdict as Verdict,
    as_batch as as_batch,
)
from wise_atta.who.questions import Asked as Asked, Context as Context, Counts as Counts, Questions as Questions
from wise_atta.who.wrappers import (
    Between as Between,
    Delay as Delay,
    Delayed as Delayed,
    Geometric as Geometric,
    Noisy as Noisy,
    Poisson as Poisson,
    Wrapper as Wrapper,
)

ANNOTATORS: Final[dict[str, type[Annotator]]] = {
    "oracle": Oracle,
    "delayed": Delayed,
    "noisy": Noisy,
    "teacher": Teacher,
    "callback": Callback,
    "inbox": Inbox,
}


def annotator(name: str, **options: Any) -> Annotator:
    """An annotator by name.

    >>> annotator("noisy", annotator=annotator("oracle", truth={"a": 1}), rate=0.1, classes=10)
    Noisy(Oracle(1 samples), rate=0.1, classes=10, seed=0)
    >>> annotator("inbox", size=3)
    Traceback (most recent call last):
    wise_atta.errors.BadConfig: annotator 'inbox': got an unexpected keyword argument 'size'. It takes remember
    """
    return make("annotator", ANNOTATORS, name, options)
