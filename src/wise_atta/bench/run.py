"""The run of an experiment: batch by batch, scored before the update, recorded, resumable at any moment."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wise_atta import errors, methods, rng, when, who
from wise_atta.bench.experiment import CARD_VERSION, Experiment, whole
from wise_atta.bench.inputs import other_inputs
from wise_atta.bench.place import differences, surroundings
from wise_atta.bench.record import Folder, claimed, pack_bits, pack_numbers, read_json, there
from wise_atta.bench.source import load
from wise_atta.bench.stream_cache import CachedStream, StreamCache
from wise_atta.data import Dataset, StreamSpec, models, open_dataset, open_stream
from wise_atta.data.streams import DataStream, PictureStream
from wise_atta.engine import host, memory
from wise_atta.loop import Adapter
from wise_atta.model import Classifier, StatisticsMode, Work
from wise_atta.prediction import Prediction, Step
from wise_atta.stream import Batch
from wise_atta.wrap import adapt

Progress = Callable[[int, int | None, float, int], None]

# By how much of itself a weight is moved to see how far apart runs come.
NUDGE = 1e-7
# How much of the first batch's logits a card keeps.
FIRST_ROWS, FIRST_CLASSES = 8, 16
# Fields about questions, all of no use where none is asked, those among them about late answers, and those whose value
# is opened for an option of the method.
_ASKING = ("policy", "utility", "selector", "ratio", "labels")
_LATE = ("context", "late_weight", "late_limit")
_ASKED = (*_ASKING[1:], "exhaust", "early", "annotator", "delay", "noise", *_LATE, "expires_after")
_GIVEN = {"teacher": "teacher", "source_data": "source"}
# Batches between checkpoints, and the share of a run's time that they may take, unless told otherwise.
_CHECKPOINT, CHECKPOINT_SHARE = 100, 0.005


@dataclass
class Score:
    """Errors so far: over all samples, by domain, and over pictures that were never asked for."""

    wrong: dict[str, int] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    by_picture: dict[str, list[int]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    place: dict[str, int] = field(default_factory=dict)

    def add(self, pictures: list[str], domains: list[str], wrong: list[bool]) -> list[int]:
        """Count samples by the pictures that they show; gives which row of `pictures` each is."""
        rows = []
        for picture, domain, bad in zip(pictures, domains, wrong, strict=True):
            self.seen[domain] = self.seen.get(domain, 0) + 1
            self.wrong[domain] = self.wrong.get(domain, 0) + bad
            rows.append(self.place.setdefault(picture, len(self.place)))
            tally = self.by_picture.setdefault(picture, [0, 0])
            tally[0] += bad
            tally[1] += 1
        return rows

    @property
    def error(self) -> float:
        return sum(self.wrong.values()) / max(1, sum(self.seen.values()))

    def summary(self) -> dict[str, Any]:
        """Errors in per cent."""
        never = [tally for picture, tally in self.by_picture.items() if picture not in self.asked]
        wrong, seen = (sum(tally[i] for tally in never) for i in (0, 1))
        by_domain = {domain: 100 * self.wrong[domain] / n for domain, n in self.seen.items()}
        return {
            "error": 100 * self.error,
            "error_mean_of_domains": float(np.mean(list(by_domain.values()))) if by_domain else None,
            "error_never_asked": 100 * wrong / seen if seen else None,
            "samples": sum(self.seen.values()),
            "samples_never_asked": seen,
            "by_domain": by_domain,
        }

    def pictures(self) -> list[dict[str, Any]]:
        """Errors picture by picture, so that methods can be compared on those that none of them asked for."""
        return [
            {"picture": picture, "wrong": wrong, "seen": seen, "asked": picture in self.asked}
            for picture, (wrong, seen) in self.by_picture.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "wrong": self.wrong,
            "seen": self.seen,
            "by_picture": self.by_picture,
            "asked": sorted(self.asked),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.wrong, self.seen = dict(state["wrong"]), dict(state["seen"])
        self.by_picture = {picture: list(tally) for picture, tally in state["by_picture"].items()}
        self.asked = set(state["asked"])
        self.place = {picture: row for row, picture in enumerate(self.by_picture)}


@dataclass(eq=False)
class Built:
    """An experiment with everything opened: what is about to run, and what its numbers depend on."""

    experiment: Experiment
    adapter: Adapter
    method: methods.Method
    stream: DataStream | CachedStream
    truth: Mapping[str, int]
    source: models.SourceModel
    device: torch.device
    teacher: models.SourceModel | None = None
    source_data: DataStream | CachedStream | None = None


def build(
    experiment: Experiment,
    *,
    data: Path | None = None,
    weights: Path | None = None,
    cache: StreamCache | None = None,
    device: str | None = None,
    nudge: int | None = None,
) -> Built:
    """Open data and model and put the method around them. Everything that can be wrong shows here.

    A `cache` holds streams in memory, for many runs in one process. `device` is where it runs instead of where the
    experiment says. `nudge` is the number of a run whose weights are moved a little, see `nudged`.
    """
    where = pick_device(device or experiment.device)
    source = load(experiment.model, weights)
    module = source.module if nudge is None else nudged(source.module, experiment.seed, nudge)
    spec = _cut(experiment.spec(), source, data)
    opener = open_stream if cache is None else cache.open
    stream, truth = opener(spec, data, device=where, workers=experiment.workers)
    dataset: Dataset | None = getattr(stream, "dataset", None)
    if dataset is not None and dataset.mask is None:
        numbers = _by_name(dataset.classes, source, dataset.name)
        if numbers is not None:
            truth = {sample: numbers[label] for sample, label in truth.items()}
    options = _options(experiment, stream.length)
    teacher = None if experiment.teacher is None else load(experiment.teacher, weights)
    if teacher is not None and "teacher" in methods.options(experiment.method):
        options["teacher"] = _teacher(teacher, where, source, dataset, "renorm")
    source_data = None
    if experiment.source_data is not None:
        clean = StreamSpec(data=experiment.source_data, batch=experiment.batch, limit=2000, seed=experiment.seed)
        source_data, _ = opener(_cut(clean, source, data), data, device=where, workers=experiment.workers)
        options["source"] = list(source_data)
    try:
        method = methods.get(experiment.method, **options)
    except (TypeError, ValueError) as error:
        if isinstance(error, errors.WiseAttaError):
            raise
        raise errors.BadConfig(
            f"experiment field 'options': method {experiment.method!r} cannot take {experiment.options}: {error}"
        ) from error
    if dataset is not None and not dataset.severities and "severity" in changed_fields(experiment):
        raise errors.BadConfig(
            f"experiment field 'severity': {experiment.data} has no severities: leave it out, or name a corrupted set"
        )
    if experiment.prior is not None and (mode := experiment.statistics or method.statistics) != "mixed":
        raise errors.BadConfig(f"experiment field 'prior': {_no_prior(mode)}")
    asks = not isinstance(method.policy, when.Never)
    if asks and dataset is not None and (method.labels or 0) > experiment.batch:
        raise errors.BadConfig(
            f"labels={method.labels} a batch, but a batch of this stream has {experiment.batch} samples: ask for at "
            "most as many"
        )
    if (experiment.exhaust or experiment.early) and asks:
        if stream.length is None:
            raise errors.BadConfig(f"exhaust and early need a stream of known length, which {experiment.data} is not")
        if experiment.early:
            labels = method.labels or experiment.batch
            policy = when.early(method.policy, length=stream.length, delay=experiment.delay, labels=labels)
        else:
            policy = when.Exhaust(method.policy, length=stream.length)
        method = replace(method, policy=policy)
    answers: who.Annotator = who.Oracle(truth)
    if experiment.annotator == "teacher" and teacher is not None:
        # It sees one picture at a time, which has no batch statistics.
        single = _teacher(teacher, where, source, dataset, "source")
        answers = who.Teacher(lambda inputs: single.forward(inputs.to(where)).logits)
    mask = None if dataset is None else dataset.mask
    if experiment.noise:
        names = _outputs(source, dataset)
        if names is None:
            raise errors.BadConfig(f"noise needs the number of classes, which {experiment.data} does not tell")
        answers = who.Noisy(answers, rate=experiment.noise, classes=len(names), seed=experiment.seed)
    if experiment.delay:
        answers = who.Delayed(answers, batches=experiment.delay, seed=experiment.seed)
    own = {name: getattr(experiment, name) for name in ("statistics", "prior")}
    adapter = adapt(
        module.to(where),
        method,
        mean=source.mean,
        std=source.std,
        classes=mask,
        annotator=answers,
        context=experiment.context,
        late_weight=experiment.late_weight,
        late_limit=experiment.late_limit,
        expires_after=experiment.expires_after,
        guard=experiment.guard,
        **{name: value for name, value in own.items() if value is not None},
        **experiment.fast,
    )
    return Built(experiment, adapter, method, stream, truth, source, where, teacher, source_data)


def run(
    experiment: Experiment,
    folder: Path,
    *,
    data: Path | None = None,
    weights: Path | None = None,
    cache: StreamCache | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    checkpoint: int | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Run an experiment in a folder of its own and give its card.

    A finished run is not repeated unless `again`; an interrupted one goes on from its last checkpoint and ends with the
    same numbers.

    Parameters
    ----------
    folder
        Where card, steps and queries go.
    device
        Where it runs, instead of where the experiment says: one GPU of several.
    progress
        Called after every batch with (batch, batches, error so far, labels spent).
    checkpoint
        Number of batches between checkpoints. None: a hundred, and more where they would take over 0.5 % of the time.
    """
    done = finished(folder, experiment, again)
    if done is not None:
        return done
    with settings(experiment):
        # Before the folder is made: a description that cannot run leaves nothing behind.
        built = build(experiment, data=data, weights=weights, cache=cache, device=device)
        with claimed(folder):
            # Another process may have finished it while this one opened data and model.
            done = finished(folder, experiment, again)
            if done is not None:
                return done
            files = Folder(folder)
            try:
                return _run(built, files, progress, checkpoint, again)
            finally:
                files.close()


def _run(built: Built, files: Folder, progress: Progress | None, checkpoint: int | None, again: bool) -> dict[str, Any]:
    experiment, recorder, memory = built.experiment, Recorder(built, files), Peak(built.device)
    start, before, began, saving = 0, 0.0, time.perf_counter(), 0.0
    # What the parts before and after an interruption must share for the card to be true of both.
    inputs, place = inputs_of(built), surroundings(built.device, torch.get_num_threads())
    moved = False
    state = None if again else files.restore()
    if again:
        files.clear()
    elif state is not None:
        if state["digest"] != experiment.digest:
            raise errors.DataError(
                f"{files.path} holds an unfinished run of another experiment: choose another folder, or --again"
            )
        # Early checkpoints tell the weights alone.
        begun = state.get("inputs", {"model": {"weights_hash": state.get("weights")}, "stream": {}})
        others = other_inputs(begun, inputs)
        if not others and not built.stream.go_on(state.get("digests", [])):
            others = ["the pixels here are others"]
        if others:
            raise errors.DataError(
                f"{files.path} holds a run that was begun with others: {'; '.join(others)}. Choose another folder, or "
                "--again"
            )
        recorder.load_state_dict(state["recorder"])
        start, before = state["batch"], state["seconds"]
        moved = state.get("moved", False) or bool(differences(state.get("surroundings", place), place))
    for number, batch in enumerate(_from(built.stream, start), start + 1):
        recorder.step(batch)
        if progress is not None:
            progress(number, built.stream.length, recorder.score.error, built.adapter.policy.spent)
        now = time.perf_counter()
        if number % (checkpoint or _CHECKPOINT) == 0 and (checkpoint or saving <= CHECKPOINT_SHARE * (now - began)):
            recorder.flush()
            files.checkpoint(
                {
                    "digest": experiment.digest,
                    "recorder": recorder.state_dict(),
                    "batch": number,
                    "seconds": before + now - began,
                    "inputs": inputs,
                    "digests": built.stream.digests[:number],
                    "surroundings": place,
                    "moved": moved,
                }
            )
            saving += time.perf_counter() - now
    recorder.flush()
    seconds = before + time.perf_counter() - began
    card = make_card(built, recorder, seconds, memory.bytes(), resumed=start > 0, moved=moved)
    files.finish(card, recorder.score.pictures())
    return card


class Recorder:
    """Runs batches through an adapter, scores them, and writes down what happened."""

    def __init__(self, built: Built, files: Folder | None = None) -> None:
        self.adapter, self.truth, self.files = built.adapter, built.truth, files
        self.restarts, self.picture_of = built.method.restarts, built.stream.picture_of
        self.score = Score()
        self.domain: str | None = None
        self.first: dict[str, Any] | None = None
        # A compiled or recorded network keeps the setting that it was made under; a precision is what was asked for.
        own = {name for name, value in built.experiment.fast.items() if value} & {"compile", "graphs", "precision"}
        self._full = built.experiment.deterministic and not own
        self._earlier = Work()
        self._last: Step | None = None
        self._unwritten: Callable[[], None] | None = None
        built.adapter.on_step(self._keep)

    def _keep(self, step: Step) -> None:
        self._last = step

    @property
    def work(self) -> Work:
        """Forwards and backwards of the whole run, also of the part before an interruption."""
        now, earlier = self.adapter.classifier.work, asdict(self._earlier)
        return Work(**{name: getattr(now, name) + count for name, count in earlier.items()})

    def state_dict(self) -> dict[str, Any]:
        return {
            "adapter": self.adapter.state_dict(),
            "score": self.score.state_dict(),
            "domain": self.domain,
            "first": self.first,
            "work": asdict(self.work),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.adapter.load_state_dict(state["adapter"])
        self.score.load_state_dict(state["score"])
        self.domain, self.first = state["domain"], state["first"]
        self._earlier = Work(**state["work"]) - self.adapter.classifier.work

    def step(self, batch: Batch) -> Prediction:
        """Predict, score, learn, record."""
        domain = str(batch.meta.get("domain", ""))
        if batch.meta.get("reset"):
            self.adapter.reset()
        elif self.restarts and self.domain not in (None, domain):
            self.adapter.restart()
        self.domain = domain
        began = time.perf_counter()
        with _full_precision(self._full and self.first is None):
            out = self.adapter.step(batch)
        assert self._last is not None
        arrived = _send(out.logits.argmax(dim=1), {} if self.files is None else _measured(out, self._last))
        if out.logits.is_cuda:
            # It still works on this batch: time to write down the one before.
            self.flush()
        # A GPU is asked last, so that the time is that of the work and not of handing it over.
        predicted, numbers = arrived()
        elapsed = time.perf_counter() - began
        self.first = self.first or first_batch(out.logits)
        ids = list(batch.ids or [])
        wrong = [self.truth[sample] != label for sample, label in zip(ids, predicted, strict=True)]
        domains = [str(d) for d in batch.meta.get("domains", [domain] * len(ids))]
        shown = [self.picture_of(sample) for sample in ids]
        pictures = self.score.add(shown, domains, wrong)
        self.score.asked.update(shown[query.index] for query in out.queries)
        if self.files is not None:
            self._unwritten = functools.partial(
                self._record, out.queries, self._last, numbers, domain, pictures, wrong, elapsed
            )
            if not out.logits.is_cuda:
                self.flush()
        return out

    def flush(self) -> None:
        """Write down the last batch, if it was not yet."""
        if self._unwritten is not None:
            self._unwritten()
            self._unwritten = None

    def _record(
        self,
        queries: Sequence[who.Query],
        step: Step,
        number: Mapping[str, float | None],
        domain: str,
        pictures: list[int],
        wrong: list[bool],
        elapsed: float,
    ) -> None:
        assert self.files is not None
        chosen = {query.index for query in queries}
        row: dict[str, Any] = {
            "batch": step.number,
            "domain": domain,
            "samples": step.samples,
            "wrong": sum(wrong),
            "error": sum(wrong) / len(wrong),
            # Sample by sample, so that two runs over one stream can be compared in pairs.
            "hits": pack_bits([not bad for bad in wrong]),
            "picked": pack_bits([place in chosen for place in range(len(wrong))]) if chosen else "",
            "pictures": pack_numbers(pictures),
            "logits": number["logits"],
            "utility": number["utility"],
            "threshold": number["threshold"],
            "rate": number["rate"],
            "debt": number["debt"],
            "asked": len(step.asked),
            "learned": len(step.learned),
            "late": step.late,
            "stale": len(step.stale),
            "expired": len(step.expired),
            "spent": step.spent,
            # Of the labels learned with this batch: how many batches ago they were asked for, on average.
            "delay": number["delay"],
            "entropy": number["entropy"],
            "drift": number["drift"],
            "loss": number["loss"],
            "forwards": step.work.forwards,
            "backwards": step.work.backwards,
            "ms": 1000 * elapsed,
            "tripped": step.tripped,
        }
        row |= {f"loss_{name}": number[f"loss_{name}"] for name in step.losses if name != "loss"}
        self.files.steps.append(row)
        for query in queries:
            truth = None if query.sample_id is None else self.truth[query.sample_id]
            self.files.queries.append(
                {
                    "id": query.id,
                    "batch": query.batch,
                    "sample": query.sample_id,
                    "domain": domain,
                    "predicted": int(query.logits.argmax()),
                    "truth": truth,
                    "entropy": number[f"entropy {query.id}"],
                    "drift": number.get(f"drift {query.id}"),
                }
            )


def first_batch(logits: Tensor) -> dict[str, Any]:
    """What a card keeps of the first batch's logits: a digest of all their bits, and a corner to compare by."""
    values = logits.detach().float().cpu().numpy()
    corner = values[:FIRST_ROWS, :FIRST_CLASSES].astype(float)
    return {
        "digest": hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16],
        "shape": list(values.shape),
        "logits": [[float(f"{value:.7g}") for value in row] for row in corner.tolist()],
    }


@contextlib.contextmanager
def _full_precision(wanted: bool) -> Iterator[None]:
    """Convolutions without TF32, whose three digits would hide whether another device computes the same."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = before and not wanted
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class Peak:
    """The most memory that was in use beyond what was there at the start: of the GPU, or of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._start: int | None = torch.cuda.memory_allocated(device)
        else:
            # What an earlier run or the making of the method left free would count as there from the start.
            memory.release_memory()
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back; Linux only
            self._start = _process_memory("VmRSS")

    def bytes(self) -> int | None:
        """None where the system does not tell."""
        if self.device.type == "cuda":
            peak: int | None = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = _process_memory("VmHWM")
        return None if peak is None or self._start is None else max(0, peak - self._start)


def _process_memory(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":")), None)


def inputs_of(built: Built) -> dict[str, Any]:
    """Weights and pictures that a run's numbers rest on; after a whole pass with a hash of all pixels."""
    inputs = {"model": built.source.card(), "stream": built.stream.describe()}
    if built.teacher is not None:
        inputs["teacher"] = built.teacher.card()
    if built.source_data is not None:
        inputs["source_data"] = built.source_data.describe()
    return inputs


def make_card(
    built: Built,
    recorder: Recorder,
    seconds: float,
    memory: int | None,
    resumed: bool = False,
    moved: bool = False,
) -> dict[str, Any]:
    """The run card: the experiment, its results, and all that they depend on.

    A run that was `moved`, begun with other threads, torch or device than it ended with, promises no digits.
    """
    excepted = [*built.experiment.excepted, *(["a move to another place while it ran"] if moved else [])]
    counts, work = built.adapter.counts, recorder.work
    policy, guard = built.adapter.policy, built.adapter.guard
    card = {
        "card_version": CARD_VERSION,
        "digest": built.experiment.digest,
        "experiment": built.experiment.model_dump(mode="json"),
        "results": {
            **recorder.score.summary(),
            "batches": built.adapter.number,
            "labels_spent": policy.spent,
            "labels_allowed": None if policy.allowed == float("inf") else policy.allowed,
            "questions": {name: getattr(counts, name) for name in type(counts).__dataclass_fields__},
            "forwards": work.forwards,
            "backwards": work.backwards,
            **({} if guard is None else {"trips": guard.trips}),
            "seconds": seconds,
            "peak_memory": memory,
            "resumed": resumed,
        },
        "first_batch": recorder.first,
        "provenance": {
            **inputs_of(built),
            "parts": repr(built.adapter),
            **surroundings(built.device, torch.get_num_threads()),
            "deterministic": built.experiment.deterministic,
            **({"excepted": excepted} if excepted else {}),
        },
    }
    # As it is read back from its file, tuples as lists.
    read: dict[str, Any] = json.loads(json.dumps(card))
    return read


def nudged(module: nn.Module, seed: int, number: int) -> nn.Module:
    """A copy whose every parameter is 1e-7 of itself larger or smaller: the last bit or two of a float32."""
    generator = rng.torch_cpu(seed, "nudge", number)
    module = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator, device="cpu").mul_(2).sub_(1)
            parameter.copy_(parameter.double() * (1 + NUDGE * signs.to(parameter.device)))
    return module


def finished(folder: Path, experiment: Experiment, again: bool = False) -> dict[str, Any] | None:
    """The card of this experiment if the folder holds it finished, and it is not to be run again."""
    file = folder / "card.json"
    if again or not there(file):
        return None
    try:
        card = whole(read_json(file), str(file))
    except errors.DataError as error:
        raise errors.DataError(f"{error}. --again runs it once more") from error
    if card.get("digest") != experiment.digest:
        raise errors.DataError(
            f"{folder} holds a finished run of another experiment: choose another folder, or --again"
        )
    return card


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise errors.BadConfig(f"device {name!r} cannot be used here: {error}") from error
    return device


@contextlib.contextmanager
def settings(experiment: Experiment) -> Iterator[None]:
    """Threads and deterministic mode for a run's time. On a CPU the process also keeps its memory, from then on."""
    if pick_device(experiment.device).type == "cpu":
        memory.keep_memory()
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    # Deterministic mode also fills every new tensor, a kernel each, to expose reads of memory never written to.
    fills = torch.utils.deterministic
    fill = getattr(fills, "fill_uninitialized_memory", True)
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    if experiment.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        setattr(fills, "fill_uninitialized_memory", False)  # noqa: B010  # a property that type checkers do not see
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags
        setattr(fills, "fill_uninitialized_memory", fill)  # noqa: B010


def idle(experiment: Experiment) -> dict[str, str]:
    """The fields that are given where nothing can come of them, each with the reason.

    Not a utility under a policy that does not look at it: it is written down batch by batch, and drift with it. Nor
    what is done about late answers at a delay of 0, which is one of the delays that they are compared at.

    >>> idle(Experiment(method="tent", delay=50))
    {'delay': "method 'tent' does not ask for labels"}
    >>> idle(Experiment(method="wise", policy="never", noise=0.1))
    {'noise': "policy 'never' asks for no labels"}
    """
    method, takes = experiment.method, methods.options(experiment.method)
    policy = experiment.policy or experiment.options.get("policy")
    why: dict[str, str] = {}
    if "policy" not in takes:
        why = dict.fromkeys(("policy", *_ASKED), f"method {method!r} does not ask for labels")
    elif policy == "never":
        why = dict.fromkeys(_ASKED, "policy 'never' asks for no labels")
    elif "teacher" in takes:
        own = f"method {method!r} has a teacher of its own, who answers at its own pace"
        why = dict.fromkeys(("annotator", "delay", "noise", *_LATE), own)
    for name, option in _GIVEN.items():
        answers = name == "teacher" and experiment.annotator == "teacher" and "annotator" not in why
        if option not in takes and not answers:
            why[name] = f"method {method!r} has no use for it"
    if experiment.statistics not in (None, "mixed"):
        why["prior"] = _no_prior(experiment.statistics)
    return {name: why[name] for name in changed_fields(experiment) if name in why}


def _no_prior(mode: str | None) -> str:
    return f"it counts under statistics 'mixed', and here they are {mode!r}"


def changed_fields(experiment: Experiment) -> list[str]:
    """The fields that are not at their default."""
    return [name for name, one in Experiment.model_fields.items() if getattr(experiment, name) != one.default]


def _options(experiment: Experiment, length: int | None) -> dict[str, Any]:
    """The method's options: those given, and those of the description that the method knows."""
    options = dict(experiment.options)
    takes = methods.options(experiment.method)
    needs = {row.needs for row in methods.list() if row.name == experiment.method}
    for name, option in _GIVEN.items():
        if getattr(experiment, name) is None and option in needs:
            raise errors.BadConfig(
                f"experiment field {name!r}: method {experiment.method!r} cannot do without: name one"
            )
    for name, why in idle(experiment).items():
        raise errors.BadConfig(f"experiment field {name!r}: {why}")
    for name in _ASKING:
        value = getattr(experiment, name)
        if value is not None:
            options[name] = value
    if "seed" in takes:
        options.setdefault("seed", experiment.seed)
    if str(options.get("preset")).startswith("authors") or options.get("exact"):
        options.setdefault("length", length)
    return options


def _outputs(source: models.SourceModel, dataset: Dataset | None) -> tuple[str, ...] | None:
    """The classes that the student chooses among; None where neither data nor model names them."""
    if dataset is not None and (dataset.mask is not None or source.classes is None):
        return dataset.classes
    return source.classes


def _by_name(names: tuple[str, ...], model: models.SourceModel, whose: str) -> tuple[int, ...] | None:
    """Where classes stand among a model's outputs; None where they are its outputs."""
    order = model.classes
    # As many that share no name are taken for the same classes, spelled otherwise.
    if order is None or names == order or (len(names) == len(order) and not set(names) & set(order)):
        return None
    return models.match(names, order, whose, model.name)


def _teacher(
    teacher: models.SourceModel,
    device: torch.device,
    student: models.SourceModel,
    dataset: Dataset | None,
    statistics: StatisticsMode,
) -> Classifier:
    """A teacher with its own normalisation, over the same classes as the student."""
    names, classes = _outputs(student, dataset), None if dataset is None else dataset.mask
    if names is not None and teacher.classes is not None:
        classes = _by_name(names, teacher, f"the student {student.name}")
    return Classifier(
        teacher.module.to(device),
        adapt="norm",
        statistics=statistics,
        mean=teacher.mean,
        std=teacher.std,
        classes=classes,
    )


def _from(stream: DataStream | CachedStream, start: int) -> Iterator[Batch]:
    """The batches from number `start` on; a stream that cannot start there is read up to it."""
    if isinstance(stream, PictureStream | CachedStream):
        return stream.batches(start)
    return itertools.islice(iter(stream), start, None)


def _cut(spec: StreamSpec, source: models.SourceModel, data: Path | None) -> StreamSpec:
    """Where neither the stream nor the data set says how pictures are cut, the model does."""
    if spec.resize is not None or spec.crop is not None or spec.data.startswith("python:"):
        return spec
    dataset = open_dataset(spec.data, data)
    if dataset.resize is not None or dataset.crop is not None:
        return spec
    return replace(spec, resize=source.resize or 0, crop=source.crop, interpolation=source.interpolation)


def _measured(out: Prediction, step: Step) -> dict[str, float | Tensor]:
    """All numbers of a step that may lie on its device."""
    view, losses = out.view, dict(step.losses)
    whole = losses.pop("loss", None)
    if whole is None and losses.keys() & {"ent", "sup"}:
        whole = functools.reduce(torch.add, [losses[name] for name in ("ent", "sup") if name in losses])
    waited = [step.number - int(name.partition("-")[0]) for name in step.learned]
    values: dict[str, float | Tensor] = {
        "logits": torch.linalg.vector_norm(out.logits.detach(), dtype=torch.float64) / math.sqrt(out.logits.numel()),
        "utility": step.utility,
        "threshold": step.threshold,
        "rate": step.rate,
        "debt": step.debt,
        "delay": float(np.mean(waited)) if waited else math.nan,
        "entropy": math.nan if view is None else view.entropy.mean(),
        "drift": math.nan if view is None or not view.drift_known else view.drift.mean(),
        "loss": math.nan if whole is None else whole,
        **{f"loss_{name}": loss for name, loss in losses.items()},
    }
    if view is not None:
        values |= {f"entropy {query.id}": view.entropy[query.index] for query in out.queries}
    if view is not None and view.drift_known:
        values |= {f"drift {query.id}": view.drift[query.index] for query in out.queries}
    return values


def _send(
    predicted: Tensor, values: Mapping[str, float | Tensor]
) -> Callable[[], tuple[list[int], dict[str, float | None]]]:
    """Set classes and numbers on their way from the device. What is given waits; NaN and infinity are None."""
    there = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.is_cuda}
    wanted = [predicted, *([torch.stack([value.float() for value in there.values()])] if there else [])]
    places, wait = host.send(wanted)

    def read() -> tuple[list[int], dict[str, float | None]]:
        wait()
        classes, brought = places[0].tolist(), places[1].tolist() if there else []
        numbers = {name: float(value) for name, value in values.items() if name not in there}
        numbers |= dict(zip(there, brought, strict=True))
        return classes, {name: number if math.isfinite(number) else None for name, number in numbers.items()}

    return read
