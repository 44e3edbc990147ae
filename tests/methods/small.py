"""On what are the methods tried out? A small BatchNorm net in float64, batches, and the same net in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import wise_atta as wa

CLASSES = 6


class Net(nn.Module):
    """Four convolutions, each with BatchNorm: pictures [n, 3, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nn.functional.silu(norm(conv(x)))
        return self.fc(x.mean(dim=(2, 3)))


def net(sharpness: float = 20.0, seed: int = 0) -> Net:
    """A random net whose predictions differ: its head is centred, and scaled up until many are confident."""
    generator = torch.Generator().manual_seed(seed)
    made = Net().double().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            around = 1.0 if "norms" in name and "weight" in name else 0.0
            parameter.copy_(around + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        made.fc.weight *= sharpness
        made.fc.bias.zero_()
        made.fc.bias -= plain(made)(torch.cat(batches(4, seed=99))).mean(dim=0)
    return made


def batches(count: int, n: int = 24, seed: int = 0) -> list[Tensor]:
    """Random pictures, some of them brighter than others."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.rand(count, n, 3, 8, 8, generator=generator, dtype=torch.float64)
    return list(made * torch.rand(count, n, 3, 1, 1, generator=generator, dtype=torch.float64))


def plain(model: nn.Module) -> nn.Module:
    """A copy of the net that normalises by the batch, for a method written out in plain torch."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    return copied


def norm_parameters(model: nn.Module, layers: int = 4) -> list[nn.Parameter]:
    return [p for norm in list(model.norms)[:layers] for p in norm.parameters()]


def entropy(logits: Tensor) -> Tensor:
    p = logits.softmax(1)
    return -(p * p.log()).sum(1)


def run(adapter: wa.Adapter, stream: Sequence[Tensor]) -> list[Any]:
    """Predict and learn batch after batch: (logits, step) of each."""
    done = []
    for x in stream:
        out = adapter.predict(x)
        done.append((out.logits, adapter.learn(out)))
    return done


def assert_same_values(adapter: wa.Adapter, model: nn.Module) -> None:
    """The adapter's tensors are those of a plain net, and they have moved."""
    parameters = dict(model.named_parameters())
    source = dict(adapter.classifier.model.named_parameters())
    for name, tensor in adapter.classifier.live.tensors.items():
        torch.testing.assert_close(tensor.detach(), parameters[name].detach(), rtol=0, atol=1e-12)
    assert any((tensor != source[name]).any() for name, tensor in adapter.classifier.live.tensors.items())


def assert_goes_on_after_saving(make: Any, stream: Sequence[Tensor]) -> None:
    """Saved half way and loaded into a new adapter, the rest of the stream gives the same bits."""
    whole, first, second = make(), make(), make()
    expected = run(whole, stream)
    half = len(stream) // 2
    run(first, stream[:half])
    second.load_state_dict(first.state_dict())
    for (logits, _), (other, _) in zip(expected[half:], run(second, stream[half:]), strict=True):
        assert torch.equal(logits, other)
    assert torch.equal(whole.classifier.live.flat, second.classifier.live.flat)


def assert_reset_is_a_new_start(adapter: wa.Adapter, stream: Sequence[Tensor]) -> None:
    """After `reset` the same stream gives the same bits as the first time."""
    expected = run(adapter, stream)
    adapter.reset()
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())
    for (logits, _), (other, _) in zip(expected, run(adapter, stream), strict=True):
        assert torch.equal(logits, other)
