"""SimATTA: train all weights on labelled samples and on what the source model is sure of (Gui et al., ICLR 2024)."""

from __future__ import annotations

from typing import Any

from wise_atta import what, when
from wise_atta.how import Anchored, Anchors
from wise_atta.how.replay import Draw
from wise_atta.methods.method import Method, make_policy
from wise_atta.methods.presets import presets, published
from wise_atta.model import Spec
from wise_atta.what.clusters import Start


@presets(published(imagenet={}, cifar10={}))
def simatta(
    *,
    ratio: float = 3.0,
    policy: str | when.Policy = "uniform",
    utility: str | when.Utility = "count",
    selector: str | what.Selector = "clusters",
    labels: int = 3,
    e_l: float = 0.1,
    e_h: float = 0.1,
    most: int = 100,
    size: int | None = 300,
    steps: int = 10,
    batch: int = 32,
    lr: float = 1e-4,
    momentum: float = 0.9,
    adapt: Spec = "all",
    start: Start | None = None,
    draw: Draw | None = None,
    preset: str | None = None,
    seed: int = 0,
    **pacing: Any,
) -> Method:
    """min over all weights of (1 − α)·CE(pseudo) + α·CE(queried), 10 steps a batch, α the share of queried anchors.

    Pseudo anchors have H < e_l under the source model, at most 100 a batch. Candidates have H ≥ e_h; with m queried
    anchors and k labels to ask for, weighted k-means forms m + k clusters, and the candidates closest to centres of
    clusters without an old anchor are asked about. BatchNorm keeps the source's statistics.

    Parameters
    ----------
    ratio, policy, utility, selector, labels
        When and what to ask; names or objects. Three labels a batch unless given. `pacing` goes to the policy.
    e_l, most, size, steps, batch, lr, momentum, adapt, draw
        See `Anchored`. Either kind of anchor is kept in a buffer of `size`; the published code keeps all (None).
    e_h, start
        See `Clusters`.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``, ``"cifar10-c"``: the defaults.
        Entropies, steps and learning rate are those published for TinyImageNet-C, the nearest there is; three labels
        and a buffer of 300 are those of WISE-ATTA's tables.
    """
    queried = Anchors(size, name="queried", repeat=True, draw=draw, seed=seed)
    if selector == "clusters":
        selector = what.Clusters(queried, e_h=e_h, start=start, seed=seed)
    return Method(
        "simatta",
        Anchored(
            queried,
            adapt=adapt,
            lr=lr,
            momentum=momentum,
            steps=steps,
            batch=batch,
            e_l=e_l,
            most=most,
            size=size,
            draw=draw,
            seed=seed,
        ),
        policy=make_policy(policy, ratio=ratio, seed=seed, labels=labels, **pacing),
        utility=when.utility(utility) if isinstance(utility, str) else utility,
        selector=what.selector(selector, seed=seed) if isinstance(selector, str) else selector,
        labels=labels,
        statistics="source",
    )
