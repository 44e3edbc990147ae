"""An adapter's state as plain values: what is saved, which states are read, and which are refused with what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wise_atta import errors

if TYPE_CHECKING:
    from wise_atta.controls import Controls

_VERSION = 1
_PARTS = ("update", "policy", "utility", "selector", "anchor", "guard")


def state_of(adapter: Controls) -> dict[str, Any]:
    """Everything needed to go on to the same bits."""
    running = adapter.classifier.running
    return {
        "version": _VERSION,
        "model": adapter.classifier.fingerprint(),
        "parts": _parts(adapter),
        "number": adapter._number,
        "age": adapter._age,
        "frozen": adapter._frozen,
        "update": adapter.update.state_dict(),
        "anchor": None if adapter.anchor is None else adapter.anchor.state_dict(),
        "running": None if running is None else running.detach().cpu().clone(),
        "policy": adapter.policy.state_dict(),
        "selector": adapter.selector.state_dict(),
        "desk": adapter.questions.state_dict(),
        "annotator": None if adapter.annotator is None else adapter.annotator.state_dict(),
        "guard": None if adapter.guard is None else adapter.guard.state_dict(),
    }


def load(adapter: Controls, state: Mapping[str, Any]) -> None:
    """Put an adapter into a saved state; one that cannot be read leaves it as it was."""
    _check(adapter, state)
    before = state_of(adapter)
    try:
        _load(adapter, state)
    except Exception as error:
        _load(adapter, before)
        if isinstance(error, errors.WiseAttaError):
            raise
        raise errors.StateMismatch(f"the state could not be read: {error!r}") from error


def _check(adapter: Controls, state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise errors.StateMismatch(f"a state is what state_dict() gave, not a {type(state).__name__}")
    if state.get("version") != _VERSION:
        raise errors.StateMismatch(
            f"the state is of version {state.get('version')!r}, this is version {_VERSION}: save it again with the "
            "release that wrote it, or start from the source"
        )
    saved, parts = state.get("parts", {}), _parts(adapter)
    differ = [f"{name} {saved.get(name)} there, {part} here" for name, part in parts.items() if saved.get(name) != part]
    if differ:
        raise errors.StateMismatch(
            f"the state is of another method: {'; '.join(differ)}. Load it into an adapter with the same parts"
        )
    theirs, own = state.get("model", {}), adapter.classifier.fingerprint()
    if theirs != own:
        differs = sorted(key for key in own if theirs.get(key) != own[key])
        raise errors.StateMismatch(
            f"the state belongs to another model: {', '.join(differs)} of its tensors differ. "
            "Load it into an adapter of the same model and weights"
        )


def _load(adapter: Controls, state: Mapping[str, Any]) -> None:
    if state["desk"] is None:
        # Earlier releases kept no questions before the first was asked.
        adapter.questions.forget()
    else:
        adapter.questions.load_state_dict(state["desk"])
    adapter.policy.load_state_dict(state["policy"])
    adapter.selector.load_state_dict(state["selector"])
    if adapter.annotator is not None and state["annotator"] is not None:
        adapter.annotator.load_state_dict(state["annotator"])
    if adapter.anchor is not None and state["anchor"] is not None:
        adapter.anchor.load_state_dict(state["anchor"])
    running = state["running"]
    adapter.classifier.running = None if running is None else running.to(adapter.classifier.device, copy=True)
    adapter._number, adapter._age, adapter._frozen = state["number"], state["age"], state["frozen"]
    adapter.update.load_state_dict(state["update"])
    if adapter.guard is not None:
        adapter.guard.load_state_dict(state["guard"])


def _parts(adapter: Controls) -> dict[str, str]:
    parts = {name: type(getattr(adapter, name)).__name__ for name in _PARTS}
    objective = type(getattr(adapter.update, "objective", None)).__name__
    return parts | {"objective": objective, "statistics": adapter.classifier.statistics}
