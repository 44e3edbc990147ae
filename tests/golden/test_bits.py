"""The golden test: do all configurations give the bits that were recorded?

On a machine whose rounding is recorded (torch, instruction set, threads) every hash must be the same. On others the
numbers are compared: closely in the first batches, loosely at the end, and only as long as the same was asked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from golden.configurations import GROUPS, SHARED
from golden.play import EARLY, parted, play
from golden.values import machine, stored

# Relative tolerances, of the first batches and of the last, where machines round differently. In bfloat16 the first
# batch alone is compared: a rounding apart, learning soon leads elsewhere.
CLOSE, LOOSE, CLOSE_BF16 = 1e-4, 5e-2, 5e-2
# Of so many configurations another question may be asked, or another end be reached: scores that all but tie.
STRAY = 0.05


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """The guard says what it does; here it trips often."""
    log = logging.getLogger("wise_atta.guard")
    log.disabled = True
    yield
    log.disabled = False


@pytest.mark.parametrize("group", GROUPS)
def test_bits_are_those_recorded(group: str) -> None:
    compare(group)


def test_bits_with_two_threads_are_those_recorded() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compare(SHARED)
    finally:
        torch.set_num_threads(before)


def compare(group: str) -> None:
    played = {name: play(case) for name, case in GROUPS[group].items()}
    digests: dict[str, list[Any]] = stored()["digests"][group]
    if machine() not in stored()["hashes"]:
        assert_close(group, digests, {name: digest for name, (_, digest) in played.items()})
        return
    hashes: dict[str, str] = stored()["hashes"][machine()][group]
    assert list(hashes) == list(played), "configurations were added or taken away: record them"
    moved = {name: parted(hashes[name], bits) for name, (bits, _) in played.items()}
    assert not any(moved.values()), "\n".join(f"{name}: {', '.join(where)}" for name, where in moved.items() if where)


def assert_close(group: str, before: dict[str, list[Any]], now: dict[str, list[Any]]) -> None:
    """Compare by the digests in numbers."""
    stray, far = [], []
    for name, digest in now.items():
        if bool(before[name]) != bool(digest):
            far.append(f"{name}: refused on one machine alone")
        elif digest and GROUPS[group][name].options().get("precision") == "bf16":
            if differ(before[name][1], digest[1], CLOSE_BF16):
                far.append(f"{name}, batch 1: {before[name][1]} is now {digest[1]}")
        elif digest:
            early, end = far_apart(name, before[name], digest)
            far += early
            stray += end
    assert not far, "\n".join(far)
    assert len(stray) <= max(2, STRAY * len(now)), "\n".join(stray)


def far_apart(name: str, before: list[Any], now: list[Any]) -> tuple[list[str], list[str]]:
    """What differs in the first batches, and what does later."""
    asked_before, asked = (digest[0].split(",") for digest in (before, now))
    same = next((i for i, pair in enumerate(zip(asked_before, asked, strict=True)) if pair[0] != pair[1]), len(asked))
    early = [
        f"{name}, batch {number + 1}: {old} is now {new}"
        for number, (old, new) in enumerate(zip(before[1 : 1 + EARLY], now[1 : 1 + EARLY], strict=True))
        if number <= same and differ(old, new, CLOSE)
    ]
    if same < len(asked):
        other = f"asks {asked[same] or 'nothing'}, not {asked_before[same] or 'nothing'}"
        return early, [f"{name}, batch {same + 1}: {other}"]
    ends = zip(before[1 + EARLY :], now[1 + EARLY :], strict=True)
    return early, [f"{name}, at the end: {old} is now {new}" for old, new in ends if differ(old, new, LOOSE)]


def differ(before: list[float], now: list[float], tolerance: float) -> bool:
    size = max(abs(before[0]), abs(now[0]), 1e-6)
    return any(not abs(old - new) <= tolerance * size for old, new in zip(before, now, strict=True))


def test_every_recorded_group_is_still_played() -> None:
    assert set(stored()["digests"]) == set(GROUPS)
