"""Numbers that no machine has are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascan.cli.main import main


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--compute-noise", "nan", "compute noise is nan"),
        ("--compute-noise", "inf", "compute noise is inf"),
        ("--compute-noise", "-1", "compute noise is -1"),
        ("--transfer-noise", "1e308", "transfer noise is 1e+308"),
        ("--device-spread", "-0.1", "device spread is -0.1"),
        ("--clock-offset-ms", "nan", "clock offset (ms) is nan"),
        ("--clock-drift-ppm", "inf", "clock drift (ppm) is inf"),
        ("--warmup", "nan", "warm-up is nan"),
        ("--sequence-imbalance", "-1", "sequence imbalance is -1"),
        ("--gc-interval", "-1", "gc interval is -1"),
        ("--checkpoint-interval", "-3", "checkpoint interval is -3"),
        ("--seed", "-1", "--seed is -1"),
        ("--fault", "rank=0,kind=compute,factor=1e300", "fault factor is 1e+300"),
        ("--stage-imbalance", "last=inf", "stage imbalance"),
    ],
)
def test_it_is_one_sentence_and_nothing_is_written(
    flag: str, value: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert main(["simulate", "--dp", "2", "--layers", "2", f"{flag}={value}", "-o", str(folder)])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {says}")
    assert not folder.exists()
