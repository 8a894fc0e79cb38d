"""Read all profiles of a job as segments of one run: the rank of each, and the job's layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
import pyarrow as pa

from megascan.errors import ConfigError, InputError
from megascan.header import ClockOrigin, Device, RankHeader, WindowRecord, foreign_header
from megascan.parallel import Here, Workers
from megascan.reader.kineto.conversion import Profiled, profiled_spans
from megascan.reader.kineto.document import ProcessGroup, Profile, read_profile
from megascan.reader.segments import Packed, Segment
from megascan.schema import Granularity, Kind
from megascan.timeline import codes, equals, numbers
from megascan.topology import DEFAULT_ORDER, Layout
from megascan.vocabulary import axis_of_group, group_id

_AXES = ("tp", "cp", "pp")
"""Axes whose sizes the descriptions of process groups tell; the rest is data parallel."""

_REDUCTIONS = "all_reduce", "reduce", "reduce_scatter", "all_gather"
_LEAST_GRADIENT_BYTES = 1 << 16
"""Least size of reduced or gathered gradients; losses, norms and counts of tokens are smaller."""

RUN_ID = "kineto"


def read_kineto(paths: Sequence[Path], workers: Workers | None = None) -> list[Segment]:
    """Read every rank's profiles as a segment of one run.

    The iteration is the number of `ProfilerStep#N` plus one, or is found (`steps.py`). Parallel
    sizes come from the descriptions of Megatron's process groups and of device meshes, and from
    which ranks send to which; without these all ranks count as data parallel. A single file that
    does not say its rank is rank 0.

    Raises InputError for damaged files, and for files of a folder that do not say their rank.
    """
    workers = workers or Here()
    profiles = _with_ranks(list(workers.results(read_profile, ((path,) for path in paths))))
    world_size = _world_size(profiles)
    parts = workers.results(
        partial(_segment, world_size=world_size), ((profile,) for profile in profiles)
    )
    segments = [segment for part in parts for segment in part.segments]
    layout = _layout(profiles, world_size, segments)
    return _joined([_placed(segment, layout) for segment in segments])


def _placed(segment: Segment, layout: Layout) -> Segment:
    header = segment.header
    place = replace(header, layout=layout, coordinates=layout.coordinates(header.rank))
    return replace(segment, header=place)


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Join the profiles of a rank whose schedule repeats: each profile is a window of one run.

    Profiles whose iterations overlap are of different runs, and are not joined.
    """
    by_rank: dict[int, Segment] = {}
    apart: list[Segment] = []
    for segment in sorted(segments, key=_first_iteration):
        earlier = by_rank.setdefault(segment.header.rank, segment)
        if earlier is segment:
            continue
        if earlier.windows and earlier.windows[-1].last_iteration >= _first_iteration(segment):
            apart.append(segment)
            continue
        windows = (*earlier.windows, *segment.windows)
        by_rank[segment.header.rank] = replace(
            earlier,
            windows=tuple(replace(one, window=number) for number, one in enumerate(windows)),
            spans=pa.concat_tables([earlier.spans, segment.spans]).unify_dictionaries(),
            notes=(*earlier.notes, *segment.notes),
        )
    return [*by_rank.values(), *apart]


def _first_iteration(segment: Segment) -> int:
    return min((window.first_iteration for window in segment.windows), default=0)


def _with_ranks(profiles: list[Profile]) -> list[Profile]:
    unknown = [profile for profile in profiles if profile.rank < 0]
    if not unknown:
        return profiles
    size = unknown[0].world_size
    if len(profiles) > 1:
        reason = (
            f"its distributedInfo only says that there are {size}"
            if size
            else "no distributedInfo: the profiler ran before init_process_group"
        )
        raise InputError(
            f"{unknown[0].path} does not say its rank ({reason}); put it into the file's name, as "
            "in rank3.json"
        )
    taken = f"rank 0 of {size}" if size else "a job of one process"
    note = f"{unknown[0].path.name} does not say its rank: it is taken for {taken}"
    return [replace(unknown[0], rank=0, notes=(*unknown[0].notes, note))]


def _world_size(profiles: Sequence[Profile]) -> int:
    said = {profile.world_size for profile in profiles if profile.world_size}
    if len(said) > 1:
        raise InputError(
            f"{profiles[0].path.parent}: profiles of world sizes {sorted(said)} are mixed; put "
            "each job into a folder of its own"
        )
    return said.pop() if said else 1 + max(profile.rank for profile in profiles)


def _layout(profiles: Sequence[Profile], world_size: int, segments: Sequence[Segment]) -> Layout:
    groups = {
        group.id: group
        for profile in profiles
        for group in profile.groups.values()
        if axis_of_group(group.id) in (*_AXES, "ep", "expt_tp")
    }
    sends = any(equals(segment.spans, "kind", Kind.P2P).any() for segment in segments)
    if not sends:  # pipelines that the job does not use
        groups = {id: group for id, group in groups.items() if axis_of_group(id) != "pp"}
    if not groups:
        groups = {group.id: group for group in pipelines_of(segments, world_size)}
    sizes = {axis: _largest(groups.values(), axis) for axis in _AXES}
    num_replicas, rest = divmod(world_size, sizes["tp"] * sizes["cp"] * sizes["pp"])
    if rest:
        return Layout(dp=world_size)
    dense = Layout(tp=sizes["tp"], cp=sizes["cp"], pp=sizes["pp"], dp=num_replicas)
    experts, inside = _largest(groups.values(), "ep"), _largest(groups.values(), "expt_tp")
    try:
        return _ordered(replace(dense, ep=experts, etp=inside), list(groups.values()))
    except ConfigError:  # the grid of experts does not fit in a stage
        return _ordered(dense, list(groups.values()))


def pipelines_of(segments: Sequence[Segment], world_size: int) -> list[ProcessGroup]:
    """Return the pipelines of a job whose groups do not name them, by which ranks send to which.

    Stages send to their neighbours (the last to the first where stages are interleaved) and reduce
    next to nothing between them; ranks that exchange parts of a sequence in a ring reduce gradients
    as well. Nothing is returned unless every rank is in a pipeline, all pipelines are equally long,
    and nothing large is reduced between two stages.

        0 <-> 1, 2 <-> 3, gradients reduced by {0, 2} and {1, 3}      pipelines {0, 1} and {2, 3}
    """
    whose = {rank: {rank} for rank in range(world_size)}
    pairs = {(segment.header.rank, peer) for segment in segments for peer in _partners(segment)}
    for rank, peer in pairs:
        if peer >= world_size:
            return []
        both = whose[rank] | whose[peer]
        whose.update(dict.fromkeys(both, both))
    found = sorted({tuple(sorted(members)) for members in whose.values()})
    if len(found[0]) < 2 or len({len(members) for members in found}) > 1:
        return []
    place = {rank: number for members in found for number, rank in enumerate(members)}
    steps = {abs(place[rank] - place[peer]) for rank, peer in pairs}
    reduced = {ranks for segment in segments for ranks in _reducing(segment)}
    if not steps <= {1, len(found[0]) - 1} or any(
        len(set(ranks) & set(members)) > 1 for ranks in reduced for members in found
    ):
        return []
    return [ProcessGroup(group_id("pp", members), members) for members in found]


def _partners(segment: Segment) -> set[int]:
    """Return the ranks with which a segment's rank exchanges messages."""
    messages = equals(segment.spans, "kind", Kind.P2P)
    peers = numbers(segment.spans, "peer")[messages]
    return set(peers[peers >= 0].tolist())


def _reducing(segment: Segment) -> set[tuple[int, ...]]:
    """Return the members of the groups over which a segment's rank reduces or gathers more than a
    loss or a norm. An unknown group is taken for all ranks, an unknown size for large.
    """
    spans, header = segment.spans, segment.header
    large = equals(spans, "kind", Kind.COLLECTIVE) & equals(spans, "op", *_REDUCTIONS)
    size = numbers(spans, "size_bytes")
    code, names = codes(spans, "group")
    large &= (size < 0) | (size >= _LEAST_GRADIENT_BYTES)
    everybody = tuple(range(header.world_size))
    return {header.groups.get(names[one], everybody) for one in np.unique(code[large])}


def _largest(groups: Iterable[ProcessGroup], axis: str) -> int:
    return max([len(one.ranks) for one in groups if axis_of_group(one.id) == axis], default=1)


def _ordered(layout: Layout, groups: Sequence[ProcessGroup]) -> Layout:
    """Return the layout in an order of axes that fits the groups' members, Megatron's first."""
    for axes in permutations(DEFAULT_ORDER.split("-")):
        ordered = replace(layout, order="-".join(axes))
        if all(
            ordered.group(group.ranks[0], axis_of_group(group.id)) == group.ranks
            for group in groups
            if axis_of_group(group.id) in _AXES and group.ranks[0] < layout.world_size
        ):
            return ordered
    return layout


def _segment(profile: Profile, world_size: int) -> Packed:
    profiled = profiled_spans(profile)
    header = _run_header(profile, profiled, Layout(dp=world_size))
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


def _run_header(profile: Profile, profiled: Profiled, layout: Layout) -> RankHeader:
    if profile.rank >= layout.world_size:
        raise InputError(
            f"{profile.path}: rank {profile.rank} is outside a world of {layout.world_size} ranks; "
            "files of different jobs are mixed, put each job into a folder of its own"
        )
    kind = "cuda" if profiled.on_gpu else "cpu"
    clock = ClockOrigin(
        domain=f"{profile.host} rank {profile.rank}".strip(),
        source="PyTorch profiler",
        origin_unix_ns=profile.origin_unix_ns,
    )
    return foreign_header(
        RUN_ID,
        profile.rank,
        layout,
        Device(kind=kind, name=profile.device, index=profile.device_index),
        clock,
        granularity=Granularity.FULL,
        groups=profiled.groups,
        host=profile.host,
        backend=profile.backend,
        trainer=profiled.trainer,
    )
