from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dlm_bridge.structured import cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, so that a test compiles what it names."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    cache.forget()
    yield folder
    cache.forget()
