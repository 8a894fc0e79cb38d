"""Ready queries, and the view `megascan_span` that they and any other query can use.

The view has a row a span, whatever the file's format, with the columns of the timeline: ts and dur
(ns), rank, kind, name, and every argument by its name, NULL where it does not apply (`group` is a
word of SQL and needs double quotes).
"""

from __future__ import annotations

from collections.abc import Mapping

from megascan.schema import TIMELINE_COLUMNS, Kind

SPAN_VIEW = "megascan_span"

_ARGUMENTS = tuple(
    column.name
    for column in TIMELINE_COLUMNS
    if column.name not in {"rank", "kind", "name", "start_ns", "duration_ns"}
)


def span_view() -> str:
    """SQL that creates the view.

    Chrome JSON keeps arguments under `args.` and the rank as process id, protobuf both under
    `debug.`.
    """
    arguments = ",\n  ".join(f'{_argument(name)} as "{name}"' for name in _ARGUMENTS)
    kinds = ", ".join(f"'{kind}'" for kind in Kind)
    return f"""create perfetto view {SPAN_VIEW} as
select s.id, s.ts, s.dur, s.track_id, s.depth, s.name, s.category as kind,
  coalesce(extract_arg(s.arg_set_id, 'debug.rank'), p.pid) as rank,
  {arguments}
from slice s
left join thread_track tt on s.track_id = tt.id
left join thread t using (utid)
left join process p using (upid)
where s.category in ({kinds})"""


def _argument(name: str) -> str:
    sources = ", ".join(f"extract_arg(s.arg_set_id, '{root}.{name}')" for root in ("args", "debug"))
    return f"coalesce({sources})"


PRESETS: Mapping[str, str] = {
    "bandwidth": f"""select kind, op, "group", count(*) as num_spans,
  round(sum(size_bytes) / 1e6, 3) as megabytes,
  round(sum(transfer_ns) / 1e6, 3) as transfer_ms,
  round(1.0 * sum(size_bytes) / sum(transfer_ns), 3) as bandwidth_gbps
from {SPAN_VIEW} where size_bytes > 0 and transfer_ns > 0
group by 1, 2, 3 order by bandwidth_gbps limit 50""",
    "slowest": f"""select name, rank, iteration, microbatch, layer,
  round(dur / 1e6, 3) as duration_ms, round(self_ns / 1e6, 3) as self_ms
from {SPAN_VIEW} where kind = 'compute' order by coalesce(self_ns, dur) desc limit 50""",
    "waits": f"""select rank, count(*) as num_spans,
  round(sum(wait_ns) / 1e6, 3) as wait_ms,
  round(sum(transfer_ns) / 1e6, 3) as transfer_ms,
  round(1.0 * sum(wait_ns) / sum(dur), 3) as wait_ratio
from {SPAN_VIEW} where wait_ns is not null
group by rank order by wait_ms limit 50""",
}
"""By name: bandwidth of every operation and group, lowest first; the longest compute spans; how
long each rank waited, least first (the rank that waits least is the one the others wait for)."""
