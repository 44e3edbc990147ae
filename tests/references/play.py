"""A reference, played on a scenario in place of the library, with a record of what every batch did."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from references import wise_options
from references.scenarios import SCENARIOS, SHOWN_BY
from wise_atta.reference import (
    bn,
    cema,
    cotta,
    eata,
    eatta,
    eta,
    hiltta,
    roid,
    sar,
    simatta,
    source,
    tent,
    wise,
    wise_published,
)
from wise_atta.reference.common import inside, norm_tensors

Program = Callable[..., Iterator[Tensor]]

# What a scenario calls otherwise than the program: the argument, and what becomes of the value.
RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "teacher": ("teacher_momentum", float),
    "entropy": ("filtered", lambda which: which == "filtered"),
    "head_weight": ("lambda_head", float),
    "lr_second": ("second_lr", float),
    "ent_unlabelled": ("unlabelled", float),
    "ent_labelled": ("ent", float),
    "sup_first": ("sup", float),
    "perturbed_first": ("first", int),
}
# The learning rate of each optimizer, as scenarios name it; momenta, betas and ε are the same for all of a method.
RATES = {"optimizer": "lr", "teacher_optimizer": "teacher_lr", "supervised": "supervised_lr"}
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
# What says which tensors adapt, what the optimizer is, and draws that only some presets make.
IGNORED = ("frozen", "whole", "optimizer", "momentum", "nesterov", "noise")
WITH_ADAM = ("tent", "eta", "eata", "cotta", "roid", "hiltta")


@dataclass
class Step:
    """What one batch did: the logits that are scored, every parameter afterwards, who was asked for.

    `extra` holds the parameters of a second network as `anchor.…` or `teacher.…`, `seen` the program's variables.
    """

    logits: Tensor
    params: dict[str, Tensor]
    asked: list[int] = field(default_factory=list)
    extra: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """A method's program, its scenarios, and its constants under the names that scenarios use."""

    name: str
    program: Program

    def scenarios(self) -> list[tuple[str, dict[str, Any]]]:
        return SCENARIOS[self.name]()

    @property
    def SHOWN_BY(self) -> dict[str, Any]:  # noqa: N802
        """Which scenarios show a constant that the first does not."""
        return SHOWN_BY.get(self.name, {})

    def constants(self, preset: str | None = None) -> dict[str, Any]:
        """The numbers of the method with their defaults."""
        program = self.program if preset is None else wise_options.PROGRAMS[preset]
        renamed = {new: old for old, (new, _) in RENAMED.items()}
        numbers: dict[str, Any] = dict(ADAM) if self.name in WITH_ADAM else {}
        numbers |= _fields(program)
        for name, parameter in inspect.signature(program).parameters.items():
            if isinstance(parameter.default, partial):
                numbers |= {RATES[name] if k == "lr" else k: v for k, v in parameter.default.keywords.items()}
            else:
                numbers[renamed.get(name, name)] = parameter.default
        return {
            name: value
            for name, value in numbers.items()
            if (isinstance(value, int | float) and not isinstance(value, bool)) or name == "candidates"
        }

    def run(
        self,
        net: nn.Module,
        batches: list[Tensor],
        *,
        labels: Callable[[int, int], int] | None = None,
        grants: list[int] | None = None,
        **given: Any,
    ) -> list[Step]:
        """What every batch did. The network is changed."""
        program = self._program(given)
        parameters = inspect.signature(program).parameters
        arguments: dict[str, Any] = {}
        for name, value in given.items():
            new, convert = RENAMED.get(name, (name, lambda value: value))
            if name in parameters and not isinstance(parameters[name].default, partial):
                arguments[name] = value
            elif new in parameters and new != name:
                arguments[new] = convert(value)
        if "constants" in parameters:
            names = {RENAMED.get(name, (name,))[0]: value for name, value in given.items()}
            fields = {name: value for name, value in names.items() if name in _fields(program)}
            arguments["constants"] = replace(parameters["constants"].default, **fields)
        for name, parameter in parameters.items():
            if isinstance(parameter.default, partial):
                arguments[name] = _optimizer(parameter.default, given, RATES[name])
        if {"frozen", "whole"} & set(given) and "adapt" in parameters:
            arguments["adapt"] = partial(_adapted, frozen=given.get("frozen", ()), whole=given.get("whole", ()))

        known = {*parameters, *_fields(program), *RATES.values(), *ADAM, *IGNORED}
        unknown = {name for name in given if not {name, RENAMED.get(name, (name,))[0]} & known}
        assert not unknown, f"{self.name} has no {sorted(unknown)}"

        asked: list[int] = []
        if labels is not None:

            def answer(t: int, i: int) -> int:
                asked.append(i)
                return labels(t, i)

            arguments["answer"] = answer
        if grants is not None:
            turn = iter(grants)
            arguments |= (
                {"decide": lambda score: next(turn)} if "decide" in parameters else {"grants": lambda t: grants[t - 1]}
            )
        return _record(program, net, batches, arguments, asked)

    def _program(self, given: dict[str, Any]) -> Program:
        """For wise that of the preset, with options where the scenario has some that the shipped one lacks."""
        if self.name != "wise":
            return self.program
        preset = given.pop("preset", "paper")
        if set(given) & wise_options.OPTIONS[preset]:
            return wise_options.PROGRAMS[preset]
        return {"paper": wise.run, "authors": wise_published.run}[preset]


def _fields(program: Program) -> dict[str, Any]:
    """The constants of a program that has them as one argument."""
    constants = inspect.signature(program).parameters.get("constants")
    return {} if constants is None else asdict(constants.default)


def _optimizer(default: partial[Any], given: dict[str, Any], rate: str) -> partial[Any]:
    """The optimizer that a scenario describes."""
    lr = {"lr": given[rate]} if rate in given else {}
    if default.func is torch.optim.Adam or given.get("optimizer") == "adam":
        beta1, beta2, eps = (given.get(name, value) for name, value in ADAM.items())
        return partial(torch.optim.Adam, **{"lr": default.keywords["lr"], **lr}, betas=(beta1, beta2), eps=eps)
    return partial(default, **lr, **{name: given[name] for name in ("momentum", "nesterov") if name in given})


def _adapted(net: nn.Module, frozen: tuple[str, ...], whole: tuple[str, ...]) -> list[nn.Parameter]:
    """Norm tensors less what lies in `frozen`, plus all that lies in `whole`."""
    norm = {id(p) for p in norm_tensors(net, without=frozen)}
    return [p for name, p in net.named_parameters() if id(p) in norm or inside(name, whole)]


def _record(
    program: Program, net: nn.Module, batches: list[Tensor], arguments: dict[str, Any], asked: list[int]
) -> list[Step]:
    """Plays a program. When it asks for the next batch it is done with the last: then its variables are read."""
    steps: list[Step] = []
    logits: list[Tensor] = []

    def stream() -> Iterator[Tensor]:
        for x in batches:
            asked.clear()
            yield x
            seen = inspect.getgeneratorlocals(run)
            seconds = {name: seen[name] for name in ("anchor", "teacher") if isinstance(seen.get(name), nn.Module)}
            extra = {f"{kind}.{name}": p for kind, other in seconds.items() for name, p in _snapshot(other).items()}
            rows = seen["sent"].nonzero().flatten().tolist() if "sent" in seen else list(asked)
            steps.append(Step(logits[-1], _snapshot(net), rows, extra, {k: _copied(v) for k, v in seen.items()}))

    run: Any = program(net, stream(), **arguments)
    for z in run:
        logits.append(z)
    return steps


def _snapshot(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


REFERENCES = {
    name: Reference(name, program)
    for name, program in {
        "source": source.run,
        "bn": bn.run,
        "tent": tent.run,
        "eta": eta.run,
        "eata": eata.run,
        "sar": sar.run,
        "cotta": cotta.run,
        "roid": roid.run,
        "simatta": simatta.run,
        "hiltta": hiltta.run,
        "cema": cema.run,
        "eatta": eatta.run,
        "wise": wise.run,
    }.items()
}
