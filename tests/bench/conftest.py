"""What do the tests of experiments share? A digits network, trained once, away from the user's own cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from wise_atta.bench.source import digits_model


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WISE_ATTA_CACHE", str(folder))
        digits_model()
        yield folder
