"""Does the loop stay on the device that the model is on?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core import nets
from core.checks import look, same, saved

from wise_atta import Adapter, adapt, errors, who

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]
DEVICE = torch.device("cuda", 0)


def moved(inputs: Any, device: torch.device = DEVICE) -> Any:
    if isinstance(inputs, dict):
        return {name: tensor.to(device) for name, tensor in inputs.items()}
    return inputs.to(device)


def wise(kind: str = "batch-norm", device: torch.device = DEVICE, **options: Any) -> Adapter:
    annotator = who.Delayed(who.Oracle(nets.truth), who.Between(0, 3))
    chosen = {"ratio": 0.7, "policy": "uniform", "entropy": "all", "lr": 0.05, "annotator": annotator}
    return adapt(nets.make(kind).to(device), "wise", **({"statistics": "batch"} | chosen | options))


def run(adapter: Adapter, numbers: range, kind: str = "batch-norm") -> list[torch.Tensor]:
    device = adapter.classifier.device
    return [adapter.step(moved(nets.batch(kind, number), device)).logits for number in numbers]


@pytest.mark.parametrize("statistics", ["batch", "source", "mixed", "ema"])
@pytest.mark.parametrize("kind", list(nets.KINDS))
def test_a_run_on_the_device_agrees_with_one_on_the_cpu(kind: str, statistics: Any) -> None:
    on_device = wise(kind, statistics=statistics)
    before = look(on_device.classifier.model)
    theirs = run(wise(kind, torch.device("cpu"), statistics=statistics), range(1, 9), kind)
    for own, expected in zip(run(on_device, range(1, 9), kind), theirs, strict=True):
        assert own.device == DEVICE
        torch.testing.assert_close(own.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert on_device.counts.learned > 2 and on_device.classifier.live.flat.device == DEVICE
    assert same(look(on_device.classifier.model), before)


def test_questions_and_states_on_the_cpu_resume_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise cuDNN's gradients of float64 convolutions differ in their last bits from one call to the next.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    adapter, resumed = wise(statistics="ema"), wise(statistics="ema")
    run(adapter, range(1, 6))
    assert adapter.open and all(tensor.device.type == "cpu" for tensor in tensors(adapter.state_dict()))
    resumed.load_state_dict(saved(adapter.state_dict()))
    assert same(run(adapter, range(6, 11)), run(resumed, range(6, 11)))


def tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor of a state."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else []
    return [tensor for item in items for tensor in tensors(item)]


def test_inputs_on_the_cpu_are_refused() -> None:
    adapter = wise()
    with pytest.raises(errors.BadInput, match="inputs are on cpu, the model is on cuda:0"):
        adapter.predict(nets.batch())
