"""Do the references do what their descriptions say, and would a wrong constant be noticed?"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from references import REFERENCES, Step, nets, wise_options
from wise_atta.reference import cema, cotta, eatta, eta, hiltta, roid, sar, simatta, wise
from wise_atta.reference.common import entropy, inside, look, norm_tensors, use_batch_statistics

ADAPTING = [name for name in REFERENCES if name not in ("source", "bn")]
FAR_APART = 1e-7  # a hundred times what an implementation may differ by


def play(method: str, kwargs: dict[str, Any]) -> list[Step]:
    copies = {k: deepcopy(v) if isinstance(v, nn.Module) else v for k, v in kwargs.items()}
    return REFERENCES[method].run(**copies)


@cache
def scenarios(method: str) -> dict[str, dict[str, Any]]:
    return dict(REFERENCES[method].scenarios())


@cache
def played(method: str, name: str) -> list[Step]:
    return play(method, scenarios(method)[name])


def scenario(method: str, name: str, **changes: Any) -> dict[str, Any]:
    return {**scenarios(method)[name], **changes}


def with_batch_statistics(net: nn.Module) -> nn.Module:
    use_batch_statistics(net)
    return net


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def gap(a: list[Step], b: list[Step]) -> float:
    """The largest difference between any two numbers of the final parameters."""
    return max(float((a[-1].params[k] - b[-1].params[k]).abs().max()) for k in a[-1].params)


def presets(method: str) -> tuple[str | None, ...]:
    return ("paper", "authors") if method == "wise" else (None,)


def changed(value: Any, factor: float) -> list[Any]:
    """What becomes of a constant a tenth larger or smaller: one value, or for a tuple one tuple an entry."""
    if isinstance(value, tuple):
        return [(*value[:i], v * factor, *value[i + 1 :]) for i, v in enumerate(value)]
    if isinstance(value, int):
        return [value + max(1, round(0.1 * value)) * (1 if factor > 1 else -1)]
    return [value * factor]


CASES = [
    (method, preset, constant)
    for method in ADAPTING
    for preset in presets(method)
    for constant in REFERENCES[method].constants(preset)
]


@pytest.mark.parametrize(("method", "preset", "constant"), CASES)
def test_a_tenth_more_or_less_of_any_constant_shows(method: str, preset: str | None, constant: str) -> None:
    default = REFERENCES[method].constants(preset)[constant]
    shown_by = REFERENCES[method].SHOWN_BY
    shown_by = shown_by if preset is None else shown_by[preset]
    names = shown_by.get(constant, (preset or next(iter(scenarios(method))),))
    for factor in (0.9, 1.1):
        if factor > 1 and constant in ("beta2", "teacher"):
            continue  # a tenth more is no average any more
        for entry in range(len(default) if isinstance(default, tuple) else 1):
            gaps = []
            for name in names:
                kwargs = scenarios(method)[name]
                value = kwargs.get(constant, default)
                if isinstance(value, tuple) and value[entry] not in [s.seen["rate"] for s in played(method, name)]:
                    continue  # a learning rate that was not kept here moves nothing
                other = play(method, {**kwargs, constant: changed(value, factor)[entry]})
                gaps.append(gap(played(method, name), other))
            assert max(gaps) > FAR_APART, f"no scenario notices {constant} times {factor}"


@pytest.mark.parametrize(("method", "name"), [(m, n) for m in REFERENCES for n in scenarios(m)])
def test_a_scenario_is_calm_enough_to_be_compared(method: str, name: str) -> None:
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


@pytest.mark.parametrize("method", ADAPTING)
def test_nesterov_shows(method: str) -> None:
    kwargs = next(iter(scenarios(method).values()))
    both = (play(method, {**kwargs, "nesterov": value}) for value in (True, False))
    assert gap(*both) > FAR_APART


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
    assert gap(played("wise", preset), played("wise", other)) > FAR_APART


def test_the_class_rule_shows() -> None:
    for name in ("paper, class rule", "authors, no class rule"):
        for rule in (True, False):
            steps = play("wise", scenario("wise", name, class_rule=rule))
            assert (gap(played("wise", name), steps) > FAR_APART) == (rule == ("no class rule" in name))


def test_the_class_rule_of_eatta_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    with_rule = played("eatta", "defaults")
    monkeypatch.setattr(eatta.ClassRule, "pick", lambda rule, ranking, scores, guesses, k: ranking[:k])
    assert gap(with_rule, play("eatta", scenario("eatta", "defaults"))) > FAR_APART


def test_source_and_bn_leave_every_weight() -> None:
    for method in ("source", "bn"):
        kwargs = scenario(method, "cnn")
        steps = played(method, "cnn")
        for name, p in kwargs["net"].named_parameters():
            assert torch.equal(steps[-1].params[name], p)
    net, xs = nets.cnn(), nets.batches()
    torch.testing.assert_close(played("source", "cnn")[2].logits, net.eval()(xs[2]), rtol=0, atol=1e-12)
    torch.testing.assert_close(played("bn", "cnn")[2].logits, net.train()(xs[2]), rtol=0, atol=1e-12)


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
    net, x = with_batch_statistics(nets.cnn()), nets.batches()[0]
    moved = REFERENCES["tent"].run(deepcopy(net), [x], momentum=0.0, nesterov=False, lr=1.0)[0].params
    for name in ("bn1.weight", "layer2.bn1.bias", "layer4.bn2.weight"):
        p = net.get_parameter(name)
        for index in range(3):
            down = slope(lambda: entropy(net(x)).mean(), p, index)
            assert moved[name][index] - p[index].detach() == pytest.approx(-down, abs=1e-7)


def test_tent_moves_norm_tensors_only() -> None:
    start, end = nets.vit(), played("tent", "vit")[-1].params
    for name, p in start.named_parameters():
        assert torch.equal(end[name], p) == ("norm" not in name)


def test_eta_without_a_sure_sample_stays_where_it_is() -> None:
    kwargs = scenario("eta", "ten classes", fraction=1e-9)
    steps = play("eta", kwargs)
    assert not any(s.seen["kept"].any() for s in steps)
    assert all(torch.equal(steps[-1].params[name], p) for name, p in kwargs["net"].named_parameters())


def test_eta_weighs_sure_samples_more() -> None:
    logits = torch.tensor([[3.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    expected = sum(2.718281828459045 ** (0.7 - v) * v for v in entropy(logits).tolist()) / 2
    assert float(eta.weighted_entropy(logits, 0.7)) == pytest.approx(expected, abs=1e-12)


def test_eta_leaves_out_what_looks_like_the_average() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.1, 0.0, 0.0]], dtype=torch.float64)
    assert eta.sure_and_new(logits, None, 0.5, 0.3).tolist() == [True, True, False]
    mean_p = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert eta.sure_and_new(logits, mean_p, 0.5, 0.3).tolist() == [False, True, False]


def test_eata_without_a_penalty_is_eta_and_with_one_stays_closer() -> None:
    kwargs = scenario("eata", "ten classes")
    free, alike, held = (play("eata", {**kwargs, "penalty": w}) for w in (0.0, 0.0, 20000.0))
    assert gap(free, played("eta", "ten classes")) == 0.0 == gap(free, alike)
    start = kwargs["net"].bn1.weight.detach()
    assert (held[-1].params["bn1.weight"] - start).norm() < (free[-1].params["bn1.weight"] - start).norm()
    assert played("eata", "ten classes")[0].seen["away"] == 0.0


def test_sar_restores_the_source_and_leaves_the_last_stage() -> None:
    kwargs = scenario("sar", "restores at 0.2")
    steps = played("sar", "restores at 0.2")
    restored = [s for s in steps if s.seen["s1"].any() and s.seen["m"] is None]
    assert 0 < len(restored) < 5
    for name, p in kwargs["net"].named_parameters():
        assert all(torch.equal(s.params[name], p) for s in restored)
    end = played("sar", "vit")[-1].params
    for name, p in nets.vit().named_parameters():
        adapted = "norm" in name and not inside(name, sar.VIT_LAST)
        assert torch.equal(end[name], p) != adapted


def test_sar_without_a_climb_is_filtered_entropy() -> None:
    net, x = nets.cnn(), nets.batches()[0]
    moved = REFERENCES["sar"].run(deepcopy(net), [x], rho=0.0, frozen=())[0]
    wise_like = REFERENCES["wise"].run(net, [x], labels=nets.truth(), grants=[0], lambda_ent=1.0, nesterov=False)[0]
    torch.testing.assert_close(moved.params, wise_like.params, rtol=0, atol=1e-15)


def test_cotta_returns_wholly_at_probability_one_and_scores_the_teacher() -> None:
    kwargs = scenario("cotta", "ten classes, adam", count=2)
    back = play("cotta", {**kwargs, "restore": 1.0})
    for name, p in kwargs["net"].named_parameters():
        assert torch.equal(back[-1].params[name], p)
    still = play("cotta", {**kwargs, "teacher": 1.0, "threshold": 0.0})
    net = with_batch_statistics(deepcopy(kwargs["net"]))
    torch.testing.assert_close(still[-1].logits, net(kwargs["batches"][-1]), rtol=0, atol=1e-12)


def test_cotta_uses_views_on_some_batches_only() -> None:
    for name, threshold in (("defaults", 0.1), ("ten classes, adam", 0.92)):
        unsure = [s.seen["confidence"] < threshold for s in played("cotta", name)]
        assert any(unsure) and not all(unsure)


def test_cotta_against_itself_is_its_entropy() -> None:
    z = torch.randn(1, 5, generator=nets.generator(0), dtype=torch.float64)
    for back in (0.0, 0.5):
        assert float(cotta.disagreement(z, z, back)) == pytest.approx(float(entropy(z)), abs=1e-14)


def test_roid_pulled_wholly_back_stays_at_the_source() -> None:
    kwargs = scenario("roid", "defaults", pull=1.0)
    steps = play("roid", kwargs)
    for name, p in kwargs["net"].named_parameters():
        torch.testing.assert_close(steps[-1].params[name], p.detach(), rtol=0, atol=1e-15)


def test_roid_likelihood_ratio_of_two_equal_classes_is_nothing() -> None:
    assert float(roid.likelihood_ratio(torch.zeros(1, 2, dtype=torch.float64), 0.99, 0.0)) == pytest.approx(
        0.0, abs=1e-15
    )
    sharp = torch.tensor([[50.0, 0.0]], dtype=torch.float64, requires_grad=True)
    roid.likelihood_ratio(sharp, 0.99, 1e-5).backward()
    assert sharp.grad is not None
    assert float(sharp.grad.abs().max()) < 1e-15


def test_simatta_finds_clusters_and_never_asks_for_more_than_granted() -> None:
    spots = torch.tensor([[0.0, 0.0], [5.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    points = torch.stack([spots[i % 3] + 0.01 * i for i in range(12)])
    _, clusters = simatta.k_means(points, torch.ones(12).double(), points[:3])
    assert clusters.tolist() == [0, 1, 2] * 4
    centres, _ = simatta.k_means(spots[:2], torch.tensor([1.0, 3.0]).double(), spots[:1])
    torch.testing.assert_close(centres[0], torch.tensor([3.75, 0.0], dtype=torch.float64))
    for name in ("defaults", "small", "budgeted"):
        grants = scenario("simatta", name)["grants"]
        assert all(len(s.asked) <= g for s, g in zip(played("simatta", name), grants, strict=True))


def test_simatta_keeps_to_its_buffer_and_weighs_by_cluster() -> None:
    assert max(len(s.seen["pseudo"]) for s in played("simatta", "small buffer")) == 10
    assert max(len(s.seen["queried"]) for s in played("simatta", "small buffer")) == 10
    assert all(a.weight >= 1 for a in played("simatta", "small")[-1].seen["queried"])


def test_hiltta_without_labels_is_tent_at_the_first_rate() -> None:
    kwargs = scenario("hiltta", "defaults", grants=[0] * 5)
    assert gap(play("hiltta", kwargs), play("tent", scenario("tent", "defaults", lr=5e-5))) == 0.0


def test_hiltta_keeps_every_candidate_somewhere() -> None:
    kept = {s.seen["rate"] for n in ("sharp", "sharper") for s in played("hiltta", n)}
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
    torch.testing.assert_close(slow.mean.flatten(), 0.9 * mean + 0.1 * y.mean(dim=(0, 2, 3)))


def test_cema_queues_replays_and_learns_from_memory() -> None:
    for name, queue in (("small", 4), ("default sizes", 32)):
        steps = played("cema", name)
        sent = sum(len(s.asked) for s in steps)
        rounds = sum(s.seen["round_"] for s in steps)
        assert 0 <= sent - queue * rounds < queue
        assert steps[3].asked == []
        assert not same(steps[3].params, steps[2].params)
        assert same(steps[3].extra, steps[2].extra)
    assert max(len(s.seen["stored"]) for s in played("cema", "default sizes")) == 300
    grants = scenario("cema", "small, budgeted")["grants"]
    assert all(len(s.asked) <= g for s, g in zip(played("cema", "small, budgeted"), grants, strict=True))


def test_eatta_weights_make_both_gradients_equally_long() -> None:
    kwargs = scenario("eatta", "defaults")
    step = played("eatta", "defaults")[0]
    net, x = with_batch_statistics(deepcopy(kwargs["net"])), kwargs["batches"][0]
    adapted, logits = norm_tensors(net), net(x)
    sure = entropy(logits) < 0.4 * torch.tensor(10.0).log()
    sure[step.asked] = False
    g1 = eatta.length(entropy(logits)[sure].mean(), adapted)
    label = kwargs["labels"](1, step.asked[0])
    g2 = eatta.length(-logits[step.asked[0]].log_softmax(dim=0)[label], adapted)
    w1, w2 = step.seen["w"]
    assert w1 * g1 == pytest.approx(w2 * g2, rel=1e-6)
    assert all(sum(s.seen["w"]) == pytest.approx(2.0) for s in played("eatta", "defaults"))


def test_eatta_passes_over_the_class_it_just_asked_for() -> None:
    rule = eatta.ClassRule()
    assert rule.pick([0], [0.5], [7], 1) == [0]
    assert rule.pick([1, 0, 2], [0.4, 0.5, 0.1], [7, 7, 3], 3) == [2, 1, 0]
    rule.recent, rule.last = {7}, {7: 0.5}
    assert rule.pick([0, 1], [0.6, 0.1], [7, 3], 0) == []
    assert rule.recent == {7}
    assert rule.pick([0, 1], [0.6, 0.1], [7, 3], 2) == [0, 1]
    rule.recent, rule.last = {3}, {7: 0.5, 3: 0.2}
    assert rule.pick([0, 1], [0.4, 0.1], [7, 7], 2) == [0, 1]


def test_eatta_perturbation_is_zero_without_noise() -> None:
    net, x = with_batch_statistics(nets.cnn()), nets.batches()[0]
    features, logits = look(net, x, "fc")
    still = eatta.sensitivity(features, logits, net.fc, torch.zeros_like(features), 0.01)
    assert still.max() < 1e-15


def test_wise_paper_breaks_the_first_tie_by_chance_and_drifts_later() -> None:
    kwargs = scenario("wise", "paper")
    steps = played("wise", "paper")
    assert steps[0].seen["d"].max() == 0.0
    assert steps[0].asked == [int(kwargs["ties"](1, 24).argmax())]
    assert steps[2].seen["d"].min() > 0.0
    assert sorted(steps[2].asked) == sorted(steps[2].seen["d"].topk(2).indices.tolist())


def test_wise_paper_anchor_follows_once_a_batch() -> None:
    kwargs = scenario("wise", "paper")
    steps = played("wise", "paper")
    for name in ("bn1.weight", "fc.weight", "fc.bias"):
        average = kwargs["net"].get_parameter(name).detach()
        for s in steps:
            average = 0.9 * average + 0.1 * s.params[name]
        torch.testing.assert_close(steps[-1].extra[f"anchor.{name}"], average, rtol=0, atol=1e-14)


def test_wise_paper_head_learns_from_features_before_the_norm_step() -> None:
    kwargs = scenario("wise", "paper")
    step = played("wise", "paper")[0]
    net, x = with_batch_statistics(deepcopy(kwargs["net"])), kwargs["batches"][0]
    index = step.asked[0]
    features, logits = look(net, x, "fc")
    error = logits[index].softmax(dim=0).detach()
    error[kwargs["labels"](1, index)] -= 1
    expected = net.fc.weight.detach() - 2.5e-4 * 1.9 * torch.outer(error, features[index].detach())
    torch.testing.assert_close(step.params["fc.weight"], expected, rtol=0, atol=1e-14)


def test_wise_paper_without_a_term_takes_no_step() -> None:
    kwargs = scenario("wise", "paper, nothing sure", grants=[0] * 5)
    steps = play("wise", kwargs)
    assert all(torch.equal(steps[-1].params[name], p) for name, p in kwargs["net"].named_parameters())
    assert not any(s.seen["total"].requires_grad for s in steps)


def test_wise_paper_block_takes_the_place_of_the_head() -> None:
    start, end = nets.cnn(), played("wise", "paper, block")[-1].params
    assert torch.equal(end["fc.weight"], start.fc.weight)
    assert not torch.equal(end["layer3.conv1.weight"], start.layer3.conv1.weight)


def test_wise_authors_moves_the_head_bias_but_never_its_weight() -> None:
    start, steps = nets.cnn(), played("wise", "authors")
    assert all(torch.equal(s.params["fc.weight"], start.fc.weight) for s in steps)
    assert not torch.equal(steps[1].params["fc.bias"], steps[0].params["fc.bias"])


def test_wise_authors_takes_a_larger_unlabelled_step_on_a_labelled_batch() -> None:
    """1.7/0.1 times 5e-4/2e-4: 42 and a half times as far, with the labels' own weight at zero."""
    kwargs = scenario("wise", "authors, entropy of all", momentum=0.0, nesterov=False, sup_first=0.0, sup_second=0.0)
    kwargs["batches"] = kwargs["batches"][:1]
    without, with_label = (play("wise", {**kwargs, "grants": [g]})[0].params["bn1.weight"] for g in (0, 1))
    start = kwargs["net"].bn1.weight.detach()
    torch.testing.assert_close(with_label - start, 42.5 * (without - start), rtol=1e-9, atol=1e-15)


def test_wise_authors_uses_perturbation_in_four_batches_then_drift() -> None:
    kwargs = scenario("wise", "authors", grants=[1] * 5)
    steps = play("wise", kwargs)
    net = with_batch_statistics(deepcopy(kwargs["net"]))
    net.load_state_dict(steps[2].params, strict=False)
    anchor = deepcopy(net)
    features, logits = look(net, kwargs["batches"][3], "fc")
    noise = kwargs["noise"](4, features.shape)
    expected = eatta.sensitivity(features, logits, net.fc, noise, 0.01)
    torch.testing.assert_close(steps[3].seen["scores"], expected, rtol=0, atol=1e-12)
    net.load_state_dict(steps[3].params, strict=False)
    for name, value in steps[3].extra.items():
        if name.startswith("anchor."):
            with torch.no_grad():
                anchor.get_parameter(name.removeprefix("anchor.")).copy_(value)
    x = kwargs["batches"][4]
    expected = wise.drift(net(x), anchor(x))
    torch.testing.assert_close(steps[4].seen["scores"], expected, rtol=0, atol=1e-12)


SHIPPED = [
    name
    for name, kwargs in scenarios("wise").items()
    if not set(kwargs) & wise_options.OPTIONS[kwargs.get("preset", "paper")]
]


@pytest.mark.parametrize("name", SHIPPED)
def test_wise_with_its_options_left_alone_is_the_shipped_one(name: str) -> None:
    kwargs = scenarios("wise")[name]
    option = {"pull": 0.0} if "preset" not in kwargs else {"class_rule": True}
    assert gap(play("wise", {**kwargs, **option}), played("wise", name)) < 1e-13


def test_the_published_tensors_are_those_that_the_scenario_names() -> None:
    kwargs = scenario("eatta", "published tensors")
    frozen_and_whole = play("eatta", kwargs)
    named = {k: v for k, v in kwargs.items() if k not in ("frozen", "whole")}
    assert gap(play("eatta", {**named, "adapt": eatta.published_tensors}), frozen_and_whole) == 0.0
