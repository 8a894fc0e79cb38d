"""The record that stands at the head of a merged timeline: everything but its spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from megascan.errors import ConfigError, InputError
from megascan.header import LATEST_NS, Json, RankHeader, WindowRecord, layout_from_json
from megascan.reader.spans import in_order
from megascan.schema import SCHEMA_VERSION, TIMELINE_EVENT
from megascan.timeline import TIMELINE_SCHEMA, ClockFit, Completeness, Timeline, numbers
from megascan.topology import Layout
from megascan.typed import checked, shown

AGAIN = "write it again with megascan aggregate"


@dataclass(frozen=True, kw_only=True)
class MergedRecord:
    """A timeline before its spans are there; `num_spans` None in files that do not say it."""

    run_id: str
    layout: Layout
    headers: Mapping[int, RankHeader]
    clocks: Mapping[int, ClockFit]
    windows: Mapping[int, tuple[WindowRecord, ...]]
    clock_method: str
    origin_ns: int
    completeness: Completeness
    num_spans: int | None

    def timeline(self, spans: Sequence[pa.Table], path: Path) -> Timeline:
        """With its spans; InputError when there are none, fewer or more than were written."""
        table = pa.concat_tables(spans) if spans else TIMELINE_SCHEMA.empty_table()
        if self.num_spans is not None and table.num_rows != self.num_spans:
            raise InputError(
                f"{path} was written with {self.num_spans:,} spans and holds {table.num_rows:,}: "
                f"it is damaged; {AGAIN}"
            )
        if not table.num_rows:
            raise InputError(f"{path} holds no spans; {AGAIN}")
        self._check_ranks(table, path)
        return Timeline(
            run_id=self.run_id,
            layout=self.layout,
            headers=self.headers,
            spans=in_order(table.unify_dictionaries()),
            windows=self.windows,
            clocks=self.clocks,
            clock_method=self.clock_method,
            origin_ns=self.origin_ns,
            completeness=self.completeness,
        )

    def _check_ranks(self, table: pa.Table, path: Path) -> None:
        """Spans and headers are of ranks that the layout has."""
        highest = max([int(numbers(table, "rank").max(initial=0)), *self.headers, *self.clocks])
        if highest >= self.layout.world_size:
            raise InputError(
                f"{path} speaks of rank {highest} in a world of {self.layout.world_size} ranks: it "
                f"is damaged; {AGAIN}"
            )


def merged_record(found: object, path: Path) -> MergedRecord:
    """Decode what was found in its place. Raises InputError for a newer schema, and for damage."""
    record: Mapping[str, Any] = found if isinstance(found, dict) else {}
    version = record.get("schema")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise InputError(
            f"{path}: timeline of schema {shown(version)}, this MegaScan reads up to "
            f"{SCHEMA_VERSION}; "
            "update MegaScan"
        )
    try:
        return _decoded(record, str(path))
    except (
        KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, ConfigError,
    ) as error:  # fmt: skip
        raise InputError(
            f"{path}: damaged {TIMELINE_EVENT} event ({error!s:.200}); {AGAIN}"
        ) from error


def _decoded(record: Mapping[str, Any], where: str) -> MergedRecord:
    headers = [RankHeader.from_json(_whole(item, record), where) for item in record["headers"]]
    num_spans, origin_ns = record.get("num_spans"), int(record["origin_ns"])
    if not 0 <= origin_ns < LATEST_NS:
        raise ValueError(f"origin_ns is {shown(origin_ns)}, expected unix time")
    return MergedRecord(
        run_id=str(record["run_id"]),
        layout=layout_from_json(record["layout"]),
        headers={header.rank: header for header in headers},
        clocks={
            int(item["rank"]): checked(ClockFit(**{"error_ns": item["residual_p99_ns"], **item}))
            for item in record["clocks"]
        },
        windows={
            int(rank): tuple(WindowRecord.from_json(item, where) for item in items)
            for rank, items in record["windows"].items()
        },
        clock_method=str(record["clock_method"]),
        origin_ns=origin_ns,
        completeness=_completeness(record["completeness"]),
        num_spans=None if num_spans is None else int(num_spans),
    )


def _whole(header: Mapping[str, Json], record: Mapping[str, Any]) -> dict[str, Any]:
    """A header with what stands once for all ranks (older files repeat it in each)."""
    whole: dict[str, Any] = {**record.get("common_header", {}), **header}
    if isinstance(whole["groups"], list):
        whole["groups"] = {name: record["groups"][name] for name in whole["groups"]}
    return whole


def _completeness(record: Mapping[str, Json]) -> Completeness:
    fields = cast("dict[str, Any]", dict(record))
    for name in ("ranks", "missing_ranks", "notes"):
        fields[name] = tuple(fields.get(name, ()))
    return checked(Completeness(**fields))
