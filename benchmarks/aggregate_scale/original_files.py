"""The same jobs as the original MegaScan would have written them: begin and end records, indented.

Times count from each rank's own step begin, attributes stand on end records, and only what the
original traces is there: passes, layers and their parts, tensor-parallel all-reduces, the gradient
all-reduce and the optimizer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.aggregate_scale.rank_files import ScaleJob, simulated
from megascan.arrays import Integers
from megascan.export.chrome import Coded, coded_numbers, number_texts, row_texts
from megascan.schema import Kind
from megascan.timeline import Trace, codes, equals, numbers
from megascan.topology import rank_file_name

_NAMES = {
    "iteration": "iteration",
    "forward": "forward",
    "backward": "backward",
    "transformer_layer": "transformer_layer",
    "attention": "attention",
    "mlp": "mlp",
    "optimizer": "optimizer",
}
_REDUCE, _ALLREDUCE = "_reduce", "allreduce"


def write_original_files(job: ScaleJob, folder: Path) -> int:
    """Write a file a rank into a new folder; the number of begin and end records in them."""
    trace = simulated(job, iterations=1)
    per_iteration = 2 * _traced(trace)[0].num_rows
    trace = simulated(job, iterations=-(-2 * job.num_spans // per_iteration))
    spans, names = _traced(trace)
    folder.mkdir(parents=True)
    rank, num_records = numbers(spans, "rank"), 0
    for each in sorted(trace.headers):
        low, high = np.searchsorted(rank, [each, each + 1])
        text, count = _records(trace, each, spans.slice(low, high - low), names[low:high])
        name = rank_file_name(trace.layout, trace.layout.coordinates(each))
        (folder / name).write_bytes(text)
        num_records += count
    return num_records


def _traced(trace: Trace) -> tuple[pa.Table, npt.NDArray[np.str_]]:
    """Spans the original would have, and their names there."""
    row_codes, texts = codes(trace.spans, "name")
    names = np.array([_NAMES.get(text, "") for text in texts])[row_codes]
    group_codes, groups = codes(trace.spans, "group")
    within_tp = np.array([group.startswith("tp@") for group in groups])[group_codes]
    collective = equals(trace.spans, "kind", Kind.COLLECTIVE)
    names[equals(trace.spans, "op", "all_reduce") & collective & within_tp] = _REDUCE
    names[equals(trace.spans, "op", "reduce_scatter") & collective & ~within_tp] = _ALLREDUCE
    kept = (names != "") & (numbers(trace.spans, "duration_ns") > 0)
    return trace.spans.filter(pa.array(kept)), names[kept]


def _records(
    trace: Trace, rank: int, spans: pa.Table, names: npt.NDArray[np.str_]
) -> tuple[memoryview, int]:
    start = numbers(spans, "start_ns")
    end = start + numbers(spans, "duration_ns")
    step_row = np.maximum.accumulate(np.where(names == "iteration", np.arange(len(names)), 0))
    row, is_end = _in_nesting_order(start, end)
    rel_ts = np.where(is_end, end[row], start[row]) - start[step_row[row]]
    place, group = trace.layout.coordinates(rank), trace.layout.group(rank, "tp")
    distinct, code = np.unique(names[row], return_inverse=True)
    is_step = names[row] == "iteration"
    head = _head(distinct, [other for other in group if other != rank])
    sort = Coded(code * 2 + is_end, 2 * len(distinct), lambda number: head[number])
    microbatch = np.where(
        is_end & np.isin(names[row], ["forward", "backward"]), numbers(spans, "microbatch")[row], -1
    )
    common = (
        f',\n    "dp_rk": {place.dp},\n    "pp_rk": {place.pp},\n    "tp_rk": {place.tp},\n'
        f'    "dev": {rank % 8},\n    "g_rk": {rank}'
    )
    digits = pc.binary_slice(number_texts(rel_ts).cast(pa.binary()), 0, -1).cast(pa.string())
    wall = pc.binary_join_element_wise(
        common + ',\n    "duration_wall": ', digits, ',\n    "duration_cuda": ', digits, ""
    )
    opening = coded_numbers(
        microbatch,
        lambda value: ",\n  {\n" + (f'    "micro_batch_index": {value},\n' if value >= 0 else ""),
    )
    step_end, step_begin = pa.array(is_step & is_end), pa.array(is_step & ~is_end)
    tail = pc.if_else(step_end, wall, pc.if_else(step_begin, "", common))
    text = pc.binary_join_element_wise(*row_texts([opening, sort]), digits, tail, "\n  }", "")
    content = bytes(memoryview(text.buffers()[2])[1:])  # without the first separator's comma
    return memoryview(b"[" + content + b"\n]\n"), len(row)


def _in_nesting_order(start: Integers, end: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """(span, whether it is its end) record by record: at one time inner ends come first, then
    outer begins."""
    rows = np.arange(len(start))
    time = np.concatenate([start, end])
    is_end = np.repeat([False, True], len(start))
    tie = np.concatenate([-end, -start])
    depth = np.concatenate([rows, -rows])
    order = np.lexsort((depth, tie, ~is_end, time))
    return np.concatenate([rows, rows])[order], is_end[order]


def _head(names: npt.NDArray[np.str_], others: list[int]) -> list[str]:
    """What stands before a record's time, by name and begin or end."""
    found = []
    for name in names.tolist():
        time_key = "pad_before" if name == "iteration" else "rel_ts"
        found.append(f'    "name": "{name}",\n    "ph": "B",\n    "{time_key}": ')
        attributes = ""
        if name == _REDUCE:
            members = ",\n".join(f"      {other}" for other in others)
            attributes = f'    "expect": "_reduce",\n    "group": [\n{members}\n    ],\n'
        found.append(f'{attributes}    "name": "{name}",\n    "ph": "E",\n    "rel_ts": ')
    return found
