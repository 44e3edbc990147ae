"""The network that the demo adapts: a small one, trained in seconds on one half of the digits, and kept."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch

from wise_atta import errors
from wise_atta.data import models, train

NAME = "digits"


def cache_folder() -> Path:
    """Where things are kept that can be made again: `WISE_ATTA_CACHE`, or `wise-atta` in the user's cache folder."""
    chosen = os.environ.get("WISE_ATTA_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    # An empty or relative XDG_CACHE_HOME counts as unset, as its specification says.
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "wise-atta"


def digits_model(
    folder: Path | None = None,
    *,
    recipe: train.Recipe | None = None,
    report: Callable[[train.Step], None] | None = None,
) -> models.SourceModel:
    """The network for digits, trained now if it was not before. Its half of the pictures is not in any digits stream.

    Parameters
    ----------
    folder
        Where checkpoint and card are kept; `cache_folder()` if not given.
    recipe
        How it is trained; `RECIPES["digits"]` if not given.
    report
        Called after every step of training.
    """
    folder = cache_folder() if folder is None else folder
    report = report or (lambda step: None)
    threads = torch.get_num_threads()
    # Sums depend on how many threads share them: with one, every machine of a kind trains the same network.
    torch.set_num_threads(1)
    try:
        try:
            train.train(NAME, out=folder, name=NAME, recipe=recipe, device="cpu", report=report)
            return _load(folder)
        except (errors.StateMismatch, errors.DataError):
            # Kept by another release, or half written: it can be made again.
            train.train(NAME, out=folder, name=NAME, recipe=recipe, device="cpu", restart=True, report=report)
            return _load(folder)
    finally:
        torch.set_num_threads(threads)


def _load(folder: Path) -> models.SourceModel:
    # The name leaves out the folder, so that a card says the same on every machine.
    return dataclasses.replace(models.load(f"file:{folder / NAME}.safetensors"), name=NAME)


def load(name: str, weights: Path | None = None) -> models.SourceModel:
    """A model by name: `digits` is the demo's network, every other name is one of `wise_atta.data.models`."""
    return digits_model() if name == NAME else models.load(name, weights=weights)
