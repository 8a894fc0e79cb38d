"""python -m benchmarks.detection.reality DIR...: is the simulator like a real run?

Takes the costs of single operations from a traced run, simulates the same layout with them (and
with the faults of its ground truth), and compares what follows from the dependencies alone: step
time, and each rank's wait an iteration. Waits are not calibrated; they have to come out.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from aggregate import build_timeline
from megascan.errors import InputError, report_errors
from megascan.reader import read_trace
from megascan.simulate import CostModel, Fault, FaultKind, JobModel, Noise, simulate_trace
from megascan.timeline import Timeline

NUM_WARMUP = 2
"""Iterations left out of costs and comparisons."""


HEADING = """# Is the simulator like a real run?

`python -m benchmarks.detection.reality DIR...`: the layout of each run is simulated with the
medians of its single operations (and its planted faults). Waits are not calibrated: they have to
come out.
Medians of the traced iterations after the second.
"""


@dataclass(frozen=True)
class Measured:
    """Spans of a timeline after warm-up, and those of ranks and iterations without a fault."""

    spans: pd.DataFrame
    healthy: pd.DataFrame

    def self_ns(self, name: str) -> float:
        """Median self time of a span; 0 where there is none."""
        return self._median(self.healthy[self.healthy["name"] == name]["self_ns"])

    def quick_self_ns(self, name: str) -> float:
        """Tenth percentile of its self time: the rest is longer by waiting for the device."""
        values = self.healthy[self.healthy["name"] == name]["self_ns"]
        return float(values.quantile(0.1)) if len(values) else 0.0

    def transfer_ns(self, axis: str, op: str = "") -> float:
        """Median transfer on an axis."""
        chosen = self.healthy[self.healthy["group"].str.startswith(f"{axis}@")]
        chosen = chosen[chosen["track"] == 2]
        if op:
            chosen = chosen[chosen["op"] == op]
        quickest = chosen.groupby("match")["transfer_ns"].min()
        return self._median(quickest)

    @staticmethod
    def _median(values: pd.Series) -> float:
        return float(values.median()) if len(values) else 0.0


def frame_of(timeline: Timeline) -> pd.DataFrame:
    """The columns that are compared, text as text."""
    columns = [
        "rank", "name", "track", "iteration", "microbatch", "layer", "group", "op", "match",
        "start_ns", "duration_ns", "self_ns", "wait_ns", "transfer_ns",
    ]  # fmt: skip
    frame: pd.DataFrame = timeline.spans.select(columns).to_pandas()
    for name in ("name", "group", "op"):
        frame[name] = frame[name].astype(str)
    return frame


def measure(frame: pd.DataFrame, faults: list[Fault]) -> Measured:
    """Split off warm-up and what a fault touches."""
    spans = frame[frame["iteration"] > NUM_WARMUP]
    slowed = np.zeros(len(spans), dtype=bool)
    for fault in faults:
        active = spans["iteration"].map(fault.active).to_numpy(dtype=bool)
        slowed |= active & (spans["rank"] == fault.rank).to_numpy()
    return Measured(spans, spans[~slowed])


def costs_of(measured: Measured, layers_per_stage: int) -> CostModel:
    """Costs of single operations, medians over ranks, microbatches and iterations."""
    layer, attention = measured.self_ns("transformer_layer"), measured.self_ns("attention")
    mlp = measured.self_ns("mlp")
    if layer <= 0:
        raise InputError("the trace has no layers; trace it with --trace-granularity full")
    steps = measured.spans[measured.spans["name"] == "iteration"]
    steps = steps.sort_values(["rank", "iteration"])
    ends = steps["start_ns"] + steps["duration_ns"]
    gaps = steps["start_ns"] - ends.groupby(steps["rank"]).shift()
    neighbours = steps["iteration"].groupby(steps["rank"]).diff() == 1
    last = measured.healthy[measured.healthy["name"] == "output_layer"]["rank"].unique()
    forward = measured.healthy[
        (measured.healthy["name"] == "forward") & measured.healthy["rank"].isin(last)
    ]["self_ns"].median()
    inside = layers_per_stage * layer + measured.self_ns("output_layer")
    return CostModel(
        norm_ns=max(0.0, layer - attention - mlp) / 2,
        attention_ns=attention,
        mlp_ns=mlp,
        embedding_ns=measured.self_ns("embedding"),
        output_layer_ns=measured.self_ns("output_layer"),
        loss_ns=max(0.0, float(forward) - inside - measured.quick_self_ns("batch-generator")),
        backward_ratio=measured.self_ns("transformer_layer-backward") / layer,
        optimizer_ns=measured.self_ns("optimizer"),
        load_ns=measured.quick_self_ns("batch-generator"),
        between_iterations_ns=float(gaps[neighbours].median()) if neighbours.any() else 0.0,
        tensor_ns=measured.transfer_ns("tp", "all_reduce"),
        pipeline_ns=measured.transfer_ns("pp"),
        broadcast_ns=measured.transfer_ns("tp", "broadcast"),
        gradient_ns=measured.transfer_ns("dp_cp"),
        embedding_sync_ns=measured.transfer_ns("embd"),
        norm_sync_ns=measured.transfer_ns("mp"),
    )


def compare(timeline: Timeline, faults: list[Fault]) -> pd.DataFrame:
    """Real and simulated step time and wait of every rank, ms an iteration."""
    frame = frame_of(timeline)
    measured = measure(frame, faults)
    layout = timeline.layout
    num_layers = int(frame["layer"].max())
    logs = np.log(measured.healthy[measured.healthy["name"] == "attention"]["self_ns"].clip(1))
    spread = float(1.4826 * (logs - logs.median()).abs().median())
    header = next(iter(timeline.headers.values()))
    job = JobModel(
        layout=layout,
        costs=costs_of(measured, num_layers // layout.pp),
        iterations=int(frame["iteration"].max()),
        num_microbatches=int(frame["microbatch"].max()) + 1,
        num_layers=num_layers,
        noise=Noise(compute_ratio=spread),
        device=header.device.kind,
        distributed_optimizer=bool((frame["op"] == "reduce_scatter").any()),
    )
    simulated = frame_of(build_timeline(simulate_trace(job, faults)))
    columns = {
        "real": _per_rank(measured.spans),
        "simulated": _per_rank(simulated[simulated["iteration"] > NUM_WARMUP]),
    }
    return pd.concat(columns, axis=1)


def _per_rank(spans: pd.DataFrame) -> pd.DataFrame:
    """Medians over iterations: step time and synchronous communication's wait, ms."""
    steps = spans[spans["name"] == "iteration"].groupby(["rank", "iteration"])["duration_ns"]
    waiting = spans[(spans["wait_ns"] > 0) & (spans["track"] == 2)]
    waits = waiting.groupby(["rank", "iteration"])["wait_ns"].sum()
    waits = waits.reindex(steps.sum().index, fill_value=0)
    table = pd.DataFrame({"step_ms": steps.sum() / 1e6, "wait_ms": waits / 1e6})
    return table.groupby("rank").median().round(2)


def read_faults(folder: Path) -> list[Fault]:
    """Faults of a ground-truth file; none without one."""
    path = folder / "ground-truth.json"
    if not path.exists():
        return []
    return [
        Fault(
            rank=record["rank"],
            kind=FaultKind(record["kind"]),
            factor=record["factor"],
            first_iteration=record.get("first_iteration", record.get("from")) or 1,
            last_iteration=record.get("last_iteration", record.get("to")),
            peer=record.get("peer"),
        )
        for record in json.loads(path.read_bytes())["faults"]
        if record.get("factor")
    ]


def summary(name: str, timeline: Timeline, faults: list[Fault], table: pd.DataFrame) -> list[str]:
    """One row of the results: layout, fault, step times, and the waits rank by rank."""
    real, simulated = table["real"], table["simulated"]
    steps = [float(each["step_ms"].median()) for each in (real, simulated)]
    apart = (simulated["wait_ms"] - real["wait_ms"]).abs().max() / steps[0]
    layout = timeline.layout
    sizes = [(axis, getattr(layout, axis)) for axis in ("tp", "cp", "ep", "pp", "dp", "vpp")]
    planted = ", ".join(f"{one.kind} × {one.factor:g}, rank {one.rank}" for one in faults)
    waits = (" ".join(f"{wait:.0f}" for wait in each["wait_ms"]) for each in (real, simulated))
    return [
        name,
        " ".join(f"{axis.upper()}{size}" for axis, size in sizes if size > 1),
        planted or "none",
        f"{steps[0]:.0f}",
        f"{steps[1]:.0f} ({steps[1] / steps[0] - 1:+.1%})",
        *waits,
        f"{apart:.1%}",
    ]


def main() -> int:
    """Compare folders of real rank files with their simulations."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection.reality")
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="rank files of a real run"
    )
    folders = parser.parse_args().folders
    print(HEADING)
    print(
        "| run | layout | fault | step, real, ms | step, simulated | waits of the ranks, real, ms "
        "| simulated, ms | largest difference / step |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for folder in folders:
        timeline, faults = build_timeline(read_trace(folder)), read_faults(folder)
        name = folder.parent.name if folder.name == "trace" else folder.name
        row = summary(name, timeline, faults, compare(timeline, faults))
        print("| " + " | ".join(row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(main))
