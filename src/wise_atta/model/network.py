"""Network: the user's module made runnable, for any values of its tensors and any statistics, and what a run gives."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wise_atta import errors
from wise_atta.engine import layers, precision as precisions
from wise_atta.engine.layers import First
from wise_atta.engine.precision import Precision, RunOptions
from wise_atta.model import checks
from wise_atta.model.layout import Spec, Version, select
from wise_atta.model.replica import Replica, Replicas
from wise_atta.model.statistics import BatchNorms, Mode, Statistics
from wise_atta.stream import Inputs, leaves, size, tree_map


@dataclass(eq=False)
class Forward:
    """What one pass over a batch gave, with its graph if there is one.

    `scored` is the prediction that counts where a method's is not the logits, once it was computed. `notes` are the
    engine's own. `first` is what the first layer gave, for another forward of the same inputs.
    """

    inputs: Inputs
    logits: Tensor
    features: Tensor
    version: Version
    statistics: Statistics | None = None
    scored: Tensor | None = None
    notes: Any = None
    first: First | None = None


@dataclass(eq=False)
class Pass:
    """What the network itself gave: of a forward that is recorded, the memory that each replay fills."""

    logits: Tensor
    features: Tensor
    statistics: Statistics | None
    first: First | None


@dataclass
class Work:
    """How often the network was run: forwards of all kinds, those of them with a graph, backwards."""

    forwards: int = 0
    gradient_forwards: int = 0
    backwards: int = 0

    def __sub__(self, other: Work) -> Work:
        graphs = self.gradient_forwards - other.gradient_forwards
        return Work(self.forwards - other.forwards, graphs, self.backwards - other.backwards)


class Pixels:
    """(x − mean)/std of pictures in [0, 1], one number a channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], options: RunOptions) -> None:
        if len(mean) != len(std) or min(std, default=0) <= 0:
            raise errors.BadConfig(f"mean and std need one number a channel, std above 0, not {mean} and {std}")
        # On the device once: a copy from the host would make every forward wait for it.
        self._mean, self._std = (torch.tensor(values).to(options.device, options.dtype) for values in (mean, std))

    def __call__(self, inputs: Inputs) -> Tensor:
        if not isinstance(inputs, Tensor):
            raise errors.BadConfig("mean and std apply to a single tensor of pictures, not to a tree of tensors")
        if not inputs.is_floating_point():
            raise errors.BadInput(f"mean and std apply to numbers in [0, 1], not to {inputs.dtype}: convert the inputs")
        channels = inputs.shape[1] if inputs.dim() > 1 else 0
        if len(self._mean) not in (1, channels):
            raise errors.BadInput(f"mean and std have {len(self._mean)} channels, the inputs {channels}")
        shape = (1, -1, *[1] * (inputs.dim() - 2))
        return (inputs - self._mean.to(inputs).view(shape)) / self._std.to(inputs).view(shape)


class Network:
    """Any `nn.Module` seen as features and a head, and run as replicas that share every frozen tensor with it.

    It knows no particular values of the tensors that adapt: several `Weights` may use one network, each for tensors of
    its own choice.

    Parameters
    ----------
    model
        A classifier: inputs → logits [n, C], or an object with `.logits`. It is never changed and never run.
    head
        The name of the layer that turns features [n, d] into logits. Found if not given: the last linear layer.
    classes
        Indices of the classes that can occur. Logits and labels are then over these, in this order.
    mean, std
        Normalisation of pictures in [0, 1], one number a channel, applied before the model.
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

    Attributes
    ----------
    work
        How often it was run, for all weights.
    norms
        The module's BatchNorm layers.
    seen
        How the model is seen, so that another can be seen in the same way.
    products
        Gives a context in which products of float32 have the precision that was asked for.
    head_checked
        Whether a forward has shown that the head gives the logits.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module,
        *,
        head: str | None = None,
        classes: Sequence[int] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        precision: Precision | None = None,
        channels_last: bool = False,
        compile: bool = False,
        graphs: bool = False,
        checkpointing: bool | Sequence[str] = False,
    ) -> None:
        if (mean is None) != (std is None):
            raise errors.BadConfig("give both mean and std, or neither")
        self.classes = self._columns = checks.check_classes(classes)
        self.model = checks.check_module(model)
        self.head_name = checks.check_head(self.model, head)
        first = next(self.model.parameters())
        blocks = layers.check_blocks(self.model, checkpointing)
        self.options = RunOptions(first.device, first.dtype, precision, channels_last, compile, graphs, blocks)
        checks.check_options(self.options)
        self._pixels = None if mean is None or std is None else Pixels(mean, std, self.options)
        if compile:
            from torch._functorch import config

            # Some rules take two gradients of one forward, so what it saved must outlive the first, as in older torch.
            if hasattr(config, "donated_buffer"):
                config.donated_buffer = False
        self.norms = BatchNorms(self.model, self.options)
        self.seen: dict[str, Any] = {"classes": classes, "mean": mean, "std": std}
        self.seen |= {"precision": precision, "channels_last": channels_last}
        self.products = precisions.products(precision, first.device)
        self._lowered = precisions.lowered(precision, first.device)
        self.work = Work()
        self.head_checked = False
        self._replicas: weakref.WeakValueDictionary[frozenset[str], Replicas] = weakref.WeakValueDictionary()
        # Whether the network writes to its inputs; None before its first forward.
        self._spoils: bool | None = None

    def select(self, spec: Spec) -> tuple[str, ...]:
        """The names of the parameters that a specification means, in the model's order."""
        return select(self.model, self.head_name, spec)

    # -- running it ---------------------------------------------------------------------------------------------

    def replicas(self, adapted: Collection[str]) -> Replicas:
        """The replicas in which these tensors adapt, shared by all who adapt the same."""
        names = frozenset(adapted)
        known = self._replicas.get(names)
        if known is None:
            known = Replicas(lambda: Replica(self.model, self.head_name, names, self.options))
        return self._replicas.setdefault(names, known)

    def run(
        self,
        replicas: Replicas,
        inputs: Inputs,
        tensors: Mapping[str, Tensor],
        mode: Mode,
        running: Tensor | None,
        *,
        count: int | None = None,
        keep: bool = True,
        first: First | None = None,
        keeps: bool = False,
    ) -> Pass:
        """Run it once.

        Parameters
        ----------
        replicas
            Those in which `tensors` adapt.
        inputs, tensors
            A batch, and the values that the adapted tensors take.
        mode, running
            What BatchNorm layers normalise with, and the moving statistics, if there are any.
        count
            How many samples the batch has, where `inputs` are a share of it.
        keep
            Whether the batch's own statistics will be wanted.
        first, keeps
            What the first layer gives for these inputs, where that is known, and whether to find out.
        """
        with contextlib.ExitStack() as stack:
            replica = stack.enter_context(replicas.take(tensors))
            used = None
            if replica.norms.layers:
                count = size(inputs) if count is None else count
                used = stack.enter_context(mode.set_up(replica.norms, count, running, keep))
            lease = None
            if self.options.blocks and torch.is_grad_enabled():
                # The backward runs blocks of this replica again: until then it must stay as it is.
                lease = layers.Lease(stack.pop_all().close)
                replica.lease = weakref.ref(lease)
            with replica.first.known(first, keeps) as kept:
                output = (self._call if self._spoils is False else self._call_with_care)(replica, inputs)
            features = replica.features
            replica.features = replica.lease = None
            if not self.head_checked:
                checks.check_classes_of(output, self.classes)
                with torch.no_grad():
                    again = None if features is None else replica.head(features)
                self.head_checked = checks.check_head_of(self.model, self.head_name, output, again)
        assert features is not None
        return Pass(self.subset(output), features, used, kept[0] if kept else None)

    def _call_with_care(self, replica: Replica, inputs: Inputs) -> Tensor:
        """The output of a network that may write to its inputs: these are the user's, and other forwards take them."""
        if self._spoils:
            return self._call(replica, tree_map(torch.clone, inputs))
        before = [(leaf, leaf.clone(), leaf._version) for leaf in leaves(inputs)]
        output = self._call(replica, inputs)
        self._spoils = any(leaf._version != version for leaf, _, version in before)
        if not self._spoils:
            return output
        with torch.no_grad():
            for leaf, values, _ in before:
                # What `expand` shows many times is there once, and torch writes to it once.
                once = tuple(slice(1) if stride == 0 else slice(None) for stride in leaf.stride())
                leaf[once].copy_(values[once])
        return self._call_with_care(replica, inputs)

    def _call(self, replica: Replica, inputs: Inputs) -> Tensor:
        if self._pixels is not None:
            inputs = self._pixels(inputs)
        if self.options.precision == "bf16":
            inputs = tree_map(lambda leaf: leaf.bfloat16() if leaf.is_floating_point() else leaf, inputs)
        if self.options.channels_last:
            inputs = tree_map(precisions.channels_last, inputs)
        for attributes in replica.in_place:
            attributes["inplace"] = not torch.is_grad_enabled()
        try:
            with self._lowered():
                if isinstance(inputs, Tensor):
                    replica.first.inputs = inputs, inputs._version
                    output = replica.run(inputs)
                else:
                    output = replica.run(**inputs) if isinstance(inputs, Mapping) else replica.run(*inputs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{list(leaf.shape)} {leaf.dtype}" for leaf in leaves(inputs))
            raise errors.BadInput(f"the model could not be run on inputs of {shapes}: {error}") from error
        output = getattr(output, "logits", output)
        if isinstance(output, Tensor) and output.dim() == 2:
            return output
        raise checks.no_logits(output, inputs)

    def subset(self, output: Tensor) -> Tensor:
        """The columns of the classes that can occur."""
        columns = self._columns
        if columns is None:
            return output
        if columns.device != output.device:
            columns = self._columns = columns.to(output.device)
        return output[:, columns]
