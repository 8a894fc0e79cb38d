"""What `import megascan` offers, and what it does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

import megascan


def test_names_are_sorted_and_there():
    assert megascan.__all__ == sorted(megascan.__all__)
    assert all(getattr(megascan, name) for name in megascan.__all__)
    assert set(megascan.__all__) <= set(dir(megascan))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        getattr(megascan, "absent")  # noqa: B009


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import megascan", ("torch", "pandas", "pyarrow", "numpy", "megatron")),
        ("from megascan import start", ("torch", "pandas", "pyarrow", "megatron")),
        ("import megascan.launch", ("torch", "pandas", "pyarrow", "megatron")),
    ],
)
def test_importing_is_light(statement, heavy):
    program = f"import sys; {statement}; print([m for m in {heavy!r} if m in sys.modules])"
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert finished.stdout.strip() == "[]", finished.stderr
