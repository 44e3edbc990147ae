"""Do the references do what their descriptions say, and would a wrong constant be noticed?"""

from __future__ import annotations

import inspect
from copy import deepcopy
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from references import bn, cema, cotta, eata, eatta, eta, hiltta, nets, plain, roid, sar, simatta, source, tent, wise

METHODS = [source, bn, tent, eta, eata, sar, cotta, roid, simatta, hiltta, cema, eatta, wise]
ADAPTING = [m for m in METHODS if m not in (source, bn)]
FAR_APART = 1e-7  # a hundred times what an implementation may differ by


def name_of(value: object) -> str:
    return value.__name__.rpartition(".")[2] if isinstance(value, ModuleType) else str(value)


def play(method: ModuleType, kwargs: dict[str, Any]) -> list[plain.Step]:
    return method.run(**{k: deepcopy(v) if isinstance(v, nn.Module) else v for k, v in kwargs.items()})


@cache
def scenarios(method: ModuleType) -> dict[str, dict[str, Any]]:
    return dict(method.scenarios())


@cache
def played(method: ModuleType, name: str) -> list[plain.Step]:
    return play(method, scenarios(method)[name])


def scenario(method: ModuleType, name: str, **changes: Any) -> dict[str, Any]:
    return {**scenarios(method)[name], **changes}


def gap(a: list[plain.Step], b: list[plain.Step]) -> float:
    """The largest difference between any two numbers of the final parameters."""
    return max(float((a[-1].params[k] - b[-1].params[k]).abs().max()) for k in a[-1].params)


def presets(method: ModuleType) -> dict[str | None, Any]:
    return {"paper": wise.run_paper, "authors": wise.run_authors} if method is wise else {None: method.run}


def changed(value: Any, factor: float) -> list[Any]:
    """What becomes of a constant a tenth larger or smaller: one value, or for a tuple one tuple an entry."""
    if isinstance(value, tuple):
        return [(*value[:i], v * factor, *value[i + 1 :]) for i, v in enumerate(value)]
    if isinstance(value, int):
        return [value + max(1, round(0.1 * value)) * (1 if factor > 1 else -1)]
    return [value * factor]


def constants(run: Any) -> dict[str, Any]:
    defaults = {name: p.default for name, p in inspect.signature(run).parameters.items()}
    return {
        name: value
        for name, value in defaults.items()
        if (isinstance(value, int | float) and not isinstance(value, bool)) or name == "candidates"
    }


CASES = [
    (method, preset, constant)
    for method in ADAPTING
    for preset, run in presets(method).items()
    for constant in constants(run)
]


@pytest.mark.parametrize(("method", "preset", "constant"), CASES, ids=name_of)
def test_a_tenth_more_or_less_of_any_constant_shows(method: ModuleType, preset: str | None, constant: str) -> None:
    default = constants(presets(method)[preset])[constant]
    shown_by = method.SHOWN_BY if preset is None else method.SHOWN_BY[preset]
    names = shown_by.get(constant, (preset or next(iter(scenarios(method))),))
    for factor in (0.9, 1.1):
        if factor > 1 and constant in ("beta2", "teacher"):
            continue  # a tenth more is no average any more
        for entry in range(len(default) if isinstance(default, tuple) else 1):
            gaps = []
            for name in names:
                kwargs = scenarios(method)[name]
                value = kwargs.get(constant, default)
                if isinstance(value, tuple) and value[entry] not in [s.losses["rate"] for s in played(method, name)]:
                    continue  # a learning rate that was not kept here moves nothing
                other = play(method, {**kwargs, constant: changed(value, factor)[entry]})
                gaps.append(gap(played(method, name), other))
            assert max(gaps) > FAR_APART, f"no scenario notices {constant} times {factor}"


@pytest.mark.parametrize(("method", "name"), [(m, n) for m in METHODS for n in scenarios(m)], ids=name_of)
def test_a_scenario_is_calm_enough_to_be_compared(method: ModuleType, name: str) -> None:
    """A nudge of 1e-14 in the weights must stay far below 1e-9, or rounding alone would part two right answers."""
    kwargs = scenario(method, name)
    draw = nets.generator("nudge")
    net = deepcopy(kwargs["net"])
    with torch.no_grad():
        for p in net.parameters():
            p *= 1 + 1e-14 * torch.randn(p.shape, generator=draw, dtype=torch.float64)
    steps, others = played(method, name), play(method, {**kwargs, "net": net})
    assert len(steps) == 5
    assert gap(steps, others) < 5e-11
    assert [s.asked for s in steps] == [s.asked for s in others]
    assert all(torch.isfinite(p).all() for s in steps for p in s.params.values())


@pytest.mark.parametrize("method", [tent, eta, eata, sar, cotta, roid, simatta, hiltta, cema, eatta, wise], ids=name_of)
def test_nesterov_shows(method: ModuleType) -> None:
    name, kwargs = next(iter(scenarios(method).items()))
    default = inspect.signature(presets(method).get(None, wise.run_paper)).parameters["nesterov"].default
    assert gap(played(method, name), play(method, {**kwargs, "nesterov": not default})) > FAR_APART


@pytest.mark.parametrize(
    ("preset", "other"),
    [
        *(("paper", f"paper, {x}") for x in ("entropy of all", "head bias", "no head", "norm unsupervised")),
        *(("paper", f"paper, {x}") for x in ("only selected batches", "block", "published tensors")),
        *(("authors", f"authors, {x}") for x in ("entropy of all", "full head", "no head", "norm unsupervised")),
        *(("authors", f"authors, {x}") for x in ("only selected batches", "published tensors", "nothing sure")),
    ],
)
def test_every_option_of_wise_shows(preset: str, other: str) -> None:
    assert gap(played(wise, preset), played(wise, other)) > FAR_APART


def test_the_class_rule_shows() -> None:
    for method, name in ((wise, "paper, class rule"), (wise, "authors, no class rule"), (eatta, "defaults")):
        for rule in (True, False):
            steps = play(method, scenario(method, name, class_rule=rule))
            assert (gap(played(method, name), steps) > FAR_APART) == (rule == ("no class rule" in name))


def test_the_optimizers_are_the_usual_ones() -> None:
    theirs = [nn.Parameter(torch.randn(4, generator=nets.generator(i), dtype=torch.float64)) for i in range(4)]
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    pairs = [
        (plain.Sgd(0.1, 0.9, False), torch.optim.SGD([theirs[0]], 0.1, 0.9)),
        (plain.Sgd(0.1, 0.9, True), torch.optim.SGD([theirs[1]], 0.1, 0.9, nesterov=True)),
        (plain.Adam(0.1, 0.9, 0.999, 1e-8), torch.optim.Adam([theirs[2]], 0.1)),
        (plain.Adam(0.1, 0.8, 0.9, 1e-2), torch.optim.Adam([theirs[3]], 0.1, (0.8, 0.9), 1e-2)),
    ]
    for mine, their, (rule, optimizer) in zip(ours, theirs, pairs, strict=True):
        for _ in range(5):
            their.grad = (their.detach() ** 3).clone()
            rule.step({"p": mine}, {"p": mine.detach() ** 3})
            optimizer.step()
        torch.testing.assert_close(mine, their, rtol=0, atol=1e-14)


def test_source_and_bn_leave_every_weight() -> None:
    for method in (source, bn):
        kwargs = scenario(method, "cnn")
        steps = played(method, "cnn")
        for name, p in kwargs["net"].named_parameters():
            assert torch.equal(steps[-1].params[name], p)
    net, xs = nets.cnn(), nets.batches()
    torch.testing.assert_close(played(source, "cnn")[2].logits, net.eval()(xs[2]), rtol=0, atol=1e-12)
    torch.testing.assert_close(played(bn, "cnn")[2].logits, net.train()(xs[2]), rtol=0, atol=1e-12)


def slope(loss: Any, p: Tensor, index: int, h: float = 1e-5) -> float:
    """Central difference of a loss in one number of a tensor."""
    values = []
    for side in (h, -h):
        with torch.no_grad():
            p[index] += side
            values.append(float(loss()))
            p[index] -= side
    return (values[0] - values[1]) / (2 * h)


def test_tent_goes_down_the_slope_of_mean_entropy() -> None:
    net, x = plain.use_batch_statistics(nets.cnn()), nets.batches()[0]
    moved = tent.run(deepcopy(net), [x], momentum=0.0, lr=1.0)[0].params
    for name in ("bn1.weight", "layer2.bn1.bias", "layer4.bn2.weight"):
        p = net.get_parameter(name)
        for index in range(3):
            down = slope(lambda: torch.stack(plain.entropies(net(x))).mean(), p, index)
            assert moved[name][index] - p[index].detach() == pytest.approx(-down, abs=1e-7)


def test_tent_moves_norm_tensors_only() -> None:
    start, end = nets.vit(), played(tent, "vit")[-1].params
    for name, p in start.named_parameters():
        assert torch.equal(end[name], p) == ("norm" not in name)


def test_eta_without_a_sure_sample_stays_where_it_is() -> None:
    kwargs = scenario(eta, "ten classes", fraction=1e-9)
    steps = play(eta, kwargs)
    assert all(s.losses == {"kept": 0.0} for s in steps)
    assert all(torch.equal(steps[-1].params[name], p) for name, p in kwargs["net"].named_parameters())


def test_eta_weighs_sure_samples_more() -> None:
    logits = torch.tensor([[3.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    h = [float(v) for v in plain.entropies(logits)]
    expected = sum(2.718281828459045 ** (0.7 - v) * v for v in h) / 2
    assert float(eta.weighted_entropy(logits, [0, 1], 0.7)) == pytest.approx(expected, abs=1e-12)


def test_eta_leaves_out_what_looks_like_the_average() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.1, 0.0, 0.0]], dtype=torch.float64)
    assert eta.keep(logits, None, 0.5, 0.3) == [0, 1]
    assert eta.keep(logits, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), 0.5, 0.3) == [1]


def test_eata_without_a_penalty_is_eta_and_with_one_stays_closer() -> None:
    kwargs = scenario(eata, "ten classes")
    free, alike, held = (play(eata, {**kwargs, "penalty": w}) for w in (0.0, 0.0, 20000.0))
    assert gap(free, played(eta, "ten classes")) == 0.0 == gap(free, alike)
    start = kwargs["net"].bn1.weight.detach()
    assert (held[-1].params["bn1.weight"] - start).norm() < (free[-1].params["bn1.weight"] - start).norm()
    assert played(eata, "ten classes")[0].losses["penalty"] == 0.0


def test_sar_restores_the_source_and_leaves_the_last_stage() -> None:
    kwargs = scenario(sar, "restores at 0.2")
    steps = played(sar, "restores at 0.2")
    restored = [s for s in steps if s.losses["restored"]]
    assert 0 < len(restored) < 5
    for name, p in kwargs["net"].named_parameters():
        assert all(torch.equal(s.params[name], p) for s in restored)
    end = played(sar, "vit")[-1].params
    for name, p in nets.vit().named_parameters():
        adapted = "norm" in name and not plain.inside(name, sar.VIT_LAST)
        assert torch.equal(end[name], p) != adapted


def test_sar_without_a_climb_is_filtered_entropy() -> None:
    net, x = nets.cnn(), nets.batches()[0]
    moved = sar.run(deepcopy(net), [x], rho=0.0, frozen=())[0]
    wise_like = wise.run_paper(net, [x], labels=nets.truth(), grants=[0], lambda_ent=1.0, nesterov=False, momentum=0.9)[
        0
    ]
    torch.testing.assert_close(moved.params, wise_like.params, rtol=0, atol=1e-15)


def test_cotta_returns_wholly_at_probability_one_and_scores_the_teacher() -> None:
    kwargs = scenario(cotta, "ten classes, adam", count=2)
    back = play(cotta, {**kwargs, "restore": 1.0})
    for name, p in kwargs["net"].named_parameters():
        assert torch.equal(back[-1].params[name], p)
    still = play(cotta, {**kwargs, "teacher": 1.0, "threshold": 0.0})
    net = plain.use_batch_statistics(deepcopy(kwargs["net"]))
    torch.testing.assert_close(still[-1].logits, net(kwargs["batches"][-1]), rtol=0, atol=1e-12)


def test_cotta_uses_views_on_some_batches_only() -> None:
    for name, threshold in (("defaults", 0.1), ("ten classes, adam", 0.92)):
        unsure = [s.losses["confidence"] < threshold for s in played(cotta, name)]
        assert any(unsure) and not all(unsure)


def test_cotta_against_itself_is_its_entropy() -> None:
    z = torch.randn(5, generator=nets.generator(0), dtype=torch.float64)
    for back in (0.0, 0.5):
        assert float(cotta.disagreement(z, z, back)) == pytest.approx(float(plain.entropy(z)), abs=1e-14)


def test_roid_pulled_wholly_back_stays_at_the_source() -> None:
    kwargs = scenario(roid, "defaults", pull=1.0)
    steps = play(roid, kwargs)
    for name, p in kwargs["net"].named_parameters():
        torch.testing.assert_close(steps[-1].params[name], p.detach(), rtol=0, atol=1e-15)


def test_roid_likelihood_ratio_of_two_equal_classes_is_nothing() -> None:
    assert float(roid.likelihood_ratio(torch.zeros(2, dtype=torch.float64), 0.99, 0.0)) == pytest.approx(0.0, abs=1e-15)
    sharp = torch.tensor([50.0, 0.0], dtype=torch.float64, requires_grad=True)
    roid.likelihood_ratio(sharp, 0.99, 1e-5).backward()
    assert sharp.grad is not None
    assert float(sharp.grad.abs().max()) < 1e-15


def test_simatta_finds_clusters_and_never_asks_for_more_than_granted() -> None:
    spots = torch.tensor([[0.0, 0.0], [5.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    points = [spots[i % 3] + 0.01 * i for i in range(12)]
    _, clusters = simatta.k_means(points, [1.0] * 12, [0, 1, 2])
    assert clusters == [0, 1, 2] * 4
    centres, _ = simatta.k_means([spots[0], spots[1]], [1.0, 3.0], [0])
    torch.testing.assert_close(centres[0], torch.tensor([3.75, 0.0], dtype=torch.float64))
    for name in ("defaults", "small", "budgeted"):
        grants = scenario(simatta, name)["grants"]
        assert all(len(s.asked) <= g for s, g in zip(played(simatta, name), grants, strict=True))


def test_simatta_keeps_to_its_buffer_and_weighs_by_cluster() -> None:
    assert max(s.losses["pseudo"] for s in played(simatta, "small buffer")) == 10
    assert max(s.losses["queried"] for s in played(simatta, "small buffer")) == 10
    assert all(w >= 1 for w in played(simatta, "small")[-1].extra["weights"])


def test_hiltta_without_labels_is_tent_at_the_first_rate() -> None:
    kwargs = scenario(hiltta, "defaults", grants=[0] * 5)
    assert gap(play(hiltta, kwargs), play(tent, scenario(tent, "defaults", lr=5e-5))) == 0.0


def test_hiltta_keeps_every_candidate_somewhere() -> None:
    kept = {s.losses["rate"] for n in ("sharp", "sharper") for s in played(hiltta, n)}
    assert kept == set(hiltta.CANDIDATES)


def test_hiltta_asks_for_far_and_unsure_samples() -> None:
    features = torch.tensor([[9.0, 0.0], [4.0, 0.0], [0.0, 3.0], [3.9, 0.0]], dtype=torch.float64)
    logits = torch.tensor([[99.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert hiltta.k_margin(features, logits, 2) == [1, 2]
    assert sorted(hiltta.k_margin(features, logits, 9)) == [0, 1, 2, 3]


def test_cema_renormalises_by_slow_statistics() -> None:
    layer = nn.BatchNorm2d(3).double()
    slow = cema.Renorm(layer, 0.1)
    slow.moving = True
    x, y = (torch.randn(4, 3, 2, 2, generator=nets.generator(i), dtype=torch.float64) + i for i in (1, 2))
    torch.testing.assert_close(slow(x), layer(x))
    mean = x.mean(dim=(0, 2, 3))
    std = (x.var(dim=(0, 2, 3), unbiased=False) + layer.eps).sqrt()
    torch.testing.assert_close(slow(y), (y - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1))
    torch.testing.assert_close(slow.mean, 0.9 * mean + 0.1 * y.mean(dim=(0, 2, 3)))


def test_cema_queues_replays_and_learns_from_memory() -> None:
    for name, queue in (("small", 4), ("default sizes", 32)):
        steps = played(cema, name)
        sent = sum(s.losses["sent"] for s in steps)
        rounds = sum(s.losses["rounds"] for s in steps)
        assert 0 <= sent - queue * rounds < queue
        assert steps[3].losses["sent"] == 0 and "student" in steps[3].losses
        assert "teacher" not in steps[3].losses
    assert max(s.losses["stored"] for s in played(cema, "default sizes")) == 300
    grants = scenario(cema, "small, budgeted")["grants"]
    assert all(len(s.asked) <= g for s, g in zip(played(cema, "small, budgeted"), grants, strict=True))


def test_eatta_weights_make_both_gradients_equally_long() -> None:
    kwargs = scenario(eatta, "defaults")
    step = played(eatta, "defaults")[0]
    net, x = plain.use_batch_statistics(deepcopy(kwargs["net"])), kwargs["batches"][0]
    adapted, logits = plain.norm_tensors(net), net(x)
    hs = plain.entropies(logits)
    sure = [h for i, h in enumerate(hs) if h.item() < 0.4 * torch.tensor(10.0).log() and i not in step.asked]
    g1 = plain.length(plain.gradients(plain.mean(sure), adapted, keep_graph=True))
    g2 = plain.length(
        plain.gradients(plain.cross_entropy(logits[step.asked[0]], kwargs["labels"](1, step.asked[0])), adapted)
    )
    assert step.losses["w1"] * g1 == pytest.approx(step.losses["w2"] * g2, rel=1e-6)
    assert all(s.losses["w1"] + s.losses["w2"] == pytest.approx(2.0) for s in played(eatta, "defaults"))


def test_eatta_passes_over_the_class_it_just_asked_for() -> None:
    rule = eatta.ClassRule()
    rule.note([0], [0.5], [7])
    assert rule.order([1, 0, 2], [0.4, 0.5, 0.1], [7, 7, 3]) == [2, 1, 0]
    assert rule.order([0, 1], [0.6, 0.1], [7, 3]) == [0, 1]
    rule.note([], [], [])
    assert rule.recent == {7}
    rule.note([0], [0.2], [3])
    assert rule.order([0, 1], [0.4, 0.1], [7, 7]) == [0, 1]


def test_eatta_perturbation_is_zero_without_noise() -> None:
    net, x = plain.use_batch_statistics(nets.cnn()), nets.batches()[0]
    features, logits = plain.look(net, x, "fc")
    still = eatta.sensitivity(features, logits, net.fc, torch.zeros_like(features), 0.01)
    assert max(still) < 1e-15


def test_wise_paper_breaks_the_first_tie_by_chance_and_drifts_later() -> None:
    kwargs = scenario(wise, "paper")
    steps = played(wise, "paper")
    assert steps[0].extra["scores"].max() == 0.0
    assert steps[0].asked == [int(kwargs["ties"](1, 24).argmax())]
    assert steps[2].extra["scores"].min() > 0.0
    assert sorted(steps[2].asked) == sorted(steps[2].extra["scores"].topk(2).indices.tolist())


def test_wise_paper_anchor_follows_once_a_batch() -> None:
    kwargs = scenario(wise, "paper")
    steps = played(wise, "paper")
    for name in ("bn1.weight", "fc.weight", "fc.bias"):
        average = kwargs["net"].get_parameter(name).detach()
        for s in steps:
            average = 0.9 * average + 0.1 * s.params[name]
        torch.testing.assert_close(steps[-1].extra[f"anchor.{name}"], average, rtol=0, atol=1e-14)


def test_wise_paper_head_learns_from_features_before_the_norm_step() -> None:
    kwargs = scenario(wise, "paper")
    step = played(wise, "paper")[0]
    net, x = plain.use_batch_statistics(deepcopy(kwargs["net"])), kwargs["batches"][0]
    index = step.asked[0]
    features, logits = plain.look(net, x, "fc")
    error = logits[index].softmax(dim=0).detach()
    error[kwargs["labels"](1, index)] -= 1
    expected = net.fc.weight.detach() - 2.5e-4 * 1.9 * torch.outer(error, features[index].detach())
    torch.testing.assert_close(step.params["fc.weight"], expected, rtol=0, atol=1e-14)


def test_wise_paper_without_a_term_takes_no_step() -> None:
    kwargs = scenario(wise, "paper, nothing sure", grants=[0] * 5)
    steps = play(wise, kwargs)
    assert all(torch.equal(steps[-1].params[name], p) for name, p in kwargs["net"].named_parameters())
    assert all(s.losses == {} for s in steps)


def test_wise_paper_block_takes_the_place_of_the_head() -> None:
    start, end = nets.cnn(), played(wise, "paper, block")[-1].params
    assert torch.equal(end["fc.weight"], start.fc.weight)
    assert not torch.equal(end["layer3.conv1.weight"], start.layer3.conv1.weight)


def test_wise_authors_moves_the_head_bias_but_never_its_weight() -> None:
    start, steps = nets.cnn(), played(wise, "authors")
    assert all(torch.equal(s.params["fc.weight"], start.fc.weight) for s in steps)
    assert not torch.equal(steps[1].params["fc.bias"], steps[0].params["fc.bias"])


def test_wise_authors_takes_a_larger_unlabelled_step_on_a_labelled_batch() -> None:
    """1.7/0.1 times 5e-4/2e-4: 42 and a half times as far, with the labels' own weight at zero."""
    kwargs = scenario(wise, "authors, entropy of all", momentum=0.0, sup_first=0.0, sup_second=0.0)
    kwargs["batches"] = kwargs["batches"][:1]
    without, with_label = (play(wise, {**kwargs, "grants": [g]})[0].params["bn1.weight"] for g in (0, 1))
    start = kwargs["net"].bn1.weight.detach()
    torch.testing.assert_close(with_label - start, 42.5 * (without - start), rtol=1e-9, atol=1e-15)


def test_wise_authors_uses_perturbation_in_four_batches_then_drift() -> None:
    kwargs = scenario(wise, "authors", grants=[1] * 5)
    steps = play(wise, kwargs)
    net = plain.use_batch_statistics(deepcopy(kwargs["net"]))
    plain.assign(dict(net.named_parameters()), steps[2].params)
    anchor = deepcopy(net)
    features, logits = plain.look(net, kwargs["batches"][3], "fc")
    noise = kwargs["noise"](4, features.shape)
    expected = torch.tensor(eatta.sensitivity(features, logits, net.fc, noise, 0.01), dtype=torch.float64)
    torch.testing.assert_close(steps[3].extra["scores"], expected, rtol=0, atol=1e-12)
    plain.assign(dict(net.named_parameters()), steps[3].params)
    for name, value in steps[3].extra.items():
        if name.startswith("anchor."):
            with torch.no_grad():
                anchor.get_parameter(name.removeprefix("anchor.")).copy_(value)
    x = kwargs["batches"][4]
    expected = torch.tensor(wise.drift(net(x), anchor(x)), dtype=torch.float64)
    torch.testing.assert_close(steps[4].extra["scores"], expected, rtol=0, atol=1e-12)
