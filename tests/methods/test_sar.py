"""Does sar take sharpness-aware steps, leave the last stage alone, and find the way back from collapse?"""

from __future__ import annotations

import math

import pytest
import timm
import torch
import torchvision
from methods import small
from torch import nn

import wise_atta as wa
from wise_atta.data.nets import ResNet18


def test_steps_are_those_of_plain_autograd() -> None:
    source = small.net()
    adapter = wa.adapt(source, "sar", lr=0.01, rho=0.2, restore_below=0.0)
    model, threshold = small.plain(source), 0.4 * math.log(small.CLASSES)
    parameters = small.norm_parameters(model, layers=3)
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    lost = 0
    for x in small.batches(3):
        h = small.entropy(model(x))
        keep = h < threshold
        gradients = torch.autograd.grad(h[keep].mean(), parameters)
        norm = torch.sqrt(sum((g**2).sum() for g in gradients))
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, g in zip(parameters, gradients, strict=True):
                p += 0.2 * g / norm
        h = small.entropy(model(x))
        both = keep & (h < threshold)
        lost += int(keep.sum() - both.sum())
        optimizer.zero_grad()
        h[both].mean().backward()
        with torch.no_grad():
            for p, b in zip(parameters, before, strict=True):
                p.copy_(b)
        optimizer.step()
    steps = [step for _, step in small.run(adapter, small.batches(3))]
    assert lost > 0, "the second filter must matter here"
    assert all(step.work == wa.model.Work(forwards=2, gradient_forwards=2, backwards=2) for step in steps)
    small.assert_same_values(adapter, model)


def excluded(model: nn.Module) -> set[str]:
    """Names of norm layers that sar leaves alone."""
    adapted = wa.adapt(model, "sar").classifier.layout.shapes
    names = wa.Classifier(model).select("norm")
    return {name.rpartition(".")[0] for name in names if name not in adapted}


@pytest.mark.parametrize("model", [torchvision.models.resnet18(), timm.create_model("resnet18")])
def test_layer4_of_a_resnet_is_left_alone(model: nn.Module) -> None:
    left = excluded(model)
    assert all(name.startswith("layer4.") for name in left) and len(left) == 5


def test_the_last_blocks_and_the_final_norm_of_a_vit_are_left_alone_in_torchvision() -> None:
    model = torchvision.models.VisionTransformer(32, 16, num_layers=12, num_heads=1, hidden_dim=8, mlp_dim=8)
    blocks = {f"encoder.layers.encoder_layer_{i}.ln_{j}" for i in (9, 10, 11) for j in (1, 2)}
    assert excluded(model) == blocks | {"encoder.ln"}


def test_the_last_blocks_and_the_final_norm_of_a_vit_are_left_alone_in_timm() -> None:
    model = timm.create_model("vit_base_patch16_224", embed_dim=8, num_heads=1, img_size=32, num_classes=3)
    assert excluded(model) == {f"blocks.{i}.norm{j}" for i in (9, 10, 11) for j in (1, 2)} | {"norm"}


def test_the_last_stage_of_other_nets_is_the_last_quarter_of_their_norms() -> None:
    assert excluded(small.net()) == {"norms.3"}
    assert {name[:8] for name in excluded(ResNet18(width=8))} == {"blocks.6", "blocks.7"}
    assert excluded(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))) == set()


def test_a_layer_norm_net_gets_the_learning_rate_of_a_vit() -> None:
    vit = torchvision.models.VisionTransformer(32, 16, num_layers=4, num_heads=1, hidden_dim=8, mlp_dim=8)
    both = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for model, options, expected in [
        (vit, {}, 1e-3),
        (both, {}, 2.5e-4),
        (vit, {"preset": "imagenet-c"}, 1e-3),
        (vit, {"lr": 0.1}, 0.1),
        (small.net(), {}, 2.5e-4),
        (small.net(), {"preset": "cifar10-c"}, 1e-3),
    ]:
        assert wa.adapt(model, "sar", **options).update.optimizer.lr == expected


def test_a_collapsed_model_returns_to_the_source_with_its_optimizer() -> None:
    adapter = wa.adapt(small.net(), "sar", lr=0.01, restore_below=0.0)
    small.run(adapter, small.batches(2))
    adapter.update.restore_below = 10.0
    ((_, step),) = small.run(adapter, small.batches(1))
    assert step.losses["restored"] == 1
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())
    assert adapter.state_dict()["update"]["optimizer"]["optimizer"] == {}


def test_the_average_loss_decides_not_the_last_one() -> None:
    adapter = wa.adapt(small.net(), "sar", lr=0.0, restore_below=0.0)
    losses = [step.losses["loss"].item() for _, step in small.run(adapter, small.batches(3))]
    expected = losses[0]
    for loss in losses[1:]:
        expected = 0.9 * expected + 0.1 * loss
    assert adapter.state_dict()["update"]["average"]["value"].item() == pytest.approx(expected, rel=1e-12)


def test_no_reliable_sample_no_step_and_no_second_forward() -> None:
    adapter = wa.adapt(small.net(sharpness=0.01), "sar")
    ((_, step),) = small.run(adapter, small.batches(1))
    assert step.losses == {"skipped": 1}
    assert step.work == wa.model.Work(forwards=1, gradient_forwards=1, backwards=0)
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


def test_no_sample_reliable_after_the_climb_no_step() -> None:
    adapter = wa.adapt(small.net(), "sar", rho=3.0, below=0.05)
    ((_, step),) = small.run(adapter, small.batches(1))
    assert step.losses == {"skipped": 1} and step.work.forwards == 2
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


def test_the_climb_is_not_what_predictions_are_made_with() -> None:
    adapter = wa.adapt(small.net(), "sar", lr=0.0, rho=0.5)
    small.run(adapter, small.batches(2))
    assert torch.equal(adapter.classifier.live.flat, adapter.classifier.source_flat())


def test_a_saved_run_goes_on_to_the_same_bits() -> None:
    small.assert_goes_on_after_saving(lambda: wa.adapt(small.net(), "sar", lr=0.01), small.batches(6))


def test_reset_forgets_the_average_loss() -> None:
    small.assert_reset_is_a_new_start(wa.adapt(small.net(), "sar", lr=0.01), small.batches(3))
