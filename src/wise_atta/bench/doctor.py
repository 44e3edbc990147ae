"""`wise-atta doctor`: what is installed here, and what is missing for which feature."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
from importlib import metadata
from typing import Any

import torch

import wise_atta
from wise_atta import errors
from wise_atta.bench.source import NAME, cache_folder
from wise_atta.data import catalog

FEATURES = {
    "vision": "torchvision and timm models, pictures from files",
    "bench": "the command line, the demo, experiments, tables and figures",
    "serve": "the live service and its ledger",
    "postgres": "a ledger in PostgreSQL",
    "ray": "sweeps over a cluster",
    "hub": "data sets from the Hugging Face hub",
    "docs": "building the documentation",
    "dev": "running the project's checks",
}


def examine() -> dict[str, Any]:
    """Everything that `wise-atta doctor` tells, as plain values.

    Examples
    --------
    >>> found = examine()
    >>> found["extras"]["bench"]["for"]
    'the command line, the demo, experiments, tables and figures'
    """
    return {
        "wise-atta": wise_atta.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "core": {name: _version(name) for name in _requirements(None)},
        "device": _device(),
        "extras": {
            extra: {"for": feature, "packages": {name: _version(name) for name in _requirements(extra)}}
            for extra, feature in FEATURES.items()
        },
        "data": _data(),
        "cache": {
            "folder": str(cache_folder()),
            "digits network": (cache_folder() / f"{NAME}.safetensors").exists(),
        },
    }


def missing(examined: dict[str, Any]) -> dict[str, list[str]]:
    """Extras that are not whole, and what each lacks."""
    lacks = {
        extra: [name for name, version in about["packages"].items() if version is None]
        for extra, about in examined["extras"].items()
    }
    return {extra: names for extra, names in lacks.items() if names}


def _requirements(extra: str | None) -> list[str]:
    """Distributions that the installed package declares, for one extra or for the core."""
    names = []
    for text in metadata.requires("wise-atta") or []:
        requirement, _, marker = text.partition(";")
        wanted = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        name = re.split(r"[\s\[<>=!~(]", requirement.strip(), maxsplit=1)[0]
        if (wanted[1] if wanted else None) == extra and name != "wise-atta":
            names.append(name)
    return names


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return {"auto": "cuda", "gpus": gpus, "threads": torch.get_num_threads()}
    return {"auto": "cpu", "gpus": [], "threads": torch.get_num_threads(), "cores": os.cpu_count()}


def _data() -> dict[str, Any]:
    """The data folder and which of the known data sets lie in it."""
    own = [name for name, entry in catalog.ENTRIES.items() if entry.layout == "digits"]
    own = own if importlib.util.find_spec("sklearn") else []
    try:
        root = catalog.data_root()
    except errors.WiseAttaError as error:
        return {"folder": None, "here": own, "problem": str(error)}
    here = [name for name, entry in catalog.ENTRIES.items() if catalog.find(entry, root)]
    return {"folder": str(root), "here": [*own, *here], "problem": None}
