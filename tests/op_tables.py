"""The public op tables of production jobs, where somebody has put them beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

PRODUCTION = Path(__file__).resolve().parents[2] / "shared" / "data" / "whatif"
needs_production = pytest.mark.skipif(
    not PRODUCTION.is_dir(), reason="the public op tables are not beside us"
)
