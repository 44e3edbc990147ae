"""How is any network seen as features and a head, with few tensors that adapt and all others shared?

A `Classifier` never runs the user's module. It runs *replicas*: structural copies of the module tree that share every
frozen tensor with it. Before a forward a replica is bound to one `Version` of the adapted tensors, so the live model,
the anchor and the source are the same replica bound to three versions. A new version is published by one reference
swap, and a replica is used by one thread at a time: a forward sees one version, in any thread.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointError

from wise_atta import errors
from wise_atta.engine import host, moments, recomputing
from wise_atta.engine import precision as precisions
from wise_atta.engine.first_layer import First
from wise_atta.engine.graphs import Graphs
from wise_atta.engine.precision import Precision
from wise_atta.model.copies import (
    check_head,
    checksum,
    copy_whole,
    find_head,
    is_norm,
    outside_inference_mode,
    some_values,
    unwrap,
)
from wise_atta.model.forward import Forward, Pass, Work
from wise_atta.model.layout import Gradients, Layout, Spec, Version
from wise_atta.model.replica import Replica, RunOptions
from wise_atta.model.statistics import (
    Blend,
    Mixture,
    Rebias,
    Renorm,
    Samples,
    Statistics,
    StatisticsMode,
    batch_moments,
    hooked,
)
from wise_atta.stream import Inputs, leaves, size, tree_map


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
        self.model = unwrap(model)
        self.statistics: StatisticsMode = statistics
        self.prior = prior
        self.ema_weight = ema_weight
        self.head_name = find_head(self.model) if head is None else check_head(self.model, head)
        self.classes = None if classes is None else torch.as_tensor(list(classes), dtype=torch.long)
        self._normal = None if mean is None or std is None else (torch.tensor(mean), torch.tensor(std))
        self._ready: tuple[Tensor, Tensor] | None = None
        self._columns: Tensor | None = None
        groups = adapt if isinstance(adapt, Mapping) else {"adapted": adapt}
        self.layout = self._lay_out(groups)
        self._parameters = dict(self.model.named_parameters())
        reference = next(iter(self._parameters.values()))
        self.device, self.dtype = reference.device, reference.dtype
        blocks = recomputing.check_blocks(self.model, checkpointing)
        self.has_batch_norm = any(isinstance(m, _BatchNorm) for m in self.model.modules())
        self._check_how(precision, compile, graphs, bool(blocks))
        self._how = RunOptions(self.device, precision, channels_last, compile, blocks)
        self._free: list[Replica] = [self._new_replica()]
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
                if is_norm(module)
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
        few = [some_values(tensor) for tensor in (*self.model.parameters(), *self.model.buffers()) if tensor.numel()]
        return {
            "groups": {group: list(names) for group, names in self.layout.groups.items()},
            "shapes": {name: list(shape) for name, shape in self.layout.shapes.items()},
            "dtype": str(values.dtype),
            "classes": None if self.classes is None else self.classes.tolist(),
            "source": checksum(values),
            "network": checksum(torch.cat(few).cpu()) if few else 0,
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
            inputs = tree_map(outside_inference_mode, inputs)
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
        first: First | None = None,
    ) -> Pass:
        with contextlib.ExitStack() as stack:
            replica = stack.enter_context(self._replica())
            replica.bind(tensors)
            used = stack.enter_context(self._normalising(replica, statistics, size(inputs), running, keep))
            lease = None
            if self._how.blocks and torch.is_grad_enabled():
                # The backward runs blocks of this replica again: until then it must stay as it is.
                lease = recomputing.Lease(stack.pop_all().close)
                replica.lease = weakref.ref(lease)
            with replica.first.known(first, keeps=self.repeats):
                output = self._call(replica, inputs)
                first = replica.first.output
            features = replica.features
            replica.features = replica.lease = None
            if not self._head_checked:
                self._check_output(replica, features, output)
        assert features is not None
        return Pass(self._subset(output), features, used, first)

    def _record(self, inputs: Inputs, tensors: dict[str, Tensor], running: Tensor | None, first: First | None) -> Pass:
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
        return precisions.products(self._how.precision, self.device)

    def head(self, features: Tensor, version: Version | None = None) -> Tensor:
        """Logits from features, with the head of a version (the live one if not given)."""
        with torch.inference_mode(False), self._products(), self._replica() as replica:
            replica.bind((self.live if version is None else version).tensors)
            features = outside_inference_mode(features)
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

    def send(self, numbers: Tensor) -> Callable[[], list[float]]:
        """Set a few numbers of a batch on their way to the host: the first tells whether all of it is finite.

        What is given waits for them.
        """
        (places,), wait = host.send([numbers])

        def arrived() -> list[float]:
            wait()
            values: list[float] = places.tolist()
            return values

        return arrived

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

    def _call(self, replica: Replica, inputs: Inputs) -> Tensor:
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

    def _output(self, replica: Replica, inputs: Inputs) -> Tensor:
        inputs = self._normalise(inputs)
        if self._how.precision == "bf16":
            inputs = tree_map(lambda leaf: leaf.bfloat16() if leaf.is_floating_point() else leaf, inputs)
        if self._how.channels_last:
            inputs = tree_map(precisions.channels_last, inputs)
        replica.in_place.set(torch.is_grad_enabled())
        try:
            with precisions.lowered(self._how.precision, self.device):
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

    def _check_output(self, replica: Replica, features: Tensor | None, output: Tensor) -> None:
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

    def _new_replica(self) -> Replica:
        return Replica(self.model, self.head_name, list(self.layout.shapes), self._how)

    @contextlib.contextmanager
    def _replica(self) -> Iterator[Replica]:
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
        replica: Replica,
        given: Statistics | Literal["source"] | None,
        count: int,
        running: Tensor | None,
        keep: bool = True,
    ) -> Iterator[Statistics | None]:
        """Set up every BatchNorm layer of a replica; gives the statistics that the forward fills in or uses."""
        if not replica.norms:
            yield None
        elif isinstance(given, Statistics):
            pairs = self._pairs(outside_inference_mode(given.values))
            self._bind(replica, pairs, training=False)
            # Late samples are normalised as in the batch that asked: the kernel left unbiased variances there.
            rebias = None if given.batch is None else Rebias(given.batch / count, [var for _, var in pairs])
            with hooked(replica.norms, rebias):
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
            with hooked(replica.norms, Renorm(running is not None, self._pairs(moments))):
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
            with hooked(replica.norms, Blend(self._pairs(before), weight, self._moments, pairs)):
                yield Statistics(used, before=before)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of a layer's input."""
        quick = moments.moments(x) if self._how.reorders else None
        return batch_moments(x) if quick is None else quick

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

    def _use(self, replica: Replica, values: Tensor, training: bool = False) -> None:
        self._bind(replica, self._pairs(values), training)

    def _bind(self, replica: Replica, pairs: Sequence[tuple[Tensor | None, ...]], training: bool) -> None:
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
        module = copy_whole(self.model).eval()
        version = self.live if version is None else version
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in version.tensors:
                    parameter.copy_(version.tensors[name])
        norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
        samples = Samples()
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
                norm.register_forward_pre_hook(Mixture(norm.running_mean, norm.running_var, self.prior, samples))
        return module

    def __repr__(self) -> str:
        return (
            f"Classifier({type(self.model).__name__}, head={self.head_name!r}, statistics={self.statistics!r}, "
            f"adapted={ {group: len(names) for group, names in self.layout.groups.items()} })"
        )
