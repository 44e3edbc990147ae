"""What do all tests share? One thread, fixed examples, and the way to real pictures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from needs import missing

# Sums depend on how many threads share them: with one, results do not depend on the machine's cores.
torch.set_num_threads(1)

settings.register_profile("wise-atta", derandomize=True, max_examples=100, deadline=None)
settings.load_profile("wise-atta")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whatever reads pictures, so that `-m "not data"` leaves it out."""
    for item in items:
        if "wise_atta_data" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.data)


@pytest.fixture(scope="session")
def wise_atta_data() -> Path:
    """The folder of pictures that WISE_ATTA_DATA names. Absent, a test skips here and fails under CI=true."""
    folder = os.environ.get("WISE_ATTA_DATA")
    if folder:
        path = Path(folder)
        if not path.is_dir():
            pytest.fail(f"WISE_ATTA_DATA names {folder}, which is not a folder: correct it, or unset it to skip")
        return path
    missing("needs real pictures: set WISE_ATTA_DATA to the folder that holds them")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium. Absent, a test skips here and fails under CI=true."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        missing("needs a browser: install chromium and the Python package playwright")
    with sync_playwright() as playwright:
        # As root, chromium runs only without its sandbox; the pages are our own.
        arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        yield playwright.chromium.launch(executable_path=program, args=arguments)
