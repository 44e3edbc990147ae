"""An adapter's state as plain values: what is saved, which states are read, and which are refused with what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wise_atta import errors

if TYPE_CHECKING:
    from wise_atta.controls import Controls

_VERSION = 1
_PARTS = ("update", "policy", "utility", "selector", "anchor", "guard")
# What has a state of its own: its key, and the adapter's name for it. Loaded in this order.
_KEPT = {"desk": "questions"} | {
    name: name for name in ("policy", "selector", "annotator", "anchor", "update", "guard")
}
# May be None in a state that is read into an adapter that has one.
_OPTIONAL = ("desk", "annotator", "anchor")


def state_of(adapter: Controls) -> dict[str, Any]:
    """Everything needed to go on to the same bits."""
    running = adapter.classifier.running
    parts = {key: getattr(adapter, name) for key, name in _KEPT.items()}
    state = {
        "version": _VERSION,
        "model": adapter.classifier.fingerprint(),
        "parts": _parts(adapter),
        "number": adapter._number,
        "age": adapter._age,
        "frozen": adapter._frozen,
        "running": None if running is None else running.detach().cpu().clone(),
        **{key: None if part is None else part.state_dict() for key, part in parts.items()},
    }
    # Before the first question is asked, 0.1 knows of none and keeps none.
    return state if adapter.questions.counts.asked else state | {"desk": None}


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
    running, model = state["running"], adapter.classifier
    model.running = None if running is None else running.to(model.device, copy=True)
    adapter._number, adapter._age, adapter._frozen = state["number"], state["age"], state["frozen"]
    for key, name in _KEPT.items():
        part = getattr(adapter, name)
        if part is not None and (state[key] is not None or key not in _OPTIONAL):
            part.load_state_dict(state[key])
    if state["desk"] is None:
        adapter.questions.forget()


def _parts(adapter: Controls) -> dict[str, str]:
    parts = {name: type(getattr(adapter, name)).__name__ for name in _PARTS}
    objective = type(getattr(adapter.update, "objective", None)).__name__
    return parts | {"objective": objective, "statistics": adapter.classifier.statistics}
