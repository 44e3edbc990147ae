"""How is any network seen as features and a head, with few tensors that adapt and all others shared?

A `Classifier` never runs the user's module. It runs *replicas*: structural copies of the module tree that share every
frozen tensor with it. Before a forward a replica is bound to one `Version` of the adapted tensors, so the live model,
the anchor and the source are the same replica bound to three versions. A new version is published by one reference
swap, and a replica is used by one thread at a time: a forward sees one version, in any thread.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.checkpoint import CheckpointError

from wise_atta import errors, fast
from wise_atta.fast import Precision
from wise_atta.graphs import Graphs
from wise_atta.stream import Inputs, leaves, size, tree_map

StatisticsMode: TypeAlias = Literal["batch", "source", "mixed", "ema", "renorm"]
Spec: TypeAlias = str | Sequence[str]
# By group: one tensor each, or the whole group as a slice of a flat vector.
Gradients: TypeAlias = Mapping[str, Sequence[Tensor] | Tensor]

# Offsets in a flat vector are multiples of this, so that every view starts on a 256-byte boundary (float32).
_ALIGN = 64


@dataclass(frozen=True)
class Statistics:
    """Mean and variance of every BatchNorm layer in one vector, layer after layer.

    `batch` is the number of samples if the variances are the unbiased ones of a batch, as the BatchNorm kernel
    leaves them; None if they are to be used as they are. `before` is the moving average that they follow, if any.
    `moments` are those of the batch itself where it was normalised by a moving average that has yet to follow it.
    """

    values: Tensor
    batch: int | None = None
    before: Tensor | None = None
    moments: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values.detach().cpu().clone(), "batch": self.batch}


@dataclass(eq=False)
class Forward:
    """What one pass over a batch gave, with its graph if there is one.

    `scored` is the prediction that counts where a method's is not the logits, once it was computed. `prepared` is what
    an objective worked out while the device was still busy with the forward, `early` the gradients of an update that
    was begun then: the graph is used up. `first` is what the first layer gave, for another forward of the same inputs.
    """

    inputs: Inputs
    logits: Tensor
    features: Tensor
    version: Version
    statistics: Statistics | None = None
    scored: Tensor | None = None
    prepared: Any = None
    early: Gradients | None = None
    first: fast.First | None = None


@dataclass(eq=False)
class _Pass:
    """What the network itself gave: of a forward that is recorded, the memory that each replay fills."""

    logits: Tensor
    features: Tensor
    statistics: Statistics | None
    first: fast.First | None


@dataclass
class Work:
    """How often the network was run: forwards of all kinds, those of them with a graph, backwards."""

    forwards: int = 0
    gradient_forwards: int = 0
    backwards: int = 0

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.forwards - other.forwards,
            self.gradient_forwards - other.gradient_forwards,
            self.backwards - other.backwards,
        )


class Version:
    """One immutable set of values for the adapted tensors: a flat vector and named views of it."""

    def __init__(self, flat: Tensor, layout: Layout, grad: bool = True) -> None:
        self.flat = flat
        self.layout = layout
        self._grad = grad
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._whole: dict[int, Tensor] = {}

    @property
    def whole(self) -> Tensor:
        """All values as one leaf, which a recorded network takes in place of the views."""
        if not self._whole:
            self._whole.setdefault(0, self.flat.detach().requires_grad_(True))
        return self._whole[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The views, made when they are first asked for: a recorded network takes the vector alone."""
        if not self._tensors:
            views = self.layout.views(self.flat)
            if self._grad:
                for tensor in views.values():
                    tensor.requires_grad_(True)
            # Of two threads that ask at once, both get the same leaves.
            self._tensors.setdefault(0, views)
        return self._tensors[0]


def wide(values: Tensor) -> Tensor:
    """Values that others add up to: those of half precision in float32, others as they are."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


@dataclass(frozen=True)
class Layout:
    """Where each adapted tensor lies in the flat vector, and which slice each group of them takes."""

    shapes: dict[str, torch.Size]
    offsets: dict[str, int]
    groups: dict[str, tuple[str, ...]]
    slices: dict[str, slice]
    total: int
    pieces: tuple[int, ...] = field(repr=False)

    @staticmethod
    def of(groups: Mapping[str, Sequence[str]], shapes: Mapping[str, torch.Size]) -> Layout:
        offset, offsets, slices, pieces = 0, {}, {}, []
        for group, names in groups.items():
            start = offset
            for name in names:
                offsets[name] = offset
                values = shapes[name].numel()
                padding = -values % _ALIGN
                pieces += [values, padding] if padding else [values]
                offset += values + padding
            slices[group] = slice(start, offset)
        return Layout(
            shapes={name: shapes[name] for name in offsets},
            offsets=offsets,
            groups={group: tuple(names) for group, names in groups.items()},
            slices=slices,
            total=offset,
            pieces=tuple(pieces),
        )

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of a flat vector, cut loose from its graph."""
        # One call cuts values and padding apart: a vector needs no view of its own.
        parts = iter(torch.split_with_sizes(flat.detach(), self.pieces) if self.pieces else ())
        found: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            part = next(parts)
            found[name] = part if len(shape) == 1 else part.view(shape)
            if shape.numel() % _ALIGN:
                next(parts)
        return found

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new flat vector with these values; padding is zero."""
        first = next(iter(tensors.values()))
        flat = torch.zeros(self.total, dtype=first.dtype, device=first.device)
        for name, view in self.views(flat).items():
            view.copy_(tensors[name].detach())
        return flat


class _Replica:
    """A structural copy of the user's module: its own module objects, the user's frozen tensors."""

    def __init__(self, model: nn.Module, head: str, adapted: Sequence[str], how: _How) -> None:
        self.module = _copy_structure(model)
        self.module.eval()
        for part in self.module.modules():
            if "grad_checkpointing" in vars(part):
                # timm's own, in eval mode too: blocks would run again after they were bound to another version.
                vars(part)["grad_checkpointing"] = False
        modules = dict(self.module.named_modules())
        self.head = modules[head]
        self.features: Tensor | None = None
        self.lease: weakref.ref[fast.Lease] | None = None
        self._widens = how.precision == "bf16"
        self.head.register_forward_pre_hook(self._keep_features, with_kwargs=True)
        self.norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm)]
        # Layers without running statistics (None) always normalise by the batch.
        self.source_buffers = [(norm.running_mean, norm.running_var) for norm in self.norms]
        for norm in self.norms:
            norm.num_batches_tracked = None
            norm.track_running_stats = True
            if isinstance(norm, nn.SyncBatchNorm):
                # As a plain layer: what other processes predict on at the same time is none of this stream's.
                norm.forward = types.MethodType(_BatchNorm.forward, norm)  # type: ignore[method-assign]
        wanted = set(adapted)
        # A tied parameter has several places and one name: the first.
        first_name: dict[int, str] = {}
        self.places: list[tuple[dict[str, Any], str, str, Convert | None]] = []
        for path, module in modules.items():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = first_name.setdefault(id(parameter), f"{path}.{key}" if path else key)
                convert = how.conversion(module, self.head, parameter)
                if name in wanted:
                    self.places.append((module._parameters, key, name, convert))
                elif convert is not None:
                    # By place, not by name: a tied tensor may be needed in two precisions.
                    narrow = how.frozen(f"{path}.{key}", parameter.data, convert)
                    module._parameters[key] = nn.Parameter(narrow, requires_grad=False)
        self._set_up(modules, how)

    def _adapts(self, layer: nn.Module) -> bool:
        return layer is self.head or any(own is layer._parameters for own, *_ in self.places)

    def _set_up(self, modules: Mapping[str, nn.Module], how: _How) -> None:
        self.first = fast.FirstLayer(self.module, self._adapts, how.compile)
        self.in_place = fast.InPlace(self.module, how.compile)
        if self._widens:
            fast.without_autocast(self.head, how.device)
        if how.quick and not how.compile:
            for norm in self.norms:
                fast.quicken(norm) if how.reorders else fast.straight(norm)
        for name in how.blocks:
            fast.recompute(modules[name], lambda: None if self.lease is None else self.lease())
        self.run: Callable[..., Any] = torch.compile(self.module, dynamic=False) if how.compile else self.module

    def _keep_features(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._widens:
            args, kwargs = tuple(map(fast.widen, args)), {name: fast.widen(value) for name, value in kwargs.items()}
        self.features = args[0] if args else next(iter(kwargs.values()))
        return args, kwargs

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        for parameters, key, name, convert in self.places:
            parameters[key] = tensors[name] if convert is None else convert(tensors[name])


Convert: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class _How:
    """How replicas run: in which precision and memory format, compiled, with which blocks recomputed.

    Frozen tensors that must be converted for it are converted once, for all replicas.
    """

    device: torch.device
    precision: Precision | None
    channels_last: bool
    compile: bool
    blocks: tuple[str, ...]
    _frozen: dict[str, Tensor] = field(default_factory=dict)

    @property
    def quick(self) -> bool:
        return self.precision is not None or self.channels_last or self.compile

    @property
    def reorders(self) -> bool:
        """Whether batch statistics are summed in an order that suits the CPU. Never unless something was asked for."""
        return self.quick and self.device.type == "cpu" and not self.compile

    def conversion(self, module: nn.Module, head: nn.Module, parameter: Tensor) -> Convert | None:
        """What is done to a parameter before the layer uses it, if anything."""
        narrow = self.precision == "bf16" and parameter.is_floating_point() and not fast.kept_in_fp32(module, head)
        turn = self.channels_last and parameter.dim() == 4
        if not narrow and not turn:
            return None

        def convert(tensor: Tensor) -> Tensor:
            tensor = tensor.bfloat16() if narrow else tensor
            return fast.channels_last(tensor) if turn else tensor

        return convert

    def frozen(self, place: str, tensor: Tensor, convert: Convert) -> Tensor:
        if place not in self._frozen:
            self._frozen[place] = convert(tensor)
        return self._frozen[place]


class Classifier:
    """Any `nn.Module` seen as features and a head.

    Parameters
    ----------
    model
        A classifier: inputs → logits [n, C], or an object with `.logits`. It is never changed and never run.
    head
        The name of the layer that turns features [n, d] into logits. Found if not given: the last linear layer.
    adapt
        Which tensors adapt: one specification, or groups of them by name. A specification is ``"norm"`` (affine
        tensors of normalisation layers), ``"last-norm"`` (those of the last stage: of `layer4`, in nets without one of
        the last quarter of the normalisation layers, rounded up), ``"head"``, ``"head.bias"``, ``"all"``, the name of a
        block, a glob over parameter names, or a list of these; ``"!…"`` takes away.
    statistics
        What BatchNorm layers normalise with: the ``"batch"``, the ``"source"`` statistics, ``"mixed"`` (the source
        counted as `prior` samples beside the batch), ``"ema"`` (a moving average that starts at the source), or
        ``"renorm"`` (batch renormalisation: a moving average that starts at the first batch, used before it follows
        the batch at hand; gradients flow as if the batch had been used).
    classes
        Indices of the classes that can occur. Logits and labels are then over these, in this order.
    mean, std
        Normalisation of pictures in [0, 1], one number a channel, applied before the model.
    prior
        For ``"mixed"``: how many samples the source statistics are worth.
    ema_weight
        For ``"ema"`` and ``"renorm"``: the weight of a new batch.
    precision
        ``"fp32"``, ``"tf32"`` (float32 whose products may use TF32 on a GPU) or ``"bf16"`` (convolutions and products;
        adapted tensors, statistics, head and losses stay in float32). None leaves torch's own settings alone.
    channels_last
        Whether pictures and filters have their channels innermost.
    compile
        Whether the network goes through `torch.compile`.
    graphs
        Whether forwards and backwards of a batch shape that comes often are recorded as CUDA graphs and replayed.
    checkpointing
        Whether blocks keep their input alone and compute the rest again in the backward: less memory, one more forward.
        True finds the blocks; a list names them.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        *,
        head: str | None = None,
        adapt: Spec | Mapping[str, Spec] = "norm",
        statistics: StatisticsMode = "batch",
        classes: Sequence[int] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        prior: int = 256,
        ema_weight: float = 0.1,
        precision: Precision | None = None,
        channels_last: bool = False,
        compile: bool = False,
        graphs: bool = False,
        checkpointing: bool | Sequence[str] = False,
    ) -> None:
        if statistics not in get_args(StatisticsMode):
            raise errors.unknown("statistics", statistics, get_args(StatisticsMode))
        if (mean is None) != (std is None):
            raise errors.BadConfig("give both mean and std, or neither")
        if mean is not None and std is not None and (len(mean) != len(std) or min(std, default=0) <= 0):
            raise errors.BadConfig(f"mean and std need one number a channel, std above 0, not {mean} and {std}")
        if classes is not None and (len(set(classes)) != len(classes) or len(classes) < 2 or min(classes) < 0):
            raise errors.BadConfig("classes must be indices of the model's classes, at least two, none of them twice")
        if prior < 0 or not 0 < ema_weight <= 1:
            raise errors.BadConfig(f"prior must be ≥ 0 and ema_weight in (0, 1], not {prior} and {ema_weight}")
        self.model = _unwrap(model)
        self.statistics: StatisticsMode = statistics
        self.prior = prior
        self.ema_weight = ema_weight
        self.head_name = _find_head(self.model) if head is None else _check_head(self.model, head)
        self.classes = None if classes is None else torch.as_tensor(list(classes), dtype=torch.long)
        self._normal = None if mean is None or std is None else (torch.tensor(mean), torch.tensor(std))
        self._ready: tuple[Tensor, Tensor] | None = None
        self._columns: Tensor | None = None
        groups = adapt if isinstance(adapt, Mapping) else {"adapted": adapt}
        self.layout = self._lay_out(groups)
        self._parameters = dict(self.model.named_parameters())
        reference = next(iter(self._parameters.values()))
        self.device, self.dtype = reference.device, reference.dtype
        blocks = fast.check_blocks(self.model, checkpointing)
        self.has_batch_norm = any(isinstance(m, _BatchNorm) for m in self.model.modules())
        self._check_how(precision, compile, graphs, bool(blocks))
        self._how = _How(self.device, precision, channels_last, compile, blocks)
        self._free: list[_Replica] = [self._new_replica()]
        # A leased replica comes back when its graph dies, which may be while this thread holds the lock.
        self._lock = threading.RLock()
        self._head_checked = False
        # Whether the network writes to its inputs; None before its first forward.
        self._spoils: bool | None = None
        norms = self._free[0].norms
        self._channels = [norm.num_features for norm in norms]
        self._source_buffers = self._free[0].source_buffers
        # Norm layers may be kept in another precision than the rest of the network.
        own = [t for norm in norms for t in (norm.running_mean, norm.weight) if t is not None]
        self._norm_dtype = own[0].dtype if own else self.dtype
        self.work = Work()
        # Whether forwards of the same inputs will follow one another, so that it pays to keep what they share.
        self.repeats = False
        self.live = Version(self.source_flat(), self.layout)
        self.running = self._source_statistics() if statistics == "ema" and norms else None
        self._followed: Statistics | None = None
        self._graphs = Graphs(self._record, self.layout.views) if graphs else None

    def _check_how(self, precision: Precision | None, compile: bool, graphs: bool, checkpointing: bool) -> None:
        """Refuse ways to run that do not exist here, or that exclude each other."""
        if precision is not None and precision not in get_args(Precision):
            raise errors.unknown("precision", precision, get_args(Precision))
        if precision is not None and self.dtype != torch.float32:
            raise errors.BadConfig(f"precision={precision!r} needs a model in float32, this one is {self.dtype}")
        if graphs and self.device.type != "cuda":
            raise errors.BadConfig(
                f"graphs=True needs a CUDA device, the model is on {self.device}: move the model there first, or leave "
                "graphs out"
            )
        if checkpointing and (graphs or compile):
            raise errors.BadConfig(
                "checkpointing runs parts of the network again in the backward, which neither graphs nor compile know "
                "of: leave them out, or leave checkpointing out"
            )
        if compile and torch.__version__ < "2.5":  # versions, not texts: 2.11 is newer
            raise errors.BadConfig(
                f"compile=True needs torch 2.5 or newer, this is {torch.__version__}: it takes the adapted tensors for "
                "constants"
            )
        if compile and self.has_batch_norm and self.statistics not in ("batch", "source"):
            raise errors.BadConfig(
                f"compile=True with BatchNorm layers needs statistics='batch' or 'source', not {self.statistics!r}: "
                "the others are computed between the layers"
            )
        if compile:
            from torch._functorch import config

            # Some rules take two gradients of one forward, so what it saved must outlive the first, as in older torch.
            if hasattr(config, "donated_buffer"):
                config.donated_buffer = False

    # -- which tensors ------------------------------------------------------------------------------------------

    def select(self, spec: Spec) -> tuple[str, ...]:
        """The names of the parameters that a specification means, in the model's order."""
        terms = [spec] if isinstance(spec, str) else list(spec)
        chosen: set[str] = set()
        for term in terms:
            if term.startswith("!"):
                chosen -= self._match(term[1:])
            else:
                found = self._match(term)
                if not found:
                    raise errors.NothingToAdapt(self._nothing(term))
                chosen |= found
        if not chosen:
            raise errors.NothingToAdapt(f"{terms} takes away everything that it names, so nothing is left to adapt")
        return tuple(name for name, p in self.model.named_parameters() if name in chosen and p.is_floating_point())

    def _match(self, term: str) -> set[str]:
        # A tied parameter can be meant by any of its names; the layout knows it by its first.
        first = {id(parameter): name for name, parameter in self.model.named_parameters()}
        names = {name: first[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}
        if term == "all" or (term == "head" and not self.head_name):  # a linear layer by itself is all head
            return set(names.values())
        if term == "norm":
            return {
                names[f"{path}.{key}" if path else key]
                for path, module in self.model.named_modules()
                if _is_norm(module)
                for key, _ in module.named_parameters(recurse=False)
            }
        if term == "last-norm":
            return self._last_stage()
        # "head" is the head wherever it is; a block that happens to have that name can still be meant by what is in it.
        head = term == "head" or term.startswith("head.")
        wanted = [(self.head_name + term.removeprefix("head")).removeprefix(".")] if head else []
        for name in [*wanted, term]:
            found = {
                own for n, own in names.items() if n == name or n.startswith(name + ".") or fnmatch.fnmatchcase(n, name)
            }
            if found:
                return found
        return set()

    def _last_stage(self) -> set[str]:
        """Norm tensors of `layer4` (ResNets), else of the last quarter of the norm layers; at least one layer is left.

        In a transformer of N blocks with one final norm that quarter is the last N/4 blocks and the final norm.
        """
        norms = self._match("norm")
        last = {name for name in norms if "layer4" in name.split(".")}
        if last:
            return last
        ordered = [name for name, _ in self.model.named_parameters() if name in norms]
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in ordered))
        left = max(len(layers) * 3 // 4, 1)
        return {name for name in ordered if name.rpartition(".")[0] in layers[left:]}

    def _nothing(self, term: str) -> str:
        if term == "norm":
            return (
                "the model has no normalisation layer with affine parameters, so there is nothing to adapt. "
                "Adapt other tensors instead, for example adapt='head' or the name of a block (for wise and hiltta "
                "norm='head')"
            )
        blocks = ", ".join(name for name, _ in self.model.named_children())
        return f"no parameter of the model matches {term!r}. Blocks of this model: {blocks or 'none'}"

    def _lay_out(self, groups: Mapping[str, Spec]) -> Layout:
        taken: set[str] = set()
        chosen: dict[str, tuple[str, ...]] = {}
        for group, spec in groups.items():
            chosen[group] = tuple(name for name in self.select(spec) if name not in taken)
            taken.update(chosen[group])
        parameters = dict(self.model.named_parameters())
        kinds = {(parameters[n].dtype, parameters[n].device) for n in taken}
        if len(kinds) > 1:
            raise errors.BadConfig(f"adapted tensors must share one dtype and device, found {sorted(map(str, kinds))}")
        return Layout.of(chosen, {name: parameters[name].shape for name in taken})

    @functools.cached_property
    def head_is_linear(self) -> bool:
        """Whether the logits are W·f + b of the features as they are, for all classes, with W and b the head's own."""
        head = self.model.get_submodule(self.head_name)
        plain = type(head) is nn.Linear and "forward" not in vars(head) and self.classes is None
        # A hook may change anything: weight_norm and spectral_norm make W anew in one.
        hooks = head._forward_pre_hooks, head._forward_hooks, head._backward_pre_hooks, head._backward_hooks
        own = {f"{self.head_name}.weight", f"{self.head_name}.bias"}
        return plain and not any(hooks) and own.issuperset(self.select("head"))

    @property
    def outputs(self) -> int | None:
        """How many classes the model itself has, where that can be told before its first forward."""
        found = getattr(self.model.get_submodule(self.head_name), "out_features", None)
        return found if isinstance(found, int) else None

    def like(self, model: nn.Module, *, statistics: StatisticsMode) -> Classifier:
        """Another model, seen as this one is: the same normalisation of inputs, the same subset of classes."""
        mean, std = (None, None) if self._normal is None else (part.tolist() for part in self._normal)
        classes = None if self.classes is None else self.classes.tolist()
        return Classifier(
            model,
            statistics=statistics,
            classes=classes,
            mean=mean,
            std=std,
            prior=self.prior,
            ema_weight=self.ema_weight,
            precision=self._how.precision,
            channels_last=self._how.channels_last,
        )

    def source_flat(self) -> Tensor:
        """The source values of the adapted tensors, read from the user's module, as a new vector."""
        if not self.layout.shapes:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        return self.layout.flatten({name: self._parameters[name] for name in self.layout.shapes})

    def source(self) -> Version:
        """The adapted tensors as they were trained."""
        return Version(self.source_flat(), self.layout, grad=False)

    def publish(self, flat: Tensor) -> None:
        """Make these values the live version. The vector must not be written to afterwards."""
        self.live = Version(flat, self.layout)

    def fingerprint(self) -> dict[str, Any]:
        """What tells this model's states from another's: names, shapes, and checksums.

        The first is of all source values that adapt, the second of a few values of every tensor of the model.
        """
        values = self.source_flat().cpu().contiguous()
        few = [_few(tensor) for tensor in (*self.model.parameters(), *self.model.buffers()) if tensor.numel()]
        return {
            "groups": {group: list(names) for group, names in self.layout.groups.items()},
            "shapes": {name: list(shape) for name, shape in self.layout.shapes.items()},
            "dtype": str(values.dtype),
            "classes": None if self.classes is None else self.classes.tolist(),
            "source": _checksum(values),
            "network": _checksum(torch.cat(few).cpu()) if few else 0,
        }

    # -- running it ---------------------------------------------------------------------------------------------

    def forward(
        self,
        inputs: Inputs,
        *,
        version: Version | None = None,
        statistics: Statistics | Literal["source"] | None = None,
        running: Tensor | Literal["now"] | None = "now",
        grad: bool = False,
        keep: bool = True,
        beside: Forward | None = None,
    ) -> Forward:
        """Run the network once.

        Parameters
        ----------
        inputs
            A batch, already checked by `check`.
        version
            Which values the adapted tensors take; the live ones if not given.
        statistics
            What to normalise with instead of the classifier's own way: given statistics, or the source's.
        running
            The moving average of another moment, for the classifier's own way; None where there was none yet.
        grad
            Whether to keep the graph. Works inside the caller's `no_grad` and `inference_mode`.
        keep
            Whether the batch's own statistics will be wanted; without them the forward may give none.
        beside
            An earlier forward of the very same inputs. What the first layer gave there is not computed again.
        """
        version = self.live if version is None else version
        running = self.running if isinstance(running, str) else running
        self.work.forwards += 1
        self.work.gradient_forwards += grad
        with torch.inference_mode(False), torch.set_grad_enabled(grad), self._products():
            inputs = tree_map(_outside_inference_mode, inputs)
            if statistics is None and self._graphs is not None and self._head_checked:
                replayed = self._replay(self._graphs, inputs, version, running, grad, beside)
                if replayed is not None:
                    return replayed
            keep = keep or not self.quick or self._how.compile or self._graphs is not None
            first = beside.first if beside is not None and beside.inputs is inputs else None
            done = self._run(inputs, version.tensors, statistics, running, keep, first)
        return Forward(inputs, done.logits, done.features, version, done.statistics, first=done.first)

    def _run(
        self,
        inputs: Inputs,
        tensors: Mapping[str, Tensor],
        statistics: Statistics | Literal["source"] | None,
        running: Tensor | None,
        keep: bool = True,
        first: fast.First | None = None,
    ) -> _Pass:
        with contextlib.ExitStack() as stack:
            replica = stack.enter_context(self._replica())
            replica.bind(tensors)
            used = stack.enter_context(self._normalising(replica, statistics, size(inputs), running, keep))
            lease = None
            if self._how.blocks and torch.is_grad_enabled():
                # The backward runs blocks of this replica again: until then it must stay as it is.
                lease = fast.Lease(stack.pop_all().close)
                replica.lease = weakref.ref(lease)
            with replica.first.known(first, keeps=self.repeats):
                output = self._call(replica, inputs)
                first = replica.first.output
            features = replica.features
            replica.features = replica.lease = None
            if not self._head_checked:
                self._check_output(replica, features, output)
        assert features is not None
        return _Pass(self._subset(output), features, used, first)

    def _record(
        self, inputs: Inputs, tensors: dict[str, Tensor], running: Tensor | None, first: fast.First | None
    ) -> _Pass:
        with self._products():
            return self._run(inputs, tensors, None, running, first=first)

    def _replay(
        self,
        graphs: Graphs,
        inputs: Inputs,
        version: Version,
        running: Tensor | None,
        grad: bool,
        beside: Forward | None,
    ) -> Forward | None:
        same = beside.logits if beside is not None and beside.inputs is inputs else None
        found = graphs.run(inputs, version.whole if grad else version.flat, running, grad, same)
        if found is None:
            return None
        logits, features, rest, recorded = found
        used: Statistics | None = recorded.statistics
        if used is not None:
            values = rest[0] if used.moments is None else running
            before = used.before if running is None else running
            assert values is not None
            used = Statistics(values, used.batch, before, None if used.moments is None else rest[-1])
        return Forward(inputs, logits, features, version, used)

    def _products(self) -> contextlib.AbstractContextManager[None]:
        return fast.products(self._how.precision, self.device)

    def head(self, features: Tensor, version: Version | None = None) -> Tensor:
        """Logits from features, with the head of a version (the live one if not given)."""
        with torch.inference_mode(False), self._products(), self._replica() as replica:
            replica.bind((self.live if version is None else version).tensors)
            features = _outside_inference_mode(features)
            if not torch.is_autocast_enabled(features.device.type):
                # Features of a forward under autocast may be used outside of it.
                features = features.to(next(replica.head.parameters(), features).dtype)
            output: Tensor = replica.head(features)
            replica.features = None
        return self._subset(output)

    def pull(self, forward: Forward, slope: Tensor, groups: Sequence[str]) -> Gradients:
        """The gradients of a loss whose slope in the logits is known: the network's backward and nothing else."""
        whole = None if self._graphs is None else self._graphs.pull(forward.logits, slope)
        if whole is None:
            return self.gradients(forward.logits, forward.version, groups, slope=slope)
        self.work.backwards += 1
        return {group: whole[self.layout.slices[group]] for group in groups}

    def gradients(
        self,
        loss: Tensor,
        version: Version,
        groups: Sequence[str],
        *,
        slope: Tensor | None = None,
        retain_graph: bool = False,
        head: bool = False,
    ) -> dict[str, list[Tensor]]:
        """∂loss/∂tensor for the tensors of each group; zeros where the loss does not depend on one.

        With a `slope`, `loss` stands for tensors that the loss depends on, and the slope for how. `head` says that the
        loss comes from cached features through the head alone: that is no backward of the network.
        """
        names = [name for group in groups for name in self.layout.groups[group]]
        if not names:
            return {group: [] for group in groups}
        if not loss.requires_grad:
            raise errors.NothingToAdapt(
                f"the logits do not depend on the adapted tensors ({names[0]}, …): does the model run them under "
                "torch.no_grad(), or detach what they give? Leave that out, or adapt tensors that come after it, for "
                "example adapt='head' (for wise and hiltta norm='head')"
            )
        self.work.backwards += not head
        with self._products():
            if version._whole and not head:
                found = self._gradients_of_whole(loss, version, names, slope, retain_graph)
            else:
                tensors = [version.tensors[name] for name in names]
                try:
                    grads = torch.autograd.grad(
                        loss, tensors, slope, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
                    )
                except CheckpointError as error:
                    raise errors.BadConfig(
                        "the model recomputes activations in the backward by itself, when its tensors may be others "
                        "already: turn that off in the model and use checkpointing=True, or name the blocks there"
                    ) from error
                found = dict(zip(names, grads, strict=True))
        if self._graphs is not None and not retain_graph and not head:
            self._graphs.done()
        return {group: [found[name] for name in self.layout.groups[group]] for group in groups}

    def _gradients_of_whole(
        self, loss: Tensor, version: Version, names: Sequence[str], slope: Tensor | None, retain_graph: bool
    ) -> dict[str, Tensor]:
        """The same for a loss of which a part, or all, comes from a recorded network."""
        apart = [version.tensors[name] for name in names] if version._tensors else []
        leaves = [version.whole, *apart]
        whole, *grads = torch.autograd.grad(loss, leaves, slope, retain_graph=retain_graph, allow_unused=True)
        found = self.layout.views(torch.zeros_like(version.flat) if whole is None else whole)
        for name, grad in zip(names, grads, strict=False):
            found[name] = found[name] if grad is None else found[name] + grad
        return found

    @property
    def quick(self) -> bool:
        """Whether it was asked to be fast, so that sums may be taken in another order than usual."""
        return self._how.quick or self._graphs is not None

    def check(self, inputs: Inputs) -> int:
        """Refuse inputs that cannot be predicted on; otherwise the number of samples."""
        count = size(inputs)
        if count == 0:
            raise errors.BadInput("the batch is empty: leave empty batches out of the stream")
        for leaf in leaves(inputs):
            if leaf.device != self.device:
                raise errors.BadInput(f"inputs are on {leaf.device}, the model is on {self.device}: move the inputs")
            if leaf.is_floating_point() and leaf.dtype != self.dtype:
                raise errors.BadInput(f"inputs are {leaf.dtype}, the model is {self.dtype}: convert the inputs")
        if count == 1 and self.statistics in ("batch", "renorm") and self.has_batch_norm:
            raise errors.SingleSample(
                "one sample has no batch statistics to normalise with: use larger batches, or "
                "statistics='ema' (or 'mixed', 'source')"
            )
        return count

    def _call(self, replica: _Replica, inputs: Inputs) -> Tensor:
        """The network's output. Inputs stay as they are: the user's own, and other forwards take them too."""
        if self._spoils:
            return self._output(replica, tree_map(torch.clone, inputs))
        if self._spoils is not None:
            return self._output(replica, inputs)
        given, before = leaves(inputs), [(leaf.clone(), leaf._version) for leaf in leaves(inputs)]
        output = self._output(replica, inputs)
        self._spoils = any(leaf._version != version for leaf, (_, version) in zip(given, before, strict=True))
        if not self._spoils:
            return output
        with torch.no_grad():
            for leaf, (values, _) in zip(given, before, strict=True):
                # What `expand` shows many times is there once, and torch writes to it once.
                once = tuple(slice(1) if stride == 0 else slice(None) for stride in leaf.stride())
                leaf[once].copy_(values[once])
        return self._call(replica, inputs)

    def _output(self, replica: _Replica, inputs: Inputs) -> Tensor:
        inputs = self._normalise(inputs)
        if self._how.precision == "bf16":
            inputs = tree_map(lambda leaf: leaf.bfloat16() if leaf.is_floating_point() else leaf, inputs)
        if self._how.channels_last:
            inputs = tree_map(fast.channels_last, inputs)
        replica.in_place.set(torch.is_grad_enabled())
        try:
            with fast.lowered(self._how.precision, self.device):
                if isinstance(inputs, Tensor):
                    replica.first.enters(inputs)
                    output = replica.run(inputs)
                elif isinstance(inputs, Mapping):
                    output = replica.run(**inputs)
                else:
                    output = replica.run(*inputs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{list(leaf.shape)} {leaf.dtype}" for leaf in leaves(inputs))
            raise errors.BadInput(f"the model could not be run on inputs of {shapes}: {error}") from error
        output = getattr(output, "logits", output)
        if not isinstance(output, Tensor) or output.dim() != 2:
            what = f"shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            alone = " for one sample: does it squeeze() the batch away? Late labels come one by one"
            raise errors.BadInput(
                f"the model must return logits [n, C] or an object with .logits, not {what}"
                f"{alone if size(inputs) == 1 else ''}"
            )
        return output

    def _normalise(self, inputs: Inputs) -> Inputs:
        if self._normal is None:
            return inputs
        if not isinstance(inputs, Tensor):
            raise errors.BadConfig("mean and std apply to a single tensor of pictures, not to a tree of tensors")
        if not inputs.is_floating_point():
            raise errors.BadInput(f"mean and std apply to numbers in [0, 1], not to {inputs.dtype}: convert the inputs")
        channels = inputs.shape[1] if inputs.dim() > 1 else 0
        if len(self._normal[0]) not in (1, channels):
            raise errors.BadInput(f"mean and std have {len(self._normal[0])} channels, the inputs {channels}")
        if self._ready is None:
            # On the device once: a copy from the host would make every forward wait for it.
            mean, std = self._normal
            self._ready = mean.to(self.device, self.dtype), std.to(self.device, self.dtype)
        mean, std = (t.to(inputs).view(1, -1, *[1] * (inputs.dim() - 2)) for t in self._ready)
        return (inputs - mean) / std

    def _subset(self, output: Tensor) -> Tensor:
        if self.classes is None:
            return output
        if self._columns is None:
            self._columns = self.classes.to(output.device)
        return output[:, self._columns]

    def _check_output(self, replica: _Replica, features: Tensor | None, output: Tensor) -> None:
        """head(features) must be the logits: otherwise selection and the head step would work on something else."""
        if output.shape[1] == 1:
            raise errors.BadInput(
                "the model gives one logit a sample, which leaves nothing to choose from: for two classes wrap it so "
                "that it returns two logits, 0 and that one"
            )
        if self.classes is not None and int(self.classes.max()) >= output.shape[1]:
            raise errors.BadConfig(f"classes names class {int(self.classes.max())}, the model has {output.shape[1]}")
        with torch.no_grad():
            if features is not None:
                again = replica.head(features)
                scale = output.abs().max().clamp_min(1)
                if again.shape == output.shape and ((again - output).abs().max() <= 1e-3 * scale).item():
                    self._head_checked = True
                    return
                if not output.isfinite().all().item():
                    return
        fitting = [
            name
            for name, m in self.model.named_modules()
            if isinstance(m, nn.Linear) and m.out_features == output.shape[1]
        ]
        if fitting == [self.head_name]:
            raise errors.HeadNotFound(
                f"the model does not return what layer {self.head_name!r} gives, its only linear layer with "
                f"{output.shape[1]} outputs. Leave out what follows it (a softmax, say), so that the model returns "
                "logits, or name the layer that does turn features into the logits with head='…'"
            )
        raise errors.HeadNotFound(
            f"layer {self.head_name!r} does not turn features into the logits. Name the layer that does with "
            f"head='…'. Linear layers with {output.shape[1]} outputs: {', '.join(fitting) or 'none'}"
        )

    def _new_replica(self) -> _Replica:
        return _Replica(self.model, self.head_name, list(self.layout.shapes), self._how)

    @contextlib.contextmanager
    def _replica(self) -> Iterator[_Replica]:
        with self._lock:
            replica = self._free.pop() if self._free else None
        if replica is None:
            replica = self._new_replica()
        try:
            yield replica
        finally:
            replica.features = None
            with self._lock:
                self._free.append(replica)

    # -- normalisation statistics -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _normalising(
        self,
        replica: _Replica,
        given: Statistics | Literal["source"] | None,
        count: int,
        running: Tensor | None,
        keep: bool = True,
    ) -> Iterator[Statistics | None]:
        """Set up every BatchNorm layer of a replica; gives the statistics that the forward fills in or uses."""
        if not replica.norms:
            yield None
        elif isinstance(given, Statistics):
            pairs = self._pairs(_outside_inference_mode(given.values))
            self._bind(replica, pairs, training=False)
            # Late samples are normalised as in the batch that asked: the kernel left unbiased variances there.
            rebias = None if given.batch is None else _Rebias(given.batch / count, [var for _, var in pairs])
            with _hooked(replica.norms, rebias):
                yield given
        elif given == "source" or self.statistics == "source":
            for norm, (mean, var) in zip(replica.norms, replica.source_buffers, strict=True):
                norm.training, norm.running_mean, norm.running_var = False, mean, var
            yield None
        elif self.statistics == "batch" and not keep:
            self._bind(replica, [(None, None)] * len(replica.norms), training=True)
            yield None
        elif self.statistics == "batch":
            # In training mode with momentum 1 the kernel writes the statistics it uses into the running buffers, at
            # no cost. The buffers are scratch; the user's are not bound.
            scratch = self._scratch()
            if self._how.compile:
                # A compiled layer may not write into memory that it shares with others, nor a later forward into what
                # the graph of an earlier one keeps. A product copies all of them in one kernel.
                apart = torch._foreach_mul([part for pair in self._pairs(scratch) for part in pair], 1.0)
                self._bind(replica, list(zip(apart[::2], apart[1::2], strict=True)), training=True)
                yield Statistics(scratch, batch=count)
                torch.cat(apart, out=scratch)
            else:
                self._use(replica, scratch, training=True)
                yield Statistics(scratch, batch=count)
        elif self.statistics == "renorm":
            # Layers that a forward leaves out keep what they had.
            moments = self._source_or_zero() if running is None else running.clone()
            self._use(replica, self._scratch() if running is None else running, training=running is None)
            with _hooked(replica.norms, _Renorm(running is not None, self._pairs(moments))):
                yield Statistics(moments if running is None else running, moments=moments)
        else:
            if self.statistics == "ema":
                assert running is not None
                before, weight = running, self.ema_weight
            else:
                before, weight = self._source_statistics(), count / (count + self.prior)
            used = before.clone()
            pairs = self._pairs(used)
            self._bind(replica, pairs, training=False)
            with _hooked(replica.norms, _Blend(self._pairs(before), weight, self._moments, pairs)):
                yield Statistics(used, before=before)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of a layer's input."""
        quick = fast.moments(x) if self._how.reorders else None
        return _batch_moments(x) if quick is None else quick

    def commit(self, used: Statistics | None) -> None:
        """Let a moving average follow the statistics of a batch, once."""
        if used is None or used is self._followed:
            return
        self._followed = used
        before = self.running
        if used.moments is not None:
            self.running = used.moments if self.running is None else self.running.lerp(used.moments, self.ema_weight)
        elif self.running is not None and used.before is self.running:
            self.running = used.values
        elif self.running is not None and used.before is not None:
            # Another batch was learned since this one's forward: its moments move the average from where it is now.
            moments = used.before + (used.values - used.before) / self.ema_weight
            self.running = torch.lerp(self.running, moments, self.ema_weight)
        if before is not None and self.running is not None:
            # A variance that overflows can still give finite logits, and would stay in the average for ever.
            self.running = torch.where(self.running.isfinite().all(), self.running, before)

    def reset_statistics(self) -> None:
        if self.running is not None:
            self.running = self._source_statistics() if self.statistics == "ema" else None

    def _scratch(self) -> Tensor:
        return torch.zeros(2 * sum(self._channels), dtype=self._norm_dtype, device=self.device)

    def _source_or_zero(self) -> Tensor:
        known = all(buffer is not None for pair in self._source_buffers for buffer in pair)
        return self._source_statistics() if known else self._scratch()

    def _pairs(self, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        sizes = [c for channels in self._channels for c in (channels, channels)]
        # `.data` gives each view a version counter of its own: a later layer's write must not look to autograd like a
        # change of what an earlier layer saved.
        parts = [part.data for part in torch.split_with_sizes(values, sizes)]
        return list(zip(parts[::2], parts[1::2], strict=True))

    def _use(self, replica: _Replica, values: Tensor, training: bool = False) -> None:
        self._bind(replica, self._pairs(values), training)

    def _bind(self, replica: _Replica, pairs: Sequence[tuple[Tensor | None, ...]], training: bool) -> None:
        for norm, (mean, var) in zip(replica.norms, pairs, strict=True):
            # Past nn.Module's own bookkeeping, which costs as much as a kernel for each of four values a layer.
            norm.__dict__["training"], norm.__dict__["momentum"] = training, 1.0
            norm._buffers["running_mean"], norm._buffers["running_var"] = mean, var

    def _source_statistics(self) -> Tensor:
        buffers = [buffer.detach() for pair in self._source_buffers for buffer in pair if buffer is not None]
        if len(buffers) < 2 * len(self._source_buffers):
            raise errors.BadConfig(
                f"statistics={self.statistics!r} needs the running statistics of the source, and some BatchNorm layers "
                "of this model keep none: use statistics='batch'"
            )
        return torch.cat(buffers)

    # -- giving it away -----------------------------------------------------------------------------------------

    def export(self, version: Version | None = None) -> nn.Module:
        """A plain module of its own with the adapted tensors, for the same inputs as the user's module.

        BatchNorm layers normalise as they do here: with the batch, the source, the moving average (with
        ``"renorm"`` the batch as long as there is none) or the mixture.
        """
        module = _copy_whole(self.model).eval()
        version = self.live if version is None else version
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in version.tensors:
                    parameter.copy_(version.tensors[name])
        norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
        samples = _Samples()
        if self.statistics == "mixed" and norms:
            module.register_forward_pre_hook(samples, with_kwargs=True)
        for index, norm in enumerate(norms):
            if self.statistics == "batch" or (self.statistics == "renorm" and self.running is None):
                norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
            elif self.running is not None:
                mean, var = self._pairs(self.running)[index]
                norm.running_mean, norm.running_var = mean.clone(), var.clone()
            elif self.statistics == "mixed":
                assert norm.running_mean is not None and norm.running_var is not None
                norm.register_forward_pre_hook(_Mixture(norm.running_mean, norm.running_var, self.prior, samples))
        return module

    def __repr__(self) -> str:
        return (
            f"Classifier({type(self.model).__name__}, head={self.head_name!r}, statistics={self.statistics!r}, "
            f"adapted={ {group: len(names) for group, names in self.layout.groups.items()} })"
        )


# -- BatchNorm hooks ------------------------------------------------------------------------------------------------


def _batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over everything but the channels, outside the graph."""
    x = x.detach()
    if x.dtype in (torch.bfloat16, torch.float16):
        if x.is_cuda:
            mean, inverse = torch.batch_norm_stats(x, 0.0)  # float32, without a copy of x in float32
            return mean, inverse.square().reciprocal()
        x = x.float()
    var, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0)
    return mean, var


class _Blend:
    """Normalise by (1 − w)·before + w·batch, layer by layer. Gradients take the statistics as constants."""

    def __init__(
        self,
        before: list[tuple[Tensor, Tensor]],
        weight: float,
        moments: Callable[[Tensor], tuple[Tensor, Tensor]],
        used: list[tuple[Tensor, Tensor]],
    ) -> None:
        self.before = before
        self.weight = weight
        self.moments = moments
        self.used = used

    def __call__(self, index: int, norm: _BatchNorm, x: Tensor) -> None:
        for name, before, own, used in zip(
            ("running_mean", "running_var"), self.before[index], self.moments(x), self.used[index], strict=True
        ):
            # Tensors of their own: a layer that is called again must not write over what its first call saved.
            norm._buffers[name] = blend = torch.lerp(before, own.to(before), self.weight)
            used.copy_(blend)


class _Renorm:
    """Batch renormalisation, layer by layer: x̂ = (x − μ_B)/σ_B·r + d with r = σ_B/σ and d = (μ_B − μ)/σ.

    μ and σ are the running statistics, r and d constants: the value is that of μ and σ, the gradient goes through the
    batch. The layer itself normalises with μ and σ, whatever it does afterwards, so it is given an input of the same
    value whose gradient goes through μ_B and σ_B. The first batch has no running statistics, and nothing to do.
    """

    def __init__(self, running: bool, moments: list[tuple[Tensor, Tensor]]) -> None:
        self.running = running
        self.moments = moments

    def __call__(self, index: int, norm: _BatchNorm, x: Tensor) -> Tensor | None:
        var, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0, keepdim=True)
        self.moments[index][0].copy_(mean.detach().flatten())
        self.moments[index][1].copy_(var.detach().flatten())
        if not self.running:
            return None
        sigma = (var + norm.eps).sqrt()
        return (x - mean) / sigma * sigma.detach() + mean.detach()


class _Rebias:
    """Turn the unbiased variances of a batch into the biased ones that it was normalised with.

    `times` is how many times more samples it had than the inputs at hand: a layer may see more rows than samples.
    """

    def __init__(self, times: float, unbiased: Sequence[Tensor]) -> None:
        self.times = times
        self.unbiased = unbiased

    def __call__(self, index: int, norm: _BatchNorm, x: Tensor) -> None:
        count = self.times * (x.numel() // x.shape[1])
        norm._buffers["running_var"] = self.unbiased[index] * ((count - 1) / count)


class _Samples:
    """Notes how many samples an exported module is called with: a layer inside may see more rows than that."""

    count = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.count = size([*args, *kwargs.values()])


class _Mixture:
    """The same mixture as `_Blend` for an exported module: a hook that can be pickled."""

    def __init__(self, mean: Tensor, var: Tensor, prior: int, samples: _Samples) -> None:
        self.mean, self.var, self.prior, self.samples = mean.clone(), var.clone(), prior, samples

    def __call__(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        mean, var = _batch_moments(args[0])
        weight = self.samples.count / (self.samples.count + self.prior)
        assert isinstance(norm.running_mean, Tensor)
        kind = norm.running_mean  # device and precision are the module's, wherever it was moved
        norm.running_mean = torch.lerp(self.mean.to(kind), mean.to(kind), weight)
        norm.running_var = torch.lerp(self.var.to(kind), var.to(kind), weight)


@contextlib.contextmanager
def _hooked(norms: Sequence[nn.Module], before: Callable[[int, Any, Tensor], Tensor | None] | None) -> Iterator[None]:
    """Run `before(index, layer, input)` before every layer's forward; what it gives, if anything, is the new input."""
    handles = []
    if before is not None:
        for index, norm in enumerate(norms):
            handles.append(norm.register_forward_pre_hook(lambda m, args, i=index: before(i, m, args[0])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# -- the user's module ------------------------------------------------------------------------------------------------


def _copy_structure(model: nn.Module) -> nn.Module:
    """A copy of the module tree that shares every tensor with it.

    Parameters are seen through detached twins, which use the same memory but never collect a gradient.
    """
    found = [tensor for module in model.modules() for tensor in _held(vars(module))]
    shared: dict[int, Any] = {
        id(t): nn.Parameter(t.detach(), requires_grad=False) if isinstance(t, nn.Parameter) else t for t in found
    }
    return _copied(model, shared)


def _copy_whole(model: nn.Module) -> nn.Module:
    """A copy of the module with tensors of its own; those that a forward left in it are cut loose from their graph."""
    found = [tensor for module in model.modules() for tensor in _held(vars(module))]
    return _copied(model, {id(t): t.detach().clone() for t in found if not t.is_leaf})


def _held(value: object) -> Iterator[Tensor]:
    """The tensors that a module keeps in its attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _held(item)


def _copied(model: nn.Module, known: dict[int, Any]) -> nn.Module:
    try:
        return copy.deepcopy(model, known)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError) as error:
        raise errors.BadConfig(
            f"the model cannot be copied: {error}. Keep what cannot be (locks, open files, …) out of the module, or "
            "give it a __deepcopy__"
        ) from error


def _unwrap(model: nn.Module) -> nn.Module:
    if isinstance(model, torch.jit.ScriptModule):
        raise errors.BadConfig("a scripted module cannot be adapted: give the module it was made from")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return _unwrap(model.module)
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise errors.BadConfig("layers of the model have no shape yet: run it once on a batch, then adapt it")
    inner = getattr(model, "_orig_mod", None)
    return _unwrap(inner) if isinstance(inner, nn.Module) else model


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, _BatchNorm | nn.LayerNorm | nn.GroupNorm | _InstanceNorm):
        return True
    # Norm layers of other libraries (RMSNorm and the like) go by their name and a vector of weights.
    if "norm" not in type(module).__name__.lower():
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 1


def _find_head(model: nn.Module) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    declared = getattr(model, "get_classifier", None)
    if callable(declared):
        head = declared()
        if isinstance(head, nn.Linear) and id(head) in names:
            return str(names[id(head)])
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise errors.HeadNotFound(
            "the model has no linear layer, so no head was found. Name the layer that turns features into logits "
            f"with head='…'. Layers: {', '.join(name for name, _ in model.named_modules() if name)}"
        )
    return str(linear[-1])


def _check_head(model: nn.Module, name: str) -> str:
    known = [n for n, _ in model.named_modules() if n]
    if name not in known:
        raise errors.HeadNotFound(str(errors.unknown("layer", name, known)))
    return name


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes()) if values.numel() else 0


def _few(tensor: Tensor) -> Tensor:
    """Some values of a tensor, without reading all of it."""
    tensor = tensor.detach()
    while tensor.dim() > 1:
        tensor = tensor[..., 0]
    return tensor.reshape(-1)[:16].double()


def _outside_inference_mode(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor
