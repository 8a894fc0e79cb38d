"""The stand-ins for CUDA leave everything else in the process as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ranks

PREPARED = """
import pickle, sys, time
import torch
sys.modules["transformer_engine"] = None
from training import cpu_backend
cpu_backend.install()
"""


After = Callable[[str], None]


@pytest.fixture
def after_install(tmp_path: Path) -> After:
    """Run a program behind `install`, in a process of its own; torch.jit reads it from its file."""

    def run(program: str) -> None:
        file = tmp_path / "program.py"
        file.write_text(PREPARED + program)
        ranks.run(file, check=True, PYTHONWARNINGS="ignore")

    return run


def test_devices_scripts_types_and_names_of_others_are_untouched(after_install: After) -> None:
    after_install(
        """
with torch.device("meta"):
    assert torch.empty(3).is_meta and torch.arange(3).is_meta
torch.set_default_device("meta")
assert torch.ones(2).is_meta
torch.set_default_device(None)
@torch.jit.script
def scripted(length: int):
    return torch.zeros(length) + torch.arange(length)
assert scripted(3).tolist() == [0, 1, 2]
assert pickle.loads(pickle.dumps(torch.ones)) is torch.ones
assert torch.ones(2).type() == "torch.FloatTensor"
assert torch.ones(2).type(torch.float64).dtype == torch.float64
assert not torch.cuda.is_available()
"""
    )


def test_what_says_cuda_is_answered_with_the_cpu(after_install: After) -> None:
    after_install(
        """
assert torch.ones(2, device="cuda").device.type == "cpu"
assert torch.nn.Linear(2, 2).cuda().to("cuda").weight.device.type == "cpu"
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record(); time.sleep(0.02); end.record()
assert 15 < start.elapsed_time(end) < 5000
event = torch.cuda.current_stream().record_event()
assert start.elapsed_time(event) >= start.elapsed_time(end)
try:
    start.elapsed_time(torch.cuda.Event())
    raise SystemExit("no error for an event that was never recorded")
except ValueError:
    pass
"""
    )
