"""Read and check ``--inject-fault rank=3,kind=compute,factor=1.5,from=20,to=60``.

`write_planted_faults` writes which faults were planted to a file, to check verdicts by; no analysis
reads the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megascan.errors import ConfigError, OutputError
from megascan.header import Json
from megascan.rankfile import write_ground_truth
from megascan.vocabulary import FaultKind
from training.arguments import Sizes


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """One fault of one rank.

    `factor` (above 1) says how many times as long things take; `delay_ms` adds a fixed time
    instead. `peer` restricts a link fault to the pair of `rank` and `peer`. The fault acts from
    `first_iteration` (counted from 1) to `last_iteration`, both included; None: to the end.
    """

    rank: int
    kind: FaultKind
    factor: float | None = None
    delay_ms: float | None = None
    peer: int | None = None
    first_iteration: int = 1
    last_iteration: int | None = None

    def acts_in(self, iteration: int) -> bool:
        """Return whether the fault acts in an iteration."""
        last = math.inf if self.last_iteration is None else self.last_iteration
        return self.first_iteration <= iteration <= last

    @property
    def excess(self) -> float:
        """Return the extra time as a multiple of the normal time."""
        return 0.0 if self.factor is None else self.factor - 1.0


_KEYS = ("rank", "kind", "factor", "delay", "peer", "from", "to")
_DELAYED_KINDS = (FaultKind.LINK, FaultKind.LOADER, FaultKind.GC)


def parse_faults(texts: Sequence[str], sizes: Sizes) -> tuple[FaultSpec, ...]:
    """Read the faults of a job and check them against its sizes; ConfigError for a bad fault."""
    faults = tuple(parse_fault(text) for text in texts)
    for text, fault in zip(texts, faults, strict=True):
        _check(text, fault, sizes)
    return faults


def parse_fault(text: str) -> FaultSpec:
    """Read one fault; ConfigError, one sentence, for a bad fault."""
    values = _split(text)
    for key in ("rank", "kind"):
        if key not in values:
            raise _error(text, f"{key}= is missing")
    if values["kind"] not in list(FaultKind):
        known = ", ".join(FaultKind)
        raise _error(text, f"kind {values['kind']!r} is unknown, expected one of {known}")
    fault = FaultSpec(
        rank=_whole(text, values, "rank", minimum=0),
        kind=FaultKind(values["kind"]),
        factor=_number(text, values, "factor"),
        delay_ms=_number(text, values, "delay"),
        peer=_whole(text, values, "peer", minimum=0) if "peer" in values else None,
        first_iteration=_whole(text, values, "from", minimum=1) if "from" in values else 1,
        last_iteration=_whole(text, values, "to", minimum=1) if "to" in values else None,
    )
    _check_alone(text, fault)
    return fault


def _split(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or key not in _KEYS:
            raise _error(text, f"cannot read {part.strip()!r}, expected {'=, '.join(_KEYS)}=")
        if key in values:
            raise _error(text, f"{key}= is given twice")
        values[key] = value
    return values


def _number(text: str, values: dict[str, str], key: str) -> float | None:
    if key not in values:
        return None
    try:
        number = float(values[key])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _error(text, f"{key} is {values[key]!r}, expected a number")
    return number


def _whole(text: str, values: dict[str, str], key: str, *, minimum: int) -> int:
    value = values[key]
    if not value.isdecimal() or int(value) < minimum:
        raise _error(text, f"{key} is {value!r}, expected a whole number from {minimum}")
    return int(value)


def _check_alone(text: str, fault: FaultSpec) -> None:
    if (fault.factor is None) == (fault.delay_ms is None):
        raise _error(text, "expected either factor= or delay= (milliseconds)")
    if fault.factor is not None and fault.factor <= 1:
        raise _error(text, f"factor is {fault.factor:g}, expected more than 1")
    if fault.delay_ms is not None and fault.delay_ms <= 0:
        raise _error(text, f"delay is {fault.delay_ms:g}, expected more than 0 milliseconds")
    if fault.delay_ms is not None and fault.kind not in _DELAYED_KINDS:
        raise _error(text, f"kind {fault.kind} takes factor=, not delay=")
    if fault.peer is not None and fault.kind is not FaultKind.LINK:
        raise _error(text, "peer= belongs to kind=link")
    if fault.peer == fault.rank:
        raise _error(text, "rank and peer are the same")
    if fault.last_iteration is not None and fault.last_iteration < fault.first_iteration:
        raise _error(text, f"to={fault.last_iteration} is before from={fault.first_iteration}")


def _check(text: str, fault: FaultSpec, sizes: Sizes) -> None:
    for name, rank in (("rank", fault.rank), ("peer", fault.peer)):
        if rank is not None and rank >= sizes.world_size:
            raise _error(text, f"{name} {rank} is not one of the {sizes.world_size} ranks")
    if fault.first_iteration > sizes.train_iters:
        raise _error(
            text,
            f"from={fault.first_iteration} is after the last of {sizes.train_iters} iterations",
        )
    if fault.kind is FaultKind.LOADER and fault.rank not in loading_ranks(sizes):
        ranks = ", ".join(map(str, loading_ranks(sizes)))
        raise _error(text, f"rank {fault.rank} loads no data, only these do: {ranks}")


def loading_ranks(sizes: Sizes) -> list[int]:
    """Return the ranks that load data: the first of each TP group, on first and last stage.

    Ranks are numbered as Megatron-Core does by default: tensor parallel innermost, pipeline
    outermost.
    """
    per_stage = sizes.world_size // sizes.pipeline_size
    stages = {0, sizes.pipeline_size - 1}
    return [
        rank
        for rank in range(sizes.world_size)
        if rank % sizes.tensor_size == 0 and rank // per_stage in stages
    ]


def _error(text: str, what: str) -> ConfigError:
    example = "rank=3,kind=compute,factor=1.5,from=20,to=60"
    return ConfigError(f"--inject-fault {text}: {what} (an example: {example})")


def write_planted_faults(
    folder: Path, run_id: str | None, world_size: int, faults: Sequence[FaultSpec]
) -> Path:
    """Write ``ground-truth.json`` next to the rank files; set an earlier run's file aside.

    The file is written without faults too, so that an earlier run's file is never taken for this
    run's. Raises OutputError when the folder cannot be written.
    """
    truth: dict[str, Json] = {
        "schema": 1,
        "run_id": run_id,
        "world_size": world_size,
        "faults": [_record(fault) for fault in faults],
    }
    try:
        return write_ground_truth(truth, folder)
    except OutputError as error:
        raise OutputError(f"{error}; give another --trace-dir") from error


def _record(fault: FaultSpec) -> dict[str, Json]:
    """Return one fault for JSON; fields that do not apply are left out."""
    values: dict[str, Json] = {
        "rank": fault.rank,
        "kind": str(fault.kind),
        "factor": fault.factor,
        "delay_ms": fault.delay_ms,
        "peer": fault.peer,
        "first_iteration": fault.first_iteration,
        "last_iteration": fault.last_iteration,
    }
    return {name: value for name, value in values.items() if value is not None}
