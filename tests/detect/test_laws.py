"""The laws against scipy.stats, which is too slow to import at start."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from detect.stats.residuals import rank_correlation, t_tail


def test_tail_of_students_law():
    assert t_tail(2.5, 7) == pytest.approx(stats.t.sf(2.5, 7))


def test_rank_correlation_with_ties():
    random = np.random.default_rng(0)
    one = random.integers(0, 6, 40).astype(float)
    other = one + random.normal(size=40)
    assert rank_correlation(one, other) == pytest.approx(stats.spearmanr(one, other).statistic)
    assert rank_correlation(one, np.ones(40)) == 0.0


def test_importing_detect_does_not_import_scipy_stats():
    code = "import sys, detect; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
