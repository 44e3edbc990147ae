"""The contract of parts: what every policy, utility, selector, annotator, update rule, objective and method keeps to.

`check` tries a part of one's own. It needs no data: a small network and pictures of noise will do, unless others are
given. Each check is a function of a `Case`; the first line of its docstring is its title.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wise_atta import Adapter, Anchor, Batch, adapt, errors, how, what, when, who
from wise_atta.methods import Method
from wise_atta.stream import Inputs, size, tree_map
from wise_atta.view import View

# Batches of the stream that parts are tried on.
ALL, FIRST, REST = range(1, 9), range(1, 5), range(5, 9)


class ContractBroken(errors.WiseAttaError, AssertionError):
    """A part that does not do what all parts do; the message is the report."""


def network() -> nn.Module:
    """The classifier that parts are tried on: pictures [n, 3, 6, 6], BatchNorm, five classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        head = nn.Linear(8, 5)
    head.weight.data *= 16  # so that some predictions are sure
    return nn.Sequential(*body, head).eval()


def pictures(number: int) -> Tensor:
    """Batch `number` of a stream of noise that grows brighter: eight pictures."""
    noise = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1000 + number))
    return (noise * (1 + 0.05 * number) + 0.1 * number).sigmoid()


def check(
    factory: Callable[[], Any],
    *,
    model: Callable[[], nn.Module] = network,
    inputs: Callable[[int], Inputs] = pictures,
) -> str:
    """Try a part and give the report, a line for each check. `ContractBroken` with the report if one fails.

    Parameters
    ----------
    factory
        Makes the part, without arguments: a policy, utility, selector, annotator, update rule, objective or method.
        It is called many times and gives a new, equal part each time.
    model, inputs
        What the part is tried on, where the network and pictures of this module do not fit it: a function that makes
        the classifier, and one from the number of a batch to its inputs, eight samples or so.

    Examples
    --------
    >>> from wise_atta import when
    >>> print(check(lambda: when.Uniform(0.3)))
    policy Uniform(ratio=0.3, total=None, per='batch') keeps the contract
    ok     The same seed gives the same run, whatever the global random states, and moves none of them.
    ok     Its repr shows class and options, the same before and after use.
    ...
    """
    case, report, word = Case(factory, model, inputs), list[str](), "keeps"
    for function in KINDS[case.kind][2]:
        title = str(function.__doc__).partition("\n")[0]
        try:
            function(case)
            report.append(f"ok     {title}")
        except Exception as error:
            report.append(f"BROKEN {title} {error!r}")
            word = "breaks"
    report.insert(0, f"{case.kind} {factory()!r} {word} the contract")
    if word == "breaks":
        raise ContractBroken("\n".join(report))
    return "\n".join(report)


# -- a part at work ---------------------------------------------------------------------------------------------------


def view(number: int) -> View:
    """Batch `number` as utilities and selectors see it: eight samples of five classes."""
    generator, fixed = (torch.Generator().manual_seed(seed) for seed in (number, 0))
    features, head = 3 * torch.randn(8, 6, generator=generator), torch.randn(6, 5, generator=fixed)
    slow = features @ head + torch.randn(8, 5, generator=generator)
    return View(number, features @ head, features, lambda f: f @ head, lambda: slow)


@dataclass(frozen=True)
class Case:
    """A part, and what it is tried on.

    Parameters
    ----------
    make, model
        Make the part, and a network for it.
    inputs, view
        Give a batch by its number, as it is and as a utility or selector sees it.
    """

    make: Callable[[], Any]
    model: Callable[[], nn.Module] = network
    inputs: Callable[[int], Inputs] = pictures
    view: Callable[[int], View] = view

    @cached_property
    def kind(self) -> str:
        """Policy, selector, annotator, update, objective, method or utility."""
        part = self.make()
        for name, (base, *_) in KINDS.items():
            if isinstance(part, base) if base else callable(part) and hasattr(part, "needs_anchor"):
                return name
        raise errors.BadConfig(f"{part!r} is no part: a factory gives one of {', '.join(KINDS)}")

    @property
    def adapts(self) -> bool:
        """Whether it works within an adapter."""
        return self.kind in ("update", "objective", "method")

    @cached_property
    def classes(self) -> int:
        """Of the network."""
        return adapt(self.model(), "source").predict(self.inputs(1)).logits.shape[1]

    def batch(self, number: int) -> Batch:
        """One batch with names for its samples."""
        inputs = self.inputs(number)
        return Batch(inputs, ids=[f"{number}/{row}" for row in range(size(inputs))])

    def queries(self, number: int) -> list[who.Query]:
        """Two questions about a batch."""
        batch = self.batch(number)
        rows = sorted({number % len(batch), (number + 3) % len(batch)})
        return [who.Query.of(batch, number, row, torch.zeros(len(batch), self.classes)) for row in rows]

    def start(self, part: Any = None, *, net: nn.Module | None = None, shift: int = 0, delay: int = -1) -> Any:
        """The part ready to run: as it is, or in an adapter whose annotator adds `shift` to the classes it answers."""
        part = self.make() if part is None else part
        if not self.adapts:
            return part
        if not isinstance(part, Method):
            update = how.Descend(part, lr=0.01) if isinstance(part, how.Objective) else part
            part = Method("tried", update, policy=when.Uniform(0.5), anchor=Anchor())
        elif 0 < part.policy.account.rate * part.policy.account.units(8) < 1 / 4:
            part = replace(part, policy=when.Uniform(0.5))  # so short a stream would bring no label
        truth = who.Oracle(lambda query: (3 * query.batch + query.index + shift) % self.classes)
        annotator = who.Delayed(truth, who.Between(0, 2) if delay < 0 else delay)
        asks = part.update.teacher_cost is None and not isinstance(part.policy, when.Never)
        return adapt(self.model() if net is None else net, part, annotator=annotator if asks else None)

    def run(self, subject: Any, numbers: Sequence[int]) -> list[Any]:
        """What comes of some batches, each held to what its kind may give."""
        return [KINDS[self.kind][1](self, subject, number) for number in numbers]


def _step(case: Case, adapter: Adapter, number: int) -> list[Any]:
    out = adapter.step(case.batch(number))
    _require(out.spent <= out.allowed, f"{out.spent} labels spent where {out.allowed} were allowed")
    return [out.logits, [query.id for query in (*out.queries, *out.sent)], out.utility, out.spent]


def _decide(case: Case, policy: when.Policy, number: int) -> list[Any]:
    draw, account = random.Random(number), policy.account
    score, samples = draw.choice([draw.randint(0, 4), draw.gauss(0, 3)]), draw.randint(1, 6)  # some scores tie
    want = 0 if number % 7 == 6 else math.ceil(account.rate) + draw.randint(1, 2)
    least, most = policy.foresee(want, samples)
    granted = policy.decide(score, want=want, samples=samples)
    _require(least <= granted <= most <= want, f"{granted} labels of {want} where {least} to {most} were foreseen")
    earned = math.floor(account.rate * policy.seen) + account.credit
    allowed = earned if account.total is None else min(earned, account.total)
    _require(policy.spent <= allowed, f"{policy.spent} labels spent where ratio, credit and total allow {allowed}")
    return [granted, policy.spent, policy.allowed]


def _score(case: Case, utility: when.Utility, number: int) -> Tensor:
    seen = case.view(number)
    score = utility(seen)
    _require(isinstance(score, Tensor) and score.dim() == 0, f"{score!r} is no 0-dim tensor")
    _require(bool(score.isfinite()), f"the score is {score}")
    _require(utility.needs_anchor or not seen.drift_known, "it looks at drift: set needs_anchor")
    return score


def _pick(case: Case, selector: what.Selector, number: int) -> list[int]:
    seen, k = case.view(number), number * number % 11 + 1
    rows = selector.pick(seen, k)
    _require(len(set(rows)) == len(rows) <= k, f"{rows}: give at most {k} rows, each once")
    _require(all(row in range(len(seen)) for row in rows), f"{rows} are no rows of a batch of {len(seen)}")
    _require(selector.needs_anchor or not seen.drift_known, "it looks at drift: set needs_anchor")
    return rows


def _answer(case: Case, annotator: who.Annotator, number: int) -> list[Any]:
    queries = case.queries(number)
    before = _copy([[query.logits, query.input] for query in queries])
    annotator.ask(queries, number)
    if isinstance(annotator, who.Inbox):
        for query in annotator.open(limit=2):
            annotator.put(query.id, who.CANT_TELL if query.index % 4 == 3 else query.index % case.classes)
    answers = annotator.answers(number, last=[query.id for query in case.queries(number - 5)])
    _equal([[query.logits, query.input] for query in queries], before, "it wrote to a question")
    for name, answer in answers.items():
        _require(answer.decides, f"{answer!r} decides nothing: leave out what is not known yet")
        _require(name in {query.id for ago in range(6) for query in case.queries(number - ago)}, f"{name!r} is closed")
    return [{name: (answer.label, answer.by) for name, answer in answers.items()}, annotator.shown(number)]


# -- the checks -------------------------------------------------------------------------------------------------------


def same_seed(case: Case) -> None:
    """The same seed gives the same run, whatever the global random states, and moves none of them."""
    kept, runs = _random_states(), []
    try:
        for seed in (1, 2):
            for set_seed in (torch.manual_seed, np.random.seed, random.seed):
                set_seed(seed)
            before = _random_states()
            runs.append(case.run(case.start(), ALL))
            _equal(_random_states(), before, "a global random state moves: draw from a generator of its own")
        _equal(runs[0], runs[1], "two runs of equal parts differ")
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])


def has_repr(case: Case) -> None:
    """Its repr shows class and options, the same before and after use."""
    text, part = repr(case.make()), case.make()
    _require(type(part).__name__ in text and " at 0x" not in text, f"{text} does not say class and options")
    case.run(case.start(part), FIRST)
    # Behind two spaces and # a repr may say what has happened so far.
    _require(repr(part).split("  #")[0] == text, f"{text} becomes {part!r} in use")


def leaves_inputs_alone(case: Case) -> None:
    """It writes to no input."""
    views, inputs = {t: case.view(t) for t in ALL}, {t: case.inputs(t) for t in range(-4, 9)}
    tensors = [[[seen.logits, seen.features] for seen in views.values()], list(inputs.values())]
    before = _copy(tensors)
    watched = replace(case, inputs=inputs.__getitem__, view=views.__getitem__)
    watched.run(watched.start(), ALL)
    _equal(tensors, before, "it wrote to a tensor that it was given")


def resumes(case: Case) -> None:
    """A state is made of plain values, is never written to, and goes on to the same bits."""
    part = case.start()
    case.run(part, FIRST)
    state = part.state_dict()
    kept = _copy(state)
    expected = case.run(part, REST)
    for saved in (state, _copy(state)):
        resumed = case.start()
        resumed.load_state_dict(saved)
        _equal(resumed.state_dict(), kept, "a state that was loaded differs from the one saved")
        _equal(case.run(resumed, REST), expected, "what follows a loaded state differs")
        _equal(resumed.state_dict(), part.state_dict(), "the states at the end differ")
    _equal(state, kept, "going on wrote to a state that was saved or loaded")


def resets(case: Case) -> None:
    """After a reset it is as new."""
    part, new = case.start(), case.start()
    case.run(part, FIRST)
    part.reset(**({"policy": True, "account": True} if case.adapts else {}))
    # In an adapter batches are numbered on, and an empty desk knows how many questions there have been.
    before, after = ({**one.state_dict(), "number": 0, "desk": 0} for one in (new, part))
    _equal(after, before, "the state differs")
    if not case.adapts:
        _equal(case.run(part, ALL), case.run(new, ALL), "what follows a reset differs")


def refuses(case: Case) -> None:
    """Bad input is refused with an error of the library, and changes nothing."""
    part = case.start()
    case.run(part, FIRST)
    calls: dict[str, Callable[[], Any]] = {"the state of something else": lambda: part.load_state_dict({})}
    if case.kind == "policy":
        calls["a score of NaN"] = lambda: part.decide(math.nan)
        calls["want=-1"] = lambda: part.decide(1.0, want=-1)
        calls["samples=0"] = lambda: part.decide(1.0, samples=0)
    elif case.kind == "selector":
        calls = {"k=0": lambda: part.pick(case.view(1), 0)}
    elif case.adapts:
        nan = tree_map(lambda x: x * math.nan if x.is_floating_point() else x[:0], case.inputs(5))
        calls["a batch without a number"] = lambda: part.predict(nan)
        calls["an answer to no question"] = lambda: part.answer({"never asked": 0})
    before = part.state_dict()
    for reason, call in calls.items():
        try:
            call()
        except errors.WiseAttaError:
            _equal(part.state_dict(), before, f"{reason} was refused and changed something")
        else:
            raise ContractBroken(f"{reason} was taken")


def keeps_account(case: Case) -> None:
    """What is granted is charged; an undo is as if the batch had not come, and a refund can be spent again."""
    policy, twin, spent = case.make(), case.make(), 0
    for number in range(1, 61):
        before = policy.state_dict()
        policy.foresee(2, 3)
        _equal(policy.state_dict(), before, "foresee changed the policy")
        policy.decide(number % 9, want=math.ceil(policy.account.rate) + 1, samples=3)
        policy.undo()
        _equal(policy.state_dict(), before, "a decision that was undone left something behind")
        granted, charged, _ = _decide(case, policy, number)
        _equal(_decide(case, twin, number)[0], granted, "after an undo it decides otherwise")
        _require(charged == spent + granted, f"{charged} labels charged where {spent} + {granted} were granted")
        for one in (policy, twin):
            one.refund(min(granted, number % 2))
        spent = policy.spent


def answers_once(case: Case) -> None:
    """A question is answered once and shown once, and none before it is asked."""
    annotator = case.make()
    _require(not annotator.answers(0) and not annotator.shown(0), "it answers before it is asked")
    for batches in zip(*case.run(annotator, range(1, 21)), strict=True):  # the answers of each, the shown of each
        names = [name for batch in batches for name in batch]
        _require(len(set(names)) == len(names), f"a question came twice: {', '.join(names)}")


def leaves_model_alone(case: Case) -> None:
    """The user's model stays as it is; logits and export keep its dtype and device."""
    net = case.model().train()
    before, like, adapter = _look(net), next(net.parameters()), case.start(net=net)
    logits = [out[0] for out in case.run(adapter, ALL)]
    _equal(_look(net), before, "the model was changed")
    for tensor in (*logits, *adapter.export().parameters()):
        _require((tensor.dtype, tensor.device) == (like.dtype, like.device), f"{tensor.dtype} on {tensor.device}")
        _require(bool(tensor.isfinite().all()), "NaN or Inf")


def waits_for_labels(case: Case) -> None:
    """No prediction or question depends on a label before it is given."""
    runs = [case.run(case.start(shift=shift, delay=3), range(1, 5)) for shift in (0, 1)]
    _equal(runs[0], runs[1], "labels that had not arrived made a difference")


def fails_whole(case: Case) -> None:
    """A `learn` that fails leaves everything as it was, and learns the batch again to the same bits."""
    whole, part = case.start(), case.start()
    learn = part.learn

    def again(*args: Any) -> Any:
        place = 1
        while True:
            before = part.state_dict()
            try:
                with Fuse(place):
                    return learn(*args)
            except Interrupted:
                _equal(part.state_dict(), before, f"a learn that failed in call {place} of torch left something behind")
            place += 1 + place // 2

    part.learn = again
    _equal(case.run(part, FIRST), case.run(whole, FIRST), "a batch learned again differs")
    _equal(part.state_dict(), whole.state_dict(), "the states differ")


class Interrupted(BaseException):
    """Not an Exception: what interrupts a program is none either."""


class Fuse(TorchFunctionMode):
    """Fails once, in call number `left` of a function of torch that computes."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        computes = func.__name__ not in ("__get__", "__len__", "_set_grad_enabled")
        self.left -= computes
        if computes and self.left == 0:
            raise Interrupted
        return func(*args, **(kwargs or {}))


# Of each kind of part its class (a utility is any callable), how it is run, and its checks.
_Kind = tuple[type | None, Callable[[Case, Any, int], Any], Sequence[Callable[[Case], None]]]
_STATELESS = (same_seed, has_repr, leaves_inputs_alone)
_PARTS = (*_STATELESS, resumes, resets, refuses)
_ADAPTERS = (*_PARTS, leaves_model_alone, waits_for_labels, fails_whole)
KINDS: Mapping[str, _Kind] = {
    "policy": (when.Policy, _decide, (*_PARTS, keeps_account)),
    "selector": (what.Selector, _pick, _PARTS),
    "annotator": (who.Annotator, _answer, (*_PARTS, answers_once)),
    "update": (how.Update, _step, _ADAPTERS),
    "objective": (how.Objective, _step, _ADAPTERS),
    "method": (Method, _step, _ADAPTERS),
    "utility": (None, _score, _STATELESS),
}


# -- comparing --------------------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Equality to the bit, through trees of tensors, arrays and plain values; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, Tensor):
        first, second = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(first, second)
    return bool(a == b or (a != a and b != b))


def _equal(a: Any, b: Any, otherwise: str) -> None:
    _require(same(a, b), otherwise)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ContractBroken(otherwise)


def _copy(state: Any) -> Any:
    """As it comes back from a file, read by someone who trusts nobody."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _random_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _look(net: nn.Module) -> list[Any]:
    """What a user can see of a module: bits, identity and version of its tensors, its modes, attributes and hooks."""
    tensors = [*net.named_parameters(), *net.named_buffers()]
    kept = [(name, x.detach().clone(), id(x), x._version, x.requires_grad, x.grad is None) for name, x in tensors]
    return [kept, [(part.training, sorted(vars(part)), len(part._forward_hooks)) for part in net.modules()]]
