"""Simulated jobs as timelines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from aggregate import build_timeline
from megascan.cli.main import main
from megascan.reader import read_trace
from megascan.timeline import Timeline


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Timeline]:
    """The timeline of a job simulated with these flags."""

    def make(*flags: str) -> Timeline:
        folder = tmp_path_factory.mktemp("job") / "trace"
        words = ["simulate", "--iterations", "8", *flags, "-o", str(folder)]
        assert main(words) == 0
        return build_timeline(read_trace(Path(folder)))

    return make
