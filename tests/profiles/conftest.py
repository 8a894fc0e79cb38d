"""Jobs on paper whose ranks write profiles, from the campaign of benchmarks/profiles.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.profile_jobs import Job, profile_job


@pytest.fixture(autouse=True)
def _quick(without_power: None) -> None:
    """Nothing here asks what would have been found."""


@pytest.fixture
def job() -> Callable[..., Job]:
    """Return a maker of jobs: `job("ddp", gpu={2: 1.2})`."""
    return profile_job
