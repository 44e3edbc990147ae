"""One stream over several processes: each takes a share of every batch, and all take the same step.

What a process computes alone is its share's forward and backward. Three things are exchanged: moments in every
BatchNorm layer, forwards and backwards; the logits and features of all shares, so that utility, policy, selector,
filters and losses see the whole batch in every process and need not know of the others; and gradients, which are
summed. A loss is thus that of the whole batch, wherever the samples are that pass a filter, and all processes have the
same values to the bit.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakTensorKeyDictionary

from wise_atta import errors, how
from wise_atta.loop import Adapter
from wise_atta.model import Classifier, Forward, Statistics, Version, wide
from wise_atta.model.statistics import BatchMode, BatchNorms, ShareMode
from wise_atta.prediction import Prediction
from wise_atta.stream import Batch, Inputs, leaves
from wise_atta.who import Answer, AnswerLike, Query, Questions

Group: TypeAlias = "dist.ProcessGroup | Literal['world']"

_UPDATES = (how.NoUpdate, how.Descend, how.SharpnessAware, how.Balanced, how.TwoStep, how.PublishedTwoStep)
_OBJECTIVES = (how.Entropy, how.ReliableEntropy)


class Ranks:
    """A group of processes, and which of them this one is.

    Parameters
    ----------
    group
        A process group, or ``"world"`` for all processes.
    """

    def __init__(self, group: Group = "world") -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise errors.BadConfig(
                "group needs the processes to know of each other: call torch.distributed.init_process_group first"
            )
        if isinstance(group, str) and group != "world":
            raise errors.unknown("group", group, ["world"])
        self._group = None if isinstance(group, str) else group
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        if self.rank < 0:
            raise errors.BadConfig(
                "this process is not in the group it was given: make the adapter in its members alone"
            )

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in their order; all have one shape."""
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return parts

    def gather_rows(self, tensor: Tensor, shares: Sequence[int]) -> Tensor:
        """The rows of all ranks one after the other, `shares` of them each."""
        padded = torch.cat([tensor, tensor.new_zeros(max(shares) - len(tensor), *tensor.shape[1:])])
        return torch.cat([part[:rows] for part, rows in zip(self.gather(padded), shares, strict=True)])

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, the same bits in each; written into the tensor."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def objects(self, value: Any) -> list[Any]:
        """What every rank brought, in their order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and biased variance of every channel over the rows of all ranks, and how many rows those are."""
        var, mean = torch.var_mean(x, dim=_all_but_channels(x), correction=0)
        rows = mean.new_full((1,), x.numel() // x.shape[1])
        shares = torch.stack(self.gather(torch.cat([mean, var, rows])))
        means, variances, counts = torch.split_with_sizes(shares, [len(mean), len(mean), 1], dim=1)
        total = counts.sum()
        mean = (means * counts).sum(dim=0) / total
        # The spread inside the shares and that between them: exact, where E[x²] − E[x]² would cancel.
        var = ((variances + (means - mean).square()) * counts).sum(dim=0) / total
        return mean, var, total


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


class _Gather(torch.autograd.Function):
    """All rows forwards. Every rank computes the whole loss, so backwards each keeps what its own rows are due."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, shares: Sequence[int]) -> Tensor:
        ctx.own = _span(ranks.rank, shares)
        return ranks.gather_rows(rows, shares)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.own], None, None


class _Normalise(torch.autograd.Function):
    """Batch normalisation with the moments of all ranks, and its gradient, which goes through them.

    With x̂ = (x − μ)/σ over N rows: ∂/∂x = γ/σ·(g − (1/N) Σ g − x̂·(1/N) Σ g·x̂), sums over all ranks. The gradients of γ
    and β are those of this rank's rows; the classifier adds them up with all others.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: _BatchNorm, ranks: Ranks
    ) -> Tensor:
        mean, var, total = ranks.moments(wide(x))
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var * total / (total - 1))  # unbiased, as the kernel leaves it
        inverse = (var + norm.eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.ranks = ranks
        out = _standard(x, mean, inverse)
        if weight is not None:
            out = out * _broad(weight, x)
        if bias is not None:
            out = out + _broad(bias, x)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, inverse, total = ctx.saved_tensors
        by_output, standard = wide(grads[0]), _standard(x, mean, inverse)
        by_bias = by_output.sum(dim=_all_but_channels(x))
        by_weight = (by_output * standard).sum(dim=_all_but_channels(x))
        by_x = None
        if ctx.needs_input_grad[0]:
            of_bias, of_weight = (ctx.ranks.add(torch.cat([by_bias, by_weight])) / total).chunk(2)
            by_x = by_output - _broad(of_bias, x) - standard * _broad(of_weight, x)
            by_x = (by_x * _broad(inverse if weight is None else inverse * weight, x)).to(x.dtype)
        needs = ctx.needs_input_grad
        return by_x, by_weight if needs[1] else None, by_bias if needs[2] else None, None, None


def _broad(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))


def _standard(x: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    return (wide(x) - _broad(mean, x)) * _broad(inverse, x)


def _span(rank: int, shares: Sequence[int]) -> slice:
    """Where in the whole batch the rows of a rank are."""
    start = sum(shares[:rank])
    return slice(start, start + shares[rank])


class SharedClassifier(Classifier):
    """A classifier whose batches are spread over the ranks of a group: inputs are a share, logits are of the batch.

    Parameters
    ----------
    model, options
        As for `Classifier`. The ways to run that record or recompute a network cannot be used.
    group
        See `Ranks`.
    """

    def __init__(self, model: nn.Module, *, group: Group = "world", **options: Any) -> None:
        for name in ("compile", "graphs", "checkpointing"):
            if options.get(name):
                raise errors.BadConfig(f"{name} and group cannot be used together: leave one of them out")
        if options.get("statistics") == "renorm":
            raise errors.BadConfig("statistics='renorm' is not known over several processes: use 'batch' or 'ema'")
        ranks = self.ranks = Ranks(group)
        super().__init__(model, **options)
        self._shares: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        if isinstance(self.mode, BatchMode):
            self.mode = SharedBatchMode(ranks)
        if isinstance(self.mode, ShareMode):
            self.mode = replace(self.mode, add=ranks.add)
        self.network.options.moments = lambda x: ranks.moments(wide(x.detach()))[:2]

    def check(self, inputs: Inputs) -> int:
        """Refuse a share that cannot be predicted on, in every process at once; otherwise the size of the batch."""
        problem: errors.WiseAttaError | None = None
        rows, shapes = 0, 0
        try:
            rows = super().check(inputs)
        except errors.SingleSample:
            rows = 1
        except errors.BadInput as error:
            problem = error
        if problem is None:
            kinds = [(tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in leaves(inputs)]
            shapes = zlib.crc32(repr(kinds).encode())
        message = torch.tensor([rows, shapes], dtype=torch.long, device=self.device)
        messages = torch.stack(self.ranks.gather(message)).tolist()
        shares = tuple(row[0] for row in messages)
        if problem is not None:
            raise problem
        if 0 in shares:
            raise errors.BadInput(f"rank {shares.index(0)} has a share that cannot be predicted on: see its own error")
        if len({row[1] for row in messages}) > 1:
            raise errors.BadInput("the ranks' shares of this batch differ in shape or dtype: cut one batch into shares")
        if sum(shares) == 1:
            super().check(inputs)
        self._shares[leaves(inputs)[0]] = shares
        return sum(shares)

    def send(self, numbers: Tensor) -> Callable[[], list[float]]:
        """The numbers of all ranks: all is finite where it is so everywhere, the rest is the same in each."""
        by_rank = torch.stack(self.ranks.gather(numbers)).tolist()
        return lambda: [min(row[0] for row in by_rank), *by_rank[0][1:]]

    def own(self, inputs: Inputs) -> slice:
        """Where in the batch this rank's rows are."""
        return _span(self.ranks.rank, self._shares[leaves(inputs)[0]])

    def forward(self, inputs: Inputs, **options: Any) -> Forward:
        """Run the network on this rank's share, with logits and features of the whole batch.

        Inputs that were not checked as a share are those of all ranks, the samples of late labels for one.
        """
        shares: tuple[int, ...] | None = self._shares.get(leaves(inputs)[0])  # type: ignore[no-untyped-call]
        if shares is not None and options.get("statistics") is None:
            options["count"] = sum(shares)
        own = super().forward(inputs, **options)
        grad = own.logits.requires_grad
        if shares is None:
            # Every rank does the same, and gradients are summed: each counts for its part.
            logits = own.logits.detach().lerp(own.logits, 1 / self.ranks.size) if grad else own.logits
            return replace(own, logits=logits)
        self._shares[leaves(own.inputs)[0]] = shares
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            logits = _Gather.apply(own.logits, self.ranks, shares)
        return replace(own, logits=logits, features=self.ranks.gather_rows(own.features.detach(), shares))

    def gradients(
        self, loss: Tensor, version: Version, groups: Sequence[str], *, head: bool = False, **options: Any
    ) -> dict[str, list[Tensor]]:
        """As for `Classifier`, of the loss over all ranks' rows: what every rank's own rows are due, summed."""
        own = super().gradients(loss, version, groups, head=head, **options)
        grads = [grad for group in groups for grad in own[group]]
        if not grads:
            return own
        flat = torch.cat([grad.flatten() for grad in grads])
        # The head's step starts from features that all ranks have, so each has the whole of its gradient already.
        total = self.ranks.add(flat / self.ranks.size if head else flat)
        summed = iter(torch.split_with_sizes(total, [grad.numel() for grad in grads]))
        return {group: [next(summed).view_as(grad) for grad in own[group]] for group in groups}


@dataclass(frozen=True)
class SharedBatchMode(BatchMode):
    """The statistics of the batch over all ranks."""

    ranks: Ranks

    @contextlib.contextmanager
    def set_up(self, norms: BatchNorms, count: int, running: Tensor | None, keep: bool) -> Iterator[Statistics]:
        scratch = norms.zeros()
        norms.bind(norms.pairs(scratch), training=False)
        for norm in norms.layers:
            norm.forward = lambda x, n=norm: _Normalise.apply(x, n.weight, n.bias, n, self.ranks)  # type: ignore[method-assign,misc]
        try:
            yield Statistics(scratch, batch=count)
        finally:
            for norm in norms.layers:
                del norm.forward


class SharedQuestions(Questions):
    """Questions of a stream that is spread over the ranks of a group: an answer given to any of them reaches all.

    Parameters
    ----------
    classifier
        Whose batches they are about.
    options
        As for `Questions`.
    """

    def __init__(self, classifier: SharedClassifier, **options: Any) -> None:
        super().__init__(**options)
        self.classifier = classifier
        self.ranks = classifier.ranks

    def about(self, batch: Batch, number: int, rows: Sequence[int], logits: Tensor) -> list[Query]:
        """The questions about these rows of the whole batch; each is made by the rank that has the sample."""
        if not rows:
            return []
        own = self.classifier.own(batch.inputs)
        problem: Exception | None = None
        queries: list[Query] = []
        try:
            for row in rows:
                if own.start <= row < own.stop:
                    query = Query.of(batch, number, row - own.start, logits[own])
                    queries.append(replace(query, id=f"{number}-{row}", index=row))
        except errors.WiseAttaError as error:
            problem = error
        by_rank = self.ranks.objects((list(rows), queries, problem is not None))
        if problem is not None:
            raise problem
        if any(failed for _, _, failed in by_rank):
            raise errors.BadInput("another rank cannot ask about a sample of its share: see its own error")
        if any(theirs != list(rows) for theirs, _, _ in by_rank):
            raise errors.BadConfig("the ranks chose different samples: run all of them on devices of one kind")
        by_row = {query.index: query for _, theirs, _ in by_rank for query in theirs}
        return [by_row[row] for row in rows]

    def read(self, answers: Mapping[str, AnswerLike]) -> dict[str, Answer]:
        """The answers of all ranks."""
        return super().read(self._gathered(answers))

    def collect(self, now: int) -> None:
        """Record what the annotators of all ranks have; where one fails, its rank raises once the rest is recorded."""
        assert self.annotator is not None
        problem: Exception | None = None
        answers: Mapping[str, AnswerLike] = {}
        try:
            answers = self.annotator.answers(now, last=self.closing(now))
        except Exception as error:
            problem = error
        refused = self._take(self._gathered(answers))
        self.show(self.annotator.shown(now))
        if problem is not None or refused:
            raise problem or refused[0]

    def _gathered(self, answers: Mapping[str, AnswerLike]) -> Mapping[str, AnswerLike]:
        if self.classes is None:  # nothing was asked yet, in any rank
            return answers
        merged: dict[str, AnswerLike] = {}
        for theirs in self.ranks.objects(dict(answers)):
            for query_id, answer in theirs.items():
                before = merged.get(query_id)
                labels = [getattr(known, "label", known) for known in (before, answer) if known is not None]
                if len(labels) == 2 and labels[0] != labels[1]:
                    raise errors.Conflict(f"two processes answer question {query_id!r} differently: ask once")
                merged[query_id] = before if answer is None else answer
        return merged

    def show(self, ids: Iterable[str]) -> None:
        """Somebody has seen these questions, in any process."""
        if self.classes is not None:
            ids = [query_id for theirs in self.ranks.objects(list(ids)) for query_id in theirs]
        super().show(ids)


class SharedAdapter(Adapter):
    """An adapter that is one of several: each is given its share of every batch, all ask and learn as one.

    `predict`, `learn`, `step`, `answer` and `show` are called in every process, for the same batches in the same order.
    A question comes up in the process that has its sample; an answer given in any process reaches all.

    Parameters
    ----------
    classifier
        Of the same model in every process.
    update, parts
        As for `Adapter`, and the same in every process.
    questions
        Of this classifier.
    """

    classifier: SharedClassifier

    def __init__(
        self, classifier: SharedClassifier, update: how.Update, *, questions: Questions | None = None, **parts: Any
    ) -> None:
        _check_supported(update)
        if parts.get("guard") is not None:
            raise errors.BadConfig("guard and group cannot be used together: leave one of them out")
        self.ranks = classifier.ranks
        questions = SharedQuestions(classifier) if questions is None else questions
        # Refused in every process: to start with options that are not those of the others.
        here = {
            "model": classifier.fingerprint(),
            **{name: getattr(classifier, name) for name in ("statistics", "prior", "ema_weight", "mixture")},
            "update": _described(update),
            **{
                name: repr(getattr(questions, name))
                for name in ("context", "late_weight", "late_limit", "expires_after")
            },
            **{name: _described(part) for name, part in parts.items()},
        }
        for rank, there in enumerate(self.ranks.objects(here)):
            differ = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
            if differ:
                raise errors.BadConfig(
                    f"rank {rank} and rank {self.ranks.rank} were given different options ({', '.join(differ)}): "
                    "all processes must adapt the same model in the same way"
                )
        super().__init__(classifier, update, questions=questions, **parts)

    def predict(self, x: Inputs | Batch, *, ask: bool = True, learn: bool = True) -> Prediction:
        """As for `Adapter`, of this rank's share of a batch: `logits` are of its samples, and so are `queries`.

        The index of a question counts in the share.
        """
        batch = x if isinstance(x, Batch) else Batch(x)
        out = super().predict(batch, ask=ask, learn=learn)
        own = self.classifier.own(batch.inputs)
        out.logits = out.logits[own]
        out.queries = [
            replace(query, index=query.index - own.start)
            for query in out.queries
            if own.start <= query.index < own.stop
        ]
        return out


def _check_supported(update: how.Update) -> None:
    """Refuse a rule of learning that looks at more of a batch than its logits and features."""
    objective = getattr(update, "objective", None)
    for part, known in ((update, _UPDATES), (objective, (*_OBJECTIVES, type(None)))):
        if type(part) not in known:
            raise errors.BadConfig(
                f"{type(part).__name__} cannot be spread over several processes: it looks at more of a batch than its "
                "logits. Methods that can: source, bn, tent, eta, sar, eatta, wise"
            )


def _described(part: Any) -> Any:
    """The options of a part, as plain values that can be compared in another process."""
    if isinstance(part, Mapping):
        return {str(key): _described(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_described(value) for value in part]
    if part is None or isinstance(part, str | int | float) or not hasattr(part, "__dict__"):
        return repr(part)  # as text, since NaN equals nothing
    if type(part).__module__.partition(".")[0] != __name__.partition(".")[0]:
        return type(part).__qualname__
    options = {
        name: _described(value)
        for name, value in vars(part).items()
        if not name.startswith("_") or isinstance(value, str | int | float)
    }
    return {"": type(part).__qualname__, **options}
