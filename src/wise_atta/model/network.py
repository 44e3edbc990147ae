"""Network: the user's module made runnable, for any values of its tensors and any statistics."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from wise_atta import errors
from wise_atta.engine import precision as precisions, recomputing
from wise_atta.engine.first_layer import First
from wise_atta.engine.precision import Precision
from wise_atta.model import checks
from wise_atta.model.batch_norms import BatchNorms
from wise_atta.model.forward import Pass, Work
from wise_atta.model.pixels import Pixels
from wise_atta.model.replica import Replica, Replicas
from wise_atta.model.run_options import RunOptions
from wise_atta.model.selection import Spec, select
from wise_atta.model.statistics import Statistics
from wise_atta.stream import Inputs, leaves, tree_map

SetUp = Callable[[BatchNorms], contextlib.AbstractContextManager[Statistics | None]]


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
        self.pixels = Pixels(mean, std)
        self.classes = checks.check_classes(classes)
        self.model = checks.check_module(model)
        self.head_name = checks.check_head(self.model, head)
        first = next(self.model.parameters())
        blocks = recomputing.check_blocks(self.model, checkpointing)
        self.options = RunOptions(first.device, first.dtype, precision, channels_last, compile, graphs, blocks)
        checks.check_options(self.options)
        if compile:
            from torch._functorch import config

            # Some rules take two gradients of one forward, so what it saved must outlive the first, as in older torch.
            if hasattr(config, "donated_buffer"):
                config.donated_buffer = False
        self.norms = BatchNorms(self.model, self.options)
        self.work = Work()
        self.head_checked = False
        self._replicas: weakref.WeakValueDictionary[frozenset[str], Replicas] = weakref.WeakValueDictionary()
        self._columns: Tensor | None = None
        # Whether the network writes to its inputs; None before its first forward.
        self._spoils: bool | None = None

    def select(self, spec: Spec) -> tuple[str, ...]:
        """The names of the parameters that a specification means, in the model's order."""
        return select(self.model, self.head_name, spec)

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
        outputs = getattr(self.model.get_submodule(self.head_name), "out_features", None)
        return outputs if isinstance(outputs, int) else None

    @property
    def quick(self) -> bool:
        """Whether it was asked to be fast, so that sums may be taken in another order than usual."""
        return self.options.quick or self.options.graphs

    def like(self, model: nn.Module) -> Network:
        """Another model, seen as this one is: the same normalisation of inputs, the same subset of classes."""
        return Network(
            model,
            classes=None if self.classes is None else self.classes.tolist(),
            mean=self.pixels.mean,
            std=self.pixels.std,
            precision=self.options.precision,
            channels_last=self.options.channels_last,
        )

    # -- running it ---------------------------------------------------------------------------------------------

    def replicas(self, adapted: Collection[str]) -> Replicas:
        """The replicas in which these tensors adapt, shared by all who adapt the same."""
        names = frozenset(adapted)
        known = self._replicas.get(names)
        if known is None:
            known = Replicas(lambda: Replica(self.model, self.head_name, names, self.options))
        return self._replicas.setdefault(names, known)

    def products(self) -> contextlib.AbstractContextManager[None]:
        """Products of float32 in the precision that was asked for."""
        return precisions.products(self.options.precision, self.options.device)

    def run(
        self,
        replicas: Replicas,
        inputs: Inputs,
        tensors: Mapping[str, Tensor],
        set_up: SetUp,
        *,
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
        set_up
            Lets the BatchNorm layers of a replica normalise as they shall, and gives their statistics.
        first, keeps
            What the first layer gives for these inputs, where that is known, and whether to find out.
        """
        with contextlib.ExitStack() as stack:
            replica = stack.enter_context(replicas.take())
            replica.bind(tensors)
            used = stack.enter_context(set_up(replica.norms)) if replica.norms else None
            lease = None
            if self.options.blocks and torch.is_grad_enabled():
                # The backward runs blocks of this replica again: until then it must stay as it is.
                lease = recomputing.Lease(stack.pop_all().close)
                replica.lease = weakref.ref(lease)
            with replica.first.known(first, keeps):
                output = self._call(replica, inputs)
                first = replica.first.output
            features = replica.features
            replica.features = replica.lease = None
            if not self.head_checked:
                self._check(replica, features, output)
        assert features is not None
        return Pass(self._subset(output), features, used, first)

    def head(self, replicas: Replicas, features: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Logits from features."""
        with torch.inference_mode(False), self.products(), replicas.take() as replica:
            replica.bind(tensors)
            features = outside_inference_mode(features)
            if not torch.is_autocast_enabled(features.device.type):
                # Features of a forward under autocast may be used outside of it.
                features = features.to(next(replica.head.parameters(), features).dtype)
            output: Tensor = replica.head(features)
            replica.features = None
        return self._subset(output)

    def _check(self, replica: Replica, features: Tensor | None, output: Tensor) -> None:
        checks.check_classes_of(output, self.classes)
        with torch.no_grad():
            again = None if features is None else replica.head(features)
        self.head_checked = checks.check_head_of(self.model, self.head_name, output, again)

    def _call(self, replica: Replica, inputs: Inputs) -> Tensor:
        """The network's output. Inputs stay as they are: the user's own, and other forwards take them too."""
        if self._spoils:
            return self._output(replica, tree_map(torch.clone, inputs))
        if self._spoils is not None:
            return self._output(replica, inputs)
        before = [(leaf, leaf.clone(), leaf._version) for leaf in leaves(inputs)]
        output = self._output(replica, inputs)
        self._spoils = any(leaf._version != version for leaf, _, version in before)
        if not self._spoils:
            return output
        with torch.no_grad():
            for leaf, values, _ in before:
                # What `expand` shows many times is there once, and torch writes to it once.
                once = tuple(slice(1) if stride == 0 else slice(None) for stride in leaf.stride())
                leaf[once].copy_(values[once])
        return self._call(replica, inputs)

    def _output(self, replica: Replica, inputs: Inputs) -> Tensor:
        inputs = self.pixels(inputs, self.options.device, self.options.dtype)
        if self.options.precision == "bf16":
            inputs = tree_map(lambda leaf: leaf.bfloat16() if leaf.is_floating_point() else leaf, inputs)
        if self.options.channels_last:
            inputs = tree_map(precisions.channels_last, inputs)
        replica.in_place.set(torch.is_grad_enabled())
        try:
            with precisions.lowered(self.options.precision, self.options.device):
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
        return checks.check_logits(output, inputs)

    def _subset(self, output: Tensor) -> Tensor:
        if self.classes is None:
            return output
        if self._columns is None:
            self._columns = self.classes.to(output.device)
        return output[:, self._columns]


def outside_inference_mode(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it that autograd can take."""
    return tensor.clone() if tensor.is_inference() else tensor
