"""Read PyTorch's flight-recorder dumps: which collective each rank stood in when they were made.

A dump is the pickle that `torch._C._distributed_c10d._dump_fr_trace` (or `_dump_nccl_trace`)
returns, or its JSON form. Each rank has a file whose name ends with the rank (`nccl_trace_rank_3`):

    entries        process_group (name, description), collective_seq_id, profiling_name, state,
                   time_created_ns, retired (its end was seen)
    pg_status      by group: last enqueued, started, completed collective

A rank stands in its oldest entry that has not ended; if all entries have ended, it is outside of
any collective, and its newest entry says how far it came. A pickle can name any code to run, and
anybody may write to a trace folder: only plain values are read, everything else is refused.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import orjson

from megascan.errors import InputError
from megascan.header import Json

DUMP_PATTERN = "*_rank_*"
_RANK = re.compile(r"_rank_(\d+)(?:\.\w+)?$")
_MOST_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where one rank stood: in a collective (`is_inside`), or after its last collective."""

    rank: int
    is_inside: bool
    operation: str = ""
    """PyTorch's name of the operation: "nccl:all_reduce"; "" if the rank recorded nothing."""
    group: str = ""
    sequence: int = 0
    """Number of the collective (or message) in its group."""
    created_unix_ns: int = 0

    @property
    def words(self) -> str:
        """Return the place as "in nccl:all_reduce 57 of group tp", or the last collective."""
        if not self.operation:
            return "no collective recorded"
        what = f"{self.operation} {self.sequence} of group {self.group}"
        return f"in {what}" if self.is_inside else f"in none, the last was {what}"

    def to_json(self) -> dict[str, Json]:
        """Return the standing for payloads."""
        return cast("dict[str, Json]", asdict(self))


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def read_dump(path: Path) -> Mapping[str, Any]:
    """Read a dump. Raises InputError if the file is not a dump."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} is larger than a flight-recorder dump; move it away")
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        is_json = content.lstrip()[:1] == b"{"
        found = orjson.loads(content) if is_json else _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle raises anything
        raise InputError(
            f"{path} is no flight-recorder dump ({error}); move it away or dump again"
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("entries", []), list):
        raise InputError(f"{path} holds no entries of a flight recorder; move it away")
    return found


def standing_of(rank: int, dump: Mapping[str, Any]) -> Standing:
    """Return where a rank stood. Raises InputError for damaged entries."""
    entries = dump.get("entries", [])
    try:
        begun = [entry for entry in entries if not _has_ended(entry)]
        if not entries:
            return Standing(rank=rank, is_inside=False)
        entry = begun[0] if begun else entries[-1]
        name, description = entry["process_group"]
        is_p2p = bool(entry.get("is_p2p", False))
        return Standing(
            rank=rank,
            is_inside=bool(begun),
            operation=str(entry["profiling_name"]),
            group=str(description if description not in ("", "undefined") else name),
            sequence=int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
            created_unix_ns=int(entry.get("time_created_ns") or 0),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"the flight-recorder dump of rank {rank} is damaged ({error!r}); dump again"
        ) from error


def _has_ended(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def read_standings(folders: Sequence[Path]) -> Iterator[Standing]:
    """Yield where ranks stood, from all dumps in the folders; skip files that are no dumps."""
    for folder in folders:
        for path in sorted(folder.glob(DUMP_PATTERN)):
            match = _RANK.search(path.name)
            if match is None or not path.is_file():
                continue
            try:
                yield standing_of(int(match[1]), read_dump(path))
            except InputError:
                continue
