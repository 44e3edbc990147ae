"""The place of a run: device, instructions, threads and versions, on which the last bits depend."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

import wise_atta


def surroundings(device: torch.device, threads: int) -> dict[str, Any]:
    """What a card says about where it was made."""
    return {
        "versions": versions(),
        "device": device_name(device),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "tf32": device.type == "cuda" and torch.backends.cudnn.allow_tf32,
    }


def decisive(place: Mapping[str, Any]) -> dict[str, Any]:
    """What of some surroundings decides last bits."""
    versions = place["versions"]
    facts = {"device": place["device"], "torch": versions.get("torch"), "wise-atta": versions.get("wise-atta")}
    # A GPU does not care what the CPU can do, and early cards tell neither.
    others = ("threads", "tf32", *(["instructions"] if place["device"] == "cpu" else []))
    return facts | {name: place[name] for name in others if name in place}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what another place differs that decides last bits."""
    there, here = decisive(then), decisive(now)
    return [f"{name} {there[name]} there, {b} here" for name, b in here.items() if there.get(name, b) != b]


def versions() -> dict[str, str]:
    """Versions of everything that numbers depend on."""
    installed = {"python": platform.python_version(), "wise-atta": wise_atta.__version__}
    for package in ("torch", "torchvision", "numpy", "timm", "pillow", "scikit-learn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def device_name(device: torch.device) -> str:
    """The kind of a GPU, or what else it is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
