"""PyTorch profiler (Kineto) JSON, a file a rank: kernels, or operators where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megascan.errors import InputError
from megascan.header import ClockOrigin, Device, RankHeader, TraceSettings, WindowRecord
from megascan.pipeline import Spread, across_threads
from megascan.reader.kineto_comms import ProcessGroup
from megascan.reader.kineto_events import Profile, read_profile
from megascan.reader.kineto_spans import Profiled, profiled_spans
from megascan.reader.segments import Packed, Segment
from megascan.schema import Granularity
from megascan.topology import Layout

RUN_ID = "kineto"


def read_kineto(paths: Sequence[Path], spread: Spread = across_threads) -> list[Segment]:
    """Every rank's profile as a segment of one run.

    Iteration is the number of `ProfilerStep#N` plus one, or 1 throughout without such marks.
    Parallel sizes come from the descriptions of Megatron's process groups; without them all ranks
    count as data parallel. Raises InputError for damaged files and ones that do not say their rank.
    """
    profiles = list(spread(read_profile, paths))
    layout = _layout(profiles)
    place = partial(_segment, layout=layout)
    return [segment for part in spread(place, profiles) for segment in part.segments]


def _layout(profiles: Sequence[Profile]) -> Layout:
    said = {profile.world_size for profile in profiles if profile.world_size}
    if len(said) > 1:
        raise InputError(
            f"{profiles[0].path.parent}: profiles of world sizes {sorted(said)} are mixed; put "
            "each job into a folder of its own"
        )
    world_size = said.pop() if said else 1 + max(profile.rank for profile in profiles)
    tp, cp, pp = (_largest(profiles, axis) for axis in ("tp", "cp", "pp"))
    if world_size % (tp * cp * pp):
        return Layout(dp=world_size)
    return Layout(tp=tp, cp=cp, pp=pp, dp=world_size // (tp * cp * pp))


def _largest(profiles: Sequence[Profile], axis: str) -> int:
    return max(
        len(group.ranks) if group.id.startswith(f"{axis}@") else 1
        for profile in profiles
        for group in (*profile.groups.values(), ProcessGroup("", ()))
    )


def _segment(profile: Profile, layout: Layout) -> Packed:
    profiled = profiled_spans(profile)
    header = _header(profile, profiled, layout)
    window = WindowRecord(
        run_id=RUN_ID,
        window=0,
        first_iteration=profiled.first_iteration,
        last_iteration=profiled.last_iteration,
        num_spans=profiled.spans.num_rows,
    )
    segment = Segment(
        path=profile.path,
        header=header,
        windows=(window,) if profiled.spans.num_rows else (),
        spans=profiled.spans,
        notes=(*profile.notes, *profiled.notes),
    )
    return Packed((segment,))


def _header(profile: Profile, profiled: Profiled, layout: Layout) -> RankHeader:
    if profile.rank >= layout.world_size:
        raise InputError(
            f"{profile.path}: rank {profile.rank} is outside a world of {layout.world_size} ranks; "
            "files of different jobs are mixed, put each job into a folder of its own"
        )
    return RankHeader(
        run_id=RUN_ID,
        rank=profile.rank,
        world_size=layout.world_size,
        layout=layout,
        coordinates=layout.coordinates(profile.rank),
        groups=profiled.groups,
        host=profile.host,
        process_id=0,
        device=Device(
            kind="cuda" if profiled.on_gpu else "cpu",
            name=profile.device,
            index=0,
        ),
        backend=profile.backend,
        clock=ClockOrigin(
            domain=f"{profile.host} rank {profile.rank}".strip(),
            source="PyTorch profiler",
            origin_unix_ns=profile.origin_unix_ns,
        ),
        trace=TraceSettings(granularity=Granularity.FULL, interval=1, window=1),
    )
