"""Every guide does what it says; the convention is described in conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Follow = Callable[[Path], None]


@pytest.mark.timeout(900)
def test_guide_works_as_written(guide: Path, follow: Follow) -> None:
    follow(guide)
