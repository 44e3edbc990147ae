"""`wise_atta.adapt`: one call around a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from wise_atta import errors, methods
from wise_atta.distributed import SharedAdapter, SharedClassifier, SharedQuestions
from wise_atta.guard import Guard
from wise_atta.loop import Adapter
from wise_atta.methods import Method
from wise_atta.model import Classifier
from wise_atta.who import Questions

# How the network runs; see the guide on speed.
FAST = ("precision", "channels_last", "compile", "graphs", "checkpointing")
_CLASSIFIER = ("head", "classes", "mean", "std", "prior", "ema_weight", "mixture", "statistics", *FAST)
_QUESTIONS = ("annotator", "context", "late_weight", "late_limit", "expires_after")
_ADAPTER = ("shadow", "guard")


def adapt(model: nn.Module, method: str | Method = "wise", **options: Any) -> Adapter:
    """Wrap a classifier so that it adapts while it predicts.

    Parameters
    ----------
    model
        Any classifier. It is never changed.
    method
        The name of a method, one made by hand, or ``"package.module:factory"``, a function that returns a `Method`.
    options
        Of four kinds, told apart by their names:

        - how the model is seen and run (`Classifier`): `head`, `classes`, `mean`, `std`, `statistics`, `prior`,
          `ema_weight`, `mixture`, `precision`, `channels_last`, `compile`, `graphs`, `checkpointing`;
        - who answers, and what becomes of late answers (`Questions`): `annotator`, `context`, `late_weight`,
          `late_limit`, `expires_after`; and of the `Adapter` `shadow` and `guard` (``guard=True`` is `Guard()`);
        - `group`, a process group or ``"world"``: several processes share the batches of one stream
          (`wise_atta.distributed`);
        - all others (`ratio`, `lr`, …) go to the method.

    Examples
    --------
    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> adapter = adapt(net, "wise", ratio=0.5)
    >>> out = adapter.predict(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))
    >>> step = adapter.learn(out, {query.id: 0 for query in out.queries})
    """
    if not isinstance(model, nn.Module):
        raise errors.BadInput(f"a model is an nn.Module, not a {type(model).__name__}: make or load it first")
    group = options.pop("group", None)
    wrapper, asked, seen = (
        {name: options.pop(name) for name in names if name in options} for names in (_ADAPTER, _QUESTIONS, _CLASSIFIER)
    )
    if isinstance(wrapper.get("guard"), bool):
        wrapper["guard"] = Guard() if wrapper["guard"] else None
    if isinstance(method, str):
        method = methods.get(method, **options)
    elif options:
        raise errors.BadConfig(f"{', '.join(options)}: give these to the method itself, it was made by hand")
    seen = {"statistics": method.statistics} | seen
    parts = {name: getattr(method, name) for name in ("policy", "utility", "selector", "labels", "anchor")} | wrapper
    if group is not None:
        shared = SharedClassifier(model, group=group, adapt=method.update.adapts, **seen)
        return SharedAdapter(shared, method.update, questions=SharedQuestions(shared, **asked), **parts)
    classifier = Classifier(model, adapt=method.update.adapts, **seen)
    return Adapter(classifier, method.update, questions=Questions(**asked), **parts)
