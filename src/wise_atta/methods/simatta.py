"""SimATTA: train all weights on labelled samples and on what the source model is sure of (Gui et al., ICLR 2024)."""

from __future__ import annotations

from typing import Any

from wise_atta.how import Anchored, Update
from wise_atta.methods.method import Method
from wise_atta.methods.recipes import imagenet_and_cifar, published, recipe
from wise_atta.what import Clusters


@published(imagenet_and_cifar(imagenet={}, cifar10={}), ratio=3.0, labels=3, selector=recipe("clusters", memory=None))
def simatta(*, update: Update = recipe(Anchored, queried=None), preset: str | None = None, **asks: Any) -> Method:
    """min over all weights of (1 − α)·CE(pseudo) + α·CE(queried), 10 steps a batch, α the share of queried anchors.

    Pseudo anchors have H < e_l under the source model, at most 100 a batch. Candidates have H ≥ e_h; with m queried
    anchors and k labels to ask for, weighted k-means forms m + k clusters, and the candidates closest to centres of
    clusters without an old anchor are asked about. BatchNorm keeps the source's statistics.

    Parameters
    ----------
    update
        `Anchored`, or in its place its options (lr, momentum, adapt, steps, batch, e_l, most, size, draw). Either kind
        of anchor is kept in a buffer of `size`; the published code keeps all (None).
    ratio, policy, utility, selector, labels
        When and what to ask; names or objects. Three labels a batch unless given. `pacing` goes to the policy; `e_h`
        and `start`, options of `Clusters`, can be given in the selector's place. `Clusters` without a memory looks at
        the anchors of the update.
    preset
        ``"imagenet-c"``, ``"imagenet-r"``, ``"imagenet-k"``, ``"imagenet-a"``, ``"cifar10-c"``: the defaults.
        Entropies, steps and learning rate are those published for TinyImageNet-C, the nearest there is; three labels
        and a buffer of 300 are those of WISE-ATTA's tables.
    """
    selector = asks["selector"]
    if isinstance(selector, Clusters) and isinstance(update, Anchored) and selector.memory is None:
        selector.memory = update.queried
    return Method("simatta", update, statistics="source", **asks)
