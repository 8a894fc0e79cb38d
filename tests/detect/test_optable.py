"""Op tables in Parquet: a slow worker and a heavy stage, made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from detect import Cause, Owner, Verdict, detect_op_table
from megascan.errors import InputError

DP, PP, STEPS, MICROBATCHES = 3, 2, 10, 6


def write_table(path: Path, factor) -> Path:
    """`factor(dp, stage, optype)` on 200 ms forward, 400 ms backward and 50 ms optimizer."""
    rng = np.random.default_rng(0)
    rows = []
    for step in range(STEPS):
        for stage in range(PP):
            for replica in range(DP):
                now = 0.0
                operations = [
                    (name, usual, number)
                    for number in range(MICROBATCHES)
                    for name, usual in (("forward-compute", 0.2), ("backward-compute", 0.4))
                ]
                for name, usual, number in [*operations, ("optimizer", 0.05, 0)]:
                    noise = np.exp(0.02 * rng.standard_normal())
                    length = usual * factor(replica, stage, name) * noise
                    rank = stage * DP + replica
                    rows.append((replica, stage, rank, 7 * step, name, now, length, number, 0))
                    now += length
    names = (
        "dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc"
    )  # fmt: skip
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    types = {"optype": pa.dictionary(pa.int8(), pa.string())}
    types |= dict.fromkeys(("start_ts", "duration"), pa.float32())
    table = pa.table(
        {
            name: pa.array(values, pa.string()).dictionary_encode().cast(types[name])
            if name == "optype"
            else pa.array(values, types.get(name, pa.int32()))
            for name, values in columns.items()
        }
    )
    pq.write_table(table, path)
    return path


def test_slow_worker(tmp_path):
    path = write_table(
        tmp_path / "t.parquet", lambda dp, pp, name: 1.2 if (dp, pp) == (1, 1) else 1
    )
    report = detect_op_table(path)
    assert report.verdict == Verdict.DEGRADED
    assert [(one.ranks, one.cause) for one in report.findings] == [((4,), Cause.COMPUTE)]
    assert report.findings[0].slowdown == pytest.approx(1.2, rel=0.02)
    assert report.iterations == (0, 63)


def test_heavy_stage(tmp_path):
    def heavier(dp, pp, name):
        return {"forward-compute": 1.8, "backward-compute": 1.4}.get(name, 1) if pp == 1 else 1

    report = detect_op_table(write_table(tmp_path / "t.parquet", heavier))
    assert report.verdict == Verdict.JOB
    finding = report.findings[0]
    assert (finding.cause, finding.owner) == (Cause.STAGE_IMBALANCE, Owner.JOB)
    assert finding.ranks == (3, 4, 5)


def test_healthy(tmp_path):
    report = detect_op_table(write_table(tmp_path / "t.parquet", lambda *_: 1))
    assert report.verdict == Verdict.HEALTHY


def test_a_table_without_compute_is_refused(tmp_path):
    path = write_table(tmp_path / "t.parquet", lambda *_: 1)
    table = pq.read_table(path)
    only = table.filter(pa.compute.equal(table["optype"].cast(pa.string()), "optimizer"))
    pq.write_table(only, path)
    with pytest.raises(InputError, match="forward-compute"):
        detect_op_table(path)
