"""Timeline to observations: which spans count as what.

passes (forward, backward)   work, busy_ns; what they take beyond their modules is stalled_ns
transformer layers           layers
optimizer                    optimizer_ns, busy_ns
data, garbage collection     lost_ns[LOADER], lost_ns[GC]
no span at all               host_gap_ns
matched communication        transfers, lost_ns[LINK], waiting_ns, split_wait_ns, beside_ns
kernels of a profile         all of the above that passes would tell (detect.observe.kernels)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from detect.observe.facts import Cells, Facts, facts_in, facts_of, joined
from detect.observe.launches import launch_pace
from detect.observe.machines import (
    CLOCK_NAME,
    DRAM_NAME,
    TENSOR_NAME,
    Carried,
    WorkDone,
    typical_readings,
)
from detect.observe.members import Members, are_guessed, hosts_of, place_of
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, Tokenwise, Work
from detect.observe.spans import Frame, Glance, SpanIndex, known_or_none, sums_by_cell
from detect.observe.stalls import Collections, stalled_time, within_stalls
from detect.observe.transfers import Transfers, hidden_axes, transfers_of
from detect.observe.work import (
    OwnTimes,
    Samples,
    as_whole_passes,
    hide_waiting,
    layers_of,
    outside_waits,
    own_times,
    pass_times,
    stretches_of,
    work_of,
)
from detect.report import Cause, ClockAgreement
from detect.stats import robust
from detect.thresholds.observing import PASSES
from detect.whatif.marks import replayed_spans
from detect.whatif.savings import ReplayedCosts
from detect.whatif.traced import replay_of_timeline
from megascan.arrays import Floats, Integers, combine
from megascan.header import RESTARTING_CLOCK, Trainer, WindowRecord
from megascan.schema import Granularity
from megascan.timeline import ShardedTimeline, Timeline

GUESSED = (
    "the trace names no hosts: ranks whose device numbers count up from 0 are taken for one host, "
    "#0 for the first"
)


def observe(timeline: Timeline | ShardedTimeline) -> Observations:
    """Return everything the detector needs from a timeline.

    Spans that stay in shards are looked at where they are; only traces without passes, of which
    whole ranks are compared span by span, are put together first.
    """
    if isinstance(timeline, Timeline):
        return _observe_whole(timeline)
    spans = [(shard.spans,) for shard in timeline.shards]
    frame = Frame.of(timeline.frame, list(timeline.workers.results(Glance.at, spans)))
    if not frame.has_passes:
        return _observe_whole(timeline.whole())
    tasks = [(frame.only(ranks), *kept) for ranks, kept in timeline.by_ranks()]
    under_way = timeline.workers.results(facts_in, tasks)
    transfers = transfers_of(SpanIndex(timeline.ends, frame), timeline.frame)
    facts = joined(list(under_way), frame.ranks)
    # only the spans that a replay needs leave their shards, if any cost is asked for
    costs = ReplayedCosts(lambda: replay_of_timeline(timeline.whole(replayed_spans)))
    return _observations(timeline.frame, frame, facts, transfers, costs)


def _observe_whole(timeline: Timeline) -> Observations:
    index = SpanIndex.of(timeline)
    transfers = transfers_of(index, timeline)
    facts = joined([facts_of(index)], index.ranks)
    costs = ReplayedCosts(partial(replay_of_timeline, timeline))
    seen = _observations(timeline, index.frame, facts, transfers, costs)
    if index.frame.has_passes:
        return seen
    from detect.observe.kernels import is_profile, with_kernels  # where no passes are marked

    return with_kernels(seen, index) if is_profile(index) else _without_passes(seen, index)


def _observations(
    timeline: Timeline,
    frame: Frame,
    facts: Facts,
    transfers: Transfers | None,
    costs: ReplayedCosts,
) -> Observations:
    """Compare what is known of each rank; of `timeline` no spans are needed."""
    members = _members(timeline, frame.ranks)
    passes = _Passes.of(facts, frame, members, transfers)
    samples, cells = passes.samples, facts.cells
    stalled, stolen = samples.sums(passes.stalled_ns, frame.shape), _stolen(facts, frame, passes)
    gap_ns = cells.gap_ns + _own_ending(cells.ending_ns, members)
    are_alike = _has_equal_layers(timeline)
    seen = Observations(
        members=members,
        iterations=frame.iterations,
        iteration_ns=facts.longest_ns if frame.has_iterations else facts.end_ns - facts.begin_ns,
        work=work_of(samples, passes.work_ns, frame.shape, facts.passes.reduces),
        layers=None
        if passes.wait_inside or _stages_have_unlike_layers(timeline)
        else layers_of(facts.layers, members.stage, frame.shape, are_alike=are_alike),
        busy_ns=samples.sums(passes.busy_ns, frame.shape) + np.nan_to_num(cells.optimizer_ns),
        optimizer_ns=cells.optimizer_ns,
        attention_ns=cells.attention_ns,
        lost_ns=_lost_by_cause(
            cells, passes.collecting_ns, gap_ns + stalled + stolen, timeline, transfers
        ),
        host_gap_ns=gap_ns,
        ending_ns=cells.ending_ns,
        stalled_ns=stalled,
        stolen_ns=stolen,
        saving_ns=cells.saving_ns,
        unsplit_ns=cells.unsplit_ns,
        loading_ns=cells.loading_ns,
        entangled_phases=passes.entangled_phases,
        hides_waiting=passes.hide_waiting,
        waits_between_layers=passes.wait_between,
        mixes_communication=frame.uses_cpu_time and _hides_model_parallel(timeline),
        # by CPU time they are told apart, too: a process that waits uses none
        splits_tensor_groups=frame.uses_cpu_time or not _hides_model_parallel(timeline),
        transfers=transfers,
        has_equal_layers=are_alike,
        alignment=_alignment(timeline),
        completeness=timeline.completeness.to_json(),
        notes=(*timeline.completeness.notes, *[GUESSED] * are_guessed(timeline.headers)),
        costs=None if passes.hide_marks else costs,
    )
    return _with_what_some_tell(_as_windows_say(seen, timeline), frame, facts)


def _as_windows_say(seen: Observations, timeline: Timeline) -> Observations:
    """Return observations with what the records of windows say of each rank."""
    tokens = _tokens(timeline)
    return replace(
        seen,
        has_even_data=_has_even_data(timeline, tokens),
        tokens=tokens,
        counters=typical_readings(timeline),
        work_done=_work_done(timeline),
        core_waits=_by_iteration(timeline, lambda window: window.core_waits),
        other_threads=_by_iteration(timeline, lambda window: window.other_threads),
        page_reads=_by_iteration(timeline, lambda window: window.page_reads),
        pressure=_pressure(timeline),
        carried=tuple(_carried(timeline)),
    )


def _with_what_some_tell(seen: Observations, frame: Frame, facts: Facts) -> Observations:
    """Add what only some traces tell: with split communication, of GPU runs, of launches."""
    cells, launches = facts.cells, facts.launches
    if facts.is_split:
        seen = replace(
            seen,
            waiting_ns=cells.waiting_ns,
            split_wait_ns=cells.split_wait_ns,
            beside_ns=cells.beside_ns,
        )
    if not frame.is_cpu:
        seen = replace(
            seen,
            tokenwise=Tokenwise(dense_ns=cells.dense_ns, lookups_ns=cells.lookups_ns),
            modules_ns=cells.modules_ns,
            slow_runs=facts.slow_runs,
            exchanged_bytes=known_or_none(cells.exchanged_bytes),
            starved_share=known_or_none(cells.starved_share),
        )
    if launches is None:
        return seen
    return replace(
        seen,
        launch_pace=launch_pace(launches.log_ns),
        held_pace=launch_pace(launches.log_held_ns),
        stopped_ns=launches.stopped_ns,
        launching_ns=launches.launching_ns,
        launching_first_ns=launches.launching_first_ns,
        launching_step_ns=launches.launching_step_ns,
        pauses=launches.pauses,
    )


@dataclass(frozen=True)
class _Passes:
    """Forward and backward passes (layers where none are marked), (pass,) each, and their times."""

    samples: Samples
    busy_ns: Floats
    """Own times minus loading and stalls."""
    work_ns: Floats
    """Times to compare: `busy_ns` minus waiting for others; NaN where a pass paused for long."""
    stalled_ns: Floats
    """What neither collections nor communication beside the pass explain: a late host does."""
    entangled_phases: tuple[int, ...]
    hide_waiting: bool
    wait_between: bool
    """Whether passes wait between their layers for parameters that are sharded."""
    wait_inside: bool
    """Whether passes wait inside their layers for ranks along an axis that nobody recorded."""
    hide_marks: bool
    """Whether passes wait inside their modules, unseen, or between layers of which only some were
    recorded: a replay of the spans takes such waiting for work."""
    collecting_ns: Floats
    """(rank, iteration): time lost to garbage collection."""

    @classmethod
    def of(
        cls, facts: Facts, frame: Frame, members: Members, transfers: Transfers | None
    ) -> _Passes:
        """Tell work from waiting."""
        passes, phase = facts.passes, facts.passes.samples.phase
        time_ns, is_sharded = pass_times(passes.time_ns, phase, passes.gathers)
        own = OwnTimes((), time_ns, time_ns)
        if not frame.uses_cpu_time:
            own = own_times(passes.entangled, phase, time_ns)
        stage = members.stage[passes.samples.row]
        collecting, still_ns = _standing_still(facts, frame, stage, time_ns, own.unwaited_ns)
        if frame.is_sampled and members.layout.ep > 1:
            still_ns = np.zeros_like(still_ns)  # layers in between may have had more tokens
        stalled_ns = np.maximum(still_ns - passes.beside_ns, 0.0)
        if passes.contents is not None:
            late_ns = passes.contents.late_ns
            late_ns = np.where(np.isfinite(late_ns), late_ns, 0.0)
            stalled_ns = np.where(is_sharded, late_ns, stalled_ns)
        inside_ns = np.where(is_sharded, 0.0, still_ns)  # only layers count in sharded passes
        is_paused = collecting.inside_ns > PASSES.max_pause_share * time_ns
        alone_ns = _alone(facts, frame, members, transfers, time_ns)
        is_told = np.isfinite(alone_ns)
        busy_ns = np.where(is_told, alone_ns, time_ns - inside_ns)
        work_ns = np.where(is_told, alone_ns, own.time_ns - inside_ns)
        return cls(
            samples=passes.samples,
            busy_ns=busy_ns,
            work_ns=np.where(is_paused, np.nan, work_ns),
            stalled_ns=stalled_ns,
            entangled_phases=own.phases,
            hide_waiting=not frame.uses_cpu_time and hide_waiting(phase, passes.gathers),
            wait_between=bool(is_sharded.any()),
            wait_inside=bool(is_told.any()),
            hide_marks=bool(is_told.any() or (frame.is_sampled and is_sharded.any())),
            collecting_ns=sums_by_cell(
                collecting.row, collecting.slot, collecting.lost_ns, frame.shape
            ),
        )


def _alone(
    facts: Facts, frame: Frame, members: Members, transfers: Transfers | None, time_ns: Floats
) -> Floats:
    """Return what passes take by themselves that wait inside for ranks along an axis of which
    nobody recorded it, (pass,) ns; NaN of other passes. `time_ns` is theirs with waiting.
    """
    passes, row, phase = facts.passes, facts.passes.samples.row, facts.passes.samples.phase
    nothing = np.full(len(time_ns), np.nan)
    if passes.parts is None or frame.uses_cpu_time:
        return nothing
    hidden = hidden_axes(members.layout, transfers)
    if not hidden:
        return nothing
    outside_ns = outside_waits(passes.parts, passes.entangled, phase, hidden)
    return as_whole_passes(outside_ns, time_ns, row, combine(members.stage[row], phase))


def _standing_still(
    facts: Facts, frame: Frame, stage: Integers, time_ns: Floats, unwaited_ns: Floats
) -> tuple[Collections, Floats]:
    """Return what collections of garbage cost, and how long each pass stood still besides, (pass,)
    ns: told by the modules inside the passes.

    All arguments are (pass,); `time_ns` with waiting, `unwaited_ns` without.
    """
    contents, collecting = facts.passes.contents, facts.collecting
    if contents is None:
        return collecting, np.zeros(len(time_ns))
    still = partial(stalled_time, contents, stage, time_ns)
    if frame.is_sampled:
        collecting = within_stalls(collecting, still(unwaited_ns, 0.0))
    return collecting, still(unwaited_ns - collecting.inside_ns)


def _without_passes(seen: Observations, index: SpanIndex) -> Observations:
    """Return what can be said without passes: of layers, or of what lies between communications."""
    work, busy_ns, compared = seen.work, seen.busy_ns, "what ranks compute cannot be compared"
    stretches = None
    if np.isfinite(work.log_ns).any():
        busy_ns, compared = _with_backward_layers(seen), "transformer layers are compared"
    elif seen.members.layout.pp == 1:
        stretches = stretches_of(index)
    if stretches is not None:
        work, compared = stretches, "what lies between communications is compared"
        busy_ns = busy_ns + _by_typical_microbatch(stretches)
    if Cause.GC in seen.lost_ns:
        work = _without_collections(work, seen.lost_ns[Cause.GC], seen.iteration_ns)
    return replace(
        seen,
        work=work,
        busy_ns=busy_ns,
        holds_tensor_waits=stretches is not None,
        # what lies outside of spans is mostly computing
        lost_ns={cause: lost for cause, lost in seen.lost_ns.items() if cause != Cause.HOST},
        notes=(*seen.notes, f"no forward and backward passes were traced: {compared}"),
    )


def _by_typical_microbatch(stretches: Work) -> Floats:
    """Return the time of all stretches, (row, iteration), if every microbatch took the median.

    The last backward pass may hold waiting for other replicas' gradients. Example: three
    microbatches of 34 ms and one that waits for 20 ms more make 136 ms.
    """
    time_ns, numbers = np.exp(stretches.log_ns), np.unique(stretches.microbatch)
    by_number = [time_ns[:, :, stretches.microbatch == one].sum(axis=2) for one in numbers]
    return len(numbers) * robust.median(np.stack(by_number), axis=0)


def _with_backward_layers(seen: Observations) -> Floats:
    """Return the time of compute, (row, iteration), with backward layers that nobody recorded.

    The original MegaScan traces layers in forward passes only. Backward ones take twice as long
    (gradients of inputs and of weights). Example: layers of 20 ms and an optimizer step of 8 ms
    make 68 ms.
    """
    is_backward = seen.work.phase == BACKWARD
    if np.isfinite(seen.work.log_ns[:, :, is_backward]).any():
        return seen.busy_ns
    optimizer_ns = np.nan_to_num(seen.optimizer_ns)
    layers_ns = seen.busy_ns - optimizer_ns
    return (1.0 + PASSES.backward_ratio) * layers_ns + optimizer_ns


def _without_collections(work: Work, collecting_ns: Floats, iteration_ns: Floats) -> Work:
    """Leave iterations out in which some rank collected garbage, where enough others are left.

    Without passes nobody tells what a stretch of computing holds: others may wait in it, where no
    communication is recorded, for the rank that collects.
    """
    hit = (collecting_ns > PASSES.max_pause_share * iteration_ns).any(axis=0)
    if not hit.any() or float(hit.mean()) > PASSES.max_collected_share:
        return work
    log_ns = work.log_ns.copy()
    log_ns[:, hit] = np.nan
    return replace(work, log_ns=log_ns)


def _lost_by_cause(
    cells: Cells,
    collecting_ns: Floats,
    host_ns: Floats,
    timeline: Timeline,
    transfers: Transfers | None,
) -> dict[Cause, Floats]:
    """Return the lost times that this trace can tell about; NaN where a rank recorded nothing of an
    iteration, so that nobody knows what it lost.
    """
    told = {Cause.LOADER: cells.loading_cost_ns, Cause.GC: collecting_ns, Cause.HOST: host_ns}
    if not _tells_collections(timeline):
        del told[Cause.GC]
    told = {cause: time_ns for cause, time_ns in told.items() if np.isfinite(time_ns).any()}
    if transfers is not None:
        told[Cause.LINK] = transfers.late_ns
    is_absent = cells.num_spans == 0
    return {cause: np.where(is_absent, np.nan, time_ns) for cause, time_ns in told.items()}


def _own_ending(ending_ns: Floats, members: Members) -> Floats:
    """Return how long a rank does something at the end of iterations, (rank,
    iteration), beyond what most do there: what lies between two parts of a profile is everybody's.
    0 of ranks that log for all.
    """
    return np.where(~members.log_for_all[:, None], robust.beyond_most(ending_ns), 0.0)


def _stolen(facts: Facts, frame: Frame, passes: _Passes) -> Floats:
    """Return wall minus CPU time of compute, (rank, iteration); 0 without measured CPU times.

    Passes that overlap model-parallel collectives wait inside their spans, which is not the host's
    doing: they are assumed to lose as large a share as the other passes. A pass that reduces its
    gradients over the replicas beside computing (DDP) waits for the last replica: communication
    under way beside the pass explains as much time off the CPU as it covers.
    """
    if not frame.uses_cpu_time:
        return np.zeros(frame.shape)
    samples, cpu_ns = passes.samples, passes.busy_ns
    own = own_times(facts.passes.entangled, samples.phase, cpu_ns)
    is_told = ~np.isin(samples.phase, own.phases)
    off_core_ns = np.maximum(facts.passes.wall_ns - cpu_ns - facts.passes.beside_ns, 0.0)
    everything, measured, lost = (
        samples.sums(time_ns, frame.shape)
        for time_ns in (cpu_ns, np.where(is_told, cpu_ns, 0.0), np.where(is_told, off_core_ns, 0.0))
    )
    return np.where(measured > 0, lost * (everything / np.maximum(measured, 1.0)), 0.0)


def _is_full(timeline: Timeline) -> bool:
    return any(header.trace.granularity == Granularity.FULL for header in timeline.headers.values())


def _tells_collections(timeline: Timeline) -> bool:
    """Return whether garbage collection was traced: not in files of the original MegaScan."""
    headers = timeline.headers.values()
    is_original = all(header.clock.source == RESTARTING_CLOCK for header in headers)
    return _is_full(timeline) and not is_original


def _hides_model_parallel(timeline: Timeline) -> bool:
    """Return whether TP, CP or EP collectives happened inside passes without being recorded."""
    layout = timeline.layout
    return layout.tp * layout.cp * layout.ep > 1 and not _is_full(timeline)


def _members(timeline: Timeline, ranks: Integers) -> Members:
    headers = [timeline.headers[int(rank)] for rank in ranks]
    hosts = hosts_of(timeline.headers)
    return Members(
        layout=timeline.layout,
        ranks=ranks,
        place=place_of([header.coordinates for header in headers]),
        labels=tuple(timeline.layout.label(int(rank)) for rank in ranks),
        hosts=tuple(hosts[int(rank)] for rank in ranks),
        devices=tuple(header.device.name for header in headers),
        device_index=tuple(header.device.index for header in headers),
        workers=tuple((int(rank),) for rank in ranks),
        device_kind=headers[0].device.kind if headers else "cpu",
        trainer=headers[0].trainer if headers else Trainer.UNKNOWN,
    )


def _tokens(timeline: Timeline) -> dict[int, int]:
    """Return the tokens of a pass, by rank, of ranks all of whose passes got as many."""
    found = {}
    for rank, windows in timeline.windows.items():
        counts = {number for window in windows for number in window.tokens}
        if len(counts) == 1 and all(window.tokens for window in windows):
            found[rank] = counts.pop()
    return found


def _by_iteration(
    timeline: Timeline, pairs_of: Callable[[WindowRecord], Iterable[tuple[int, int]]]
) -> dict[int, dict[int, int]]:
    """Return what windows say of each iteration, by rank and iteration; of ranks that tell."""
    return {
        rank: told
        for rank, windows in timeline.windows.items()
        if (told := dict(pair for window in windows for pair in pairs_of(window)))
    }


def _pressure(timeline: Timeline) -> dict[int, dict[int, Mapping[str, float]]]:
    """Return how ranks waited for memory and disks, by rank and the last iteration of windows."""
    return {
        rank: {one.last_iteration: one.pressure for one in told[1:]}
        for rank, windows in timeline.windows.items()
        if (told := [one for one in windows if one.pressure])
    }


def _work_done(timeline: Timeline) -> dict[int, tuple[WorkDone, ...]]:
    """Return what devices have done, by rank, of windows that tell."""
    names = {CLOCK_NAME, TENSOR_NAME, DRAM_NAME}
    return {
        rank: done
        for rank, windows in timeline.windows.items()
        if (
            done := tuple(
                WorkDone(
                    window=one.window,
                    multiplied=one.counters[TENSOR_NAME] * one.counters[CLOCK_NAME],
                    moved=one.counters[DRAM_NAME],
                )
                for one in windows
                if names <= one.counters.keys()
            )
        )
    }


def _carried(timeline: Timeline) -> Iterator[Carried]:
    """Yield what TCP connections between hosts have carried, of addresses that ranks have."""
    hosts = hosts_of(timeline.headers)
    told = [
        (rank, window, one)
        for rank, windows in timeline.windows.items()
        for window in windows
        for one in window.connections
    ]
    owners = {own: hosts[rank] for rank, _, (own, *_) in told if hosts[rank]}
    for rank, window, (own, other, num_bytes, busy_us, _, of_us) in told:
        if {own, other} <= owners.keys() and owners[own] != owners[other]:
            yield Carried(
                rank=rank,
                iterations=(window.first_iteration, window.last_iteration),
                sender=owners[own],
                receiver=owners[other],
                num_bytes=num_bytes,
                busy_ns=busy_us * 1000,
                of_ns=of_us * 1000,
            )


def _has_even_data(timeline: Timeline, tokens: Mapping[int, int]) -> bool:
    """Return whether all passes of each stage got as many of the `tokens`."""
    counts: dict[int, set[int | None]] = {}
    for rank, windows in timeline.windows.items():
        of_stage = counts.setdefault(timeline.headers[rank].coordinates.pp, set())
        of_stage.update(tokens.get(rank) for _ in windows)
    return bool(counts) and all(len(one) == 1 and None not in one for one in counts.values())


def _has_equal_layers(timeline: Timeline) -> bool:
    """Return whether all ranks recorded the kinds of their layers, and all are of one kind."""
    kinds = _kinds_of_layers(timeline)
    found = set[str]().union(*kinds.values())
    return all(kinds.values()) and len(found) == 1 and "" not in found


def _stages_have_unlike_layers(timeline: Timeline) -> bool:
    """Return whether all ranks recorded the kinds of their layers, and a stage has kinds that
    another one has not, as where the first layers of a model with experts are dense.
    """
    kinds, of_stage = _kinds_of_layers(timeline), dict[int, set[str]]()
    for rank, own in kinds.items():
        of_stage.setdefault(timeline.headers[rank].coordinates.pp, set()).update(own)
    found = [*of_stage.values()]
    return all(kinds.values()) and any(one != found[0] for one in found)


def _kinds_of_layers(timeline: Timeline) -> dict[int, set[str]]:
    """Return the kinds of each rank's layers; empty where they were not recorded."""
    return {
        rank: {kind for one in timeline.windows.get(rank, ()) for kind in one.kinds}
        for rank in timeline.headers
    }


def _alignment(timeline: Timeline) -> ClockAgreement | None:
    if not timeline.clocks:
        return None
    fits = list(timeline.clocks.values())
    return ClockAgreement(
        method=timeline.clock_method,
        residual_median_ns=float(np.median([fit.residual_median_ns for fit in fits])),
        residual_p99_ns=float(max(max(fit.residual_p99_ns, fit.error_ns) for fit in fits)),
        num_components=len({fit.component for fit in fits}),
        is_measured=any(fit.num_anchors for fit in fits),
    )
