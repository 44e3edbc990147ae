"""On a CPU: are batch statistics the right ones however they are summed, and does a process keep what it frees?"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from needs import missing
from torch import Tensor, nn

from wise_atta import adapt
from wise_atta.engine import memory, moments


def pictures(*shape: int, shift: float = 0.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) + shift


@pytest.mark.parametrize("shape", [(8, 5, 12, 12), (3, 4, 50), (2, 3, 4, 5, 6), (64, 7, 1, 1)])
@pytest.mark.parametrize("shift", [0.0, 1.0, 30.0, -3000.0])
def test_moments_are_right_however_far_the_mean_is_from_zero(shape: tuple[int, ...], shift: float) -> None:
    x = pictures(*shape, shift=shift)
    own = moments.moments(x)
    assert own is not None
    dims = [0, *range(2, x.dim())]
    var, mean = torch.var_mean(x.double(), dims, correction=0)
    torch.testing.assert_close(own[0].double(), mean, rtol=2e-7, atol=2e-7)
    torch.testing.assert_close(own[1].double(), var, rtol=2e-6, atol=0)


def test_a_channel_that_never_changes_has_no_variance() -> None:
    x = pictures(4, 3, 6, 6)
    x[:, 1] = 0.1
    own = moments.moments(x)
    assert own is not None and own[1][1].item() < 1e-12
    assert own[1].min().item() >= 0


@pytest.mark.parametrize(
    "x",
    [
        pictures(4, 3, 6, 6).contiguous(memory_format=torch.channels_last),
        pictures(4, 3, 6, 6).double(),
        pictures(4, 3, 6, 6).bfloat16(),
        pictures(4, 3),
        pictures(0, 3, 6, 6),
    ],
)
def test_what_torch_sums_well_itself_is_left_to_it(x: Tensor) -> None:
    assert moments.moments(x) is None


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [1.0, 0.1])
def test_a_quickened_layer_is_the_layer(affine: bool, momentum: float) -> None:
    plain = nn.BatchNorm2d(5, affine=affine, momentum=momentum)
    if affine:
        nn.init.normal_(plain.weight, generator=torch.Generator().manual_seed(4))
    quick = copy.deepcopy(plain)
    moments.quicken(quick)
    results = []
    for norm in (plain, quick):
        x = pictures(8, 5, 12, 12, shift=0.5).requires_grad_(True)
        out = norm(x)
        wanted = [x, *norm.parameters()]
        slope = pictures(8, 5, 12, 12)
        results.append([out, *torch.autograd.grad(out, wanted, slope), norm.running_mean, norm.running_var])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    plain.eval()
    quick.eval()
    assert torch.equal(
        quick(x), nn.functional.batch_norm(x, quick.running_mean, quick.running_var, *quick.parameters())
    )


class NormThenClip(nn.BatchNorm2d):
    """A layer of which the norm is but a part."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(0, 6)


@pytest.mark.parametrize("statistics", ["batch", "ema", "mixed"])
def test_a_net_of_such_layers_agrees_with_the_plain_way(statistics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), NormThenClip(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    used: list[int] = []
    whole: Callable[[Tensor], tuple[Tensor, Tensor] | None] = moments.moments

    def counted(x: Tensor) -> tuple[Tensor, Tensor] | None:
        used.append(1)
        return whole(x)

    monkeypatch.setattr(moments, "moments", counted)
    logits = {}
    for name, options in {"plain": {}, "quick": {"precision": "fp32"}}.items():
        used.clear()
        adapter = adapt(net, "tent", lr=0.01, statistics=statistics, **options)
        for _ in range(5):
            logits[name] = adapter.step(pictures(8, 3, 10, 10)).logits
        assert len(used) == (5 if name == "quick" else 0)
    torch.testing.assert_close(logits["quick"], logits["plain"], rtol=1e-5, atol=1e-5)


# -- memory ------------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, resource, threading, torch, wise_atta as wa
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)
)
batches = [torch.rand(32, 3, 64, 64) for _ in range(4)]

def logits():
    adapter = wa.adapt(net, "wise", ratio=0.5, lr=0.01)
    results = []
    for x in batches:
        out = adapter.predict(x)
        adapter.learn(out, {query.id: 0 for query in out.queries})
        results += out.logits.flatten().tolist()
    return results

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.empty(10 * 2**20).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def in_a_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(faults()))
    thread.start()
    thread.join()
    return results[0]

seen = {"fresh": faults(), "logits before": logits(), "could": [wa.keep_memory(), wa.keep_memory()]}
# Small things settle in what was freed, so the heap grows a few times more before all fits.
for _ in range(4):
    faults(), in_a_thread()
print(json.dumps(seen | {"kept": faults(), "kept in a thread": in_a_thread(), "logits after": logits()}))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What a process saw that kept its memory from some moment on."""
    if memory._glibc() is None:
        if sys.platform == "linux":
            missing("this system's C library is not glibc")
        pytest.skip("only Linux has glibc")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def test_a_process_that_keeps_memory_does_not_ask_for_it_again(seen: dict[str, Any]) -> None:
    assert seen["could"] == [True, True]
    # 20 tensors of 40 MiB, each of them fresh: 10,240 pages a tensor, fewer where pages are larger.
    assert seen["fresh"] > 20 and seen["kept"] < seen["fresh"] / 4


def test_neither_do_threads_that_are_started_later(seen: dict[str, Any]) -> None:
    assert seen["kept in a thread"] < seen["fresh"] / 4


def test_keeping_memory_changes_no_bit(seen: dict[str, Any]) -> None:
    assert seen["logits after"] == seen["logits before"]
    assert len(set(seen["logits before"])) > 100


def test_where_there_is_no_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(memory.os, "confstr", unknown, raising=False)
    assert memory.keep_memory() is False
    memory.release_memory()
    monkeypatch.delattr(memory.os, "confstr")
    assert memory.keep_memory() is False
