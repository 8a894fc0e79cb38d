"""Let all ranks of a job run: threads ahead of streams, groups that wait for their last member.

Ranks of one stage do the same, so each operation is done for all of them at once: times are
vectors over the ranks of a stage. A stage goes on until it needs what another stage has not said.

    thread  ─ launches ─ launches ─ …            at most 1,024 kernels ahead of its stream
    stream  ── kernels of a module ─ collective: from the last member's start ─ …
    lanes   beside the stream: they begin where the stream was when they were launched
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.grounds.depot.costs import Costs
from benchmarks.grounds.depot.faults import Bursts, Effects, Trouble, stretched
from benchmarks.grounds.depot.job import Job
from benchmarks.grounds.depot.luck import Fortune, Luck
from benchmarks.grounds.depot.operations import (
    Collect,
    Join,
    Load,
    Mark,
    Meet,
    Operation,
    Program,
    Swap,
    Synchronize,
    Talk,
    Think,
    Work,
)
from benchmarks.grounds.depot.places import (
    MOVED,
    Ways,
    members_across,
    members_in_stage,
    size_of,
    ways_of,
)
from benchmarks.grounds.depot.prices import (
    Talks,
    price_of_talks,
    prices_of_works,
    share_of_bytes,
    talks_of,
)
from benchmarks.grounds.depot.record import Pause, Recorded, Run
from benchmarks.grounds.depot.schedule import Message

Figures = NDArray[np.float64]
MOST_AHEAD = 1024
"""Kernels that a stream takes before its thread must wait."""
MARK_S = 3.5e-6
CROWDED = 1.03
"""How many times longer kernels take beside a reduction that has some of the multiprocessors."""


End = tuple[int, int, bool, int]
"""A message: sender, receiver, whether it goes forward, and its number among those."""


@dataclass
class _Stage:
    """Where the ranks of one stage are."""

    program: Program
    ranks: NDArray[np.int64]
    thread: Figures
    stream: Figures
    place: int = 0
    lanes: dict[str, Figures] = field(default_factory=dict)
    ready: Figures = field(default_factory=lambda: np.zeros(0))
    taken: deque[Figures] = field(default_factory=deque)
    ahead: deque[tuple[float, Figures]] = field(default_factory=deque)
    posted: list[tuple[End, bool]] = field(default_factory=list)
    launched: float = 0.0
    talks: dict[str, Talks] = field(default_factory=dict)
    luck: Luck = field(init=False)
    works_s: Figures = field(init=False)
    launches_s: Figures = field(init=False)
    talks_s: Figures = field(init=False)
    reached: Figures = field(init=False)
    launch_marks: Figures = field(init=False)
    own: Figures = field(init=False)
    device_bursts: list[tuple[int, Bursts]] = field(default_factory=list)
    thread_bursts: list[tuple[int, Bursts]] = field(default_factory=list)
    nic_bursts: list[tuple[int, Bursts]] = field(default_factory=list)


class Engine:
    """Runs one job once."""

    def __init__(
        self, job: Job, programs: tuple[Program, ...], fortune: Fortune, trouble: Trouble
    ) -> None:
        self.job, self.fortune, self.trouble = job, fortune, trouble
        number = job.ranks_of_stage
        self.stages = [
            _Stage(one, one.stage * number + np.arange(number), np.zeros(number), np.zeros(number))
            for one in programs
        ]
        self._ways: dict[tuple[str, int], Ways] = {}
        for stage in self.stages:
            stage.ready = np.zeros(number)
            stage.talks = talks_of(stage.program, lambda axis: size_of(job, axis))
        self._posts: dict[tuple[End, bool], tuple[Figures, Figures]] = {}
        self._counts: Counter[tuple[int, bool, tuple[int, int, bool]]] = Counter()
        self._met: dict[int, dict[int, Figures]] = {}
        self._message_bytes = Costs(job).hidden_bytes / (job.tp if job.sequence_parallel else 1)
        self._loading = [
            np.array([job.loads(int(rank)) for rank in stage.ranks]) for stage in self.stages
        ]
        self.effects: Effects = trouble.effects(job.first_iteration)
        self.run = Run()
        self._act: dict[type[Operation], Callable[..., bool]] = {
            Mark: self._mark, Work: self._work, Talk: self._talk, Join: self._join,
            Synchronize: self._synchronize, Think: self._think, Load: self._load,
            Collect: self._collect, Swap: self._swap, Meet: self._meet,
        }  # fmt: skip

    def result(self, *, recording: bool = False) -> Run:
        """Run all iterations."""
        for iteration in range(self.job.first_iteration, self.job.last_iteration + 1):
            self._begin(iteration)
            self._go()
            self._end(iteration, recording and iteration in self.job.traced)
            self._between(iteration)
        return self.run

    # --- an iteration ------------------------------------------------------------------------

    def _begin(self, iteration: int) -> None:
        self.effects = self.trouble.effects(iteration)
        self._posts.clear()
        self._counts.clear()
        self._met.clear()
        self.iteration = iteration
        for stage in self.stages:
            stage.place = 0
            stage.luck = self.fortune.of(stage.program, iteration)
            shape = (stage.program.num_marks, len(stage.ranks))
            stage.reached, stage.launch_marks = np.zeros(shape), np.zeros(shape)
            stage.own = np.zeros(len(stage.ranks))
            self._price(stage)
            for name in ("device_bursts", "thread_bursts", "nic_bursts"):
                bursts: dict[int, Bursts] = getattr(self.effects, name)
                first = int(stage.ranks[0])
                own = [(r - first, b) for r, b in bursts.items() if r in stage.ranks]
                setattr(stage, name, own)

    def _price(self, stage: _Stage) -> None:
        """Set how long all that a stage does takes by itself."""
        luck, ranks = stage.luck, stage.ranks
        stage.works_s, stage.launches_s = prices_of_works(
            stage.program, luck, self.fortune, self.effects, ranks
        )
        stage.talks_s = np.zeros((len(stage.program.talks), len(ranks)))
        for axis, talks in stage.talks.items():
            ways = self.ways(axis, stage)
            stage.talks_s[talks.numbers] = price_of_talks(talks, luck, ways, self.effects, ranks)

    def ways(self, axis: str, stage: _Stage) -> Ways:
        """Return the ways of a group axis within a stage."""
        key = (axis, stage.program.stage)
        if key not in self._ways:
            members = members_in_stage(self.job, axis)
            self._ways[key] = ways_of(self.job, members, stage.ranks)
        return self._ways[key]

    def _go(self) -> None:
        """Let stages go on in turns until all are through."""
        while True:
            moved = False
            for stage in self.stages:
                operations = stage.program.operations
                while stage.place < len(operations):
                    operation = operations[stage.place]
                    if not self._act[type(operation)](stage, operation):
                        break
                    stage.place += 1
                    moved = True
            if all(one.place == len(one.program.operations) for one in self.stages):
                return
            if not moved:
                raise RuntimeError(f"no stage goes on in iteration {self.iteration}")

    def _end(self, iteration: int, recording: bool) -> None:
        bounds = [(one.program.bounds, one) for one in self.stages]
        self.run.iterations.append(iteration)
        self.run.begins_s.append(np.concatenate([one.reached[b] for (b, _), one in bounds]))
        self.run.ends_s.append(np.concatenate([one.reached[e] for (_, e), one in bounds]))
        self.run.own_s.append(np.concatenate([one.own for one in self.stages]))
        if recording:
            self.run.recorded += [
                Recorded(one.program, iteration, one.luck, one.reached, one.launch_marks)
                for one in self.stages
            ]

    def _between(self, iteration: int) -> None:
        """Let all log, and evaluate or save together where it is due."""
        times = self.fortune.between_s(iteration)
        for stage in self.stages:
            stage.thread = np.maximum(stage.thread, stage.stream) + times[stage.ranks]
        lasts_s, saving = self.fortune.evaluation_s(iteration), self.fortune.saving_s(iteration)
        if not lasts_s and saving is None:
            return
        begin = max(float(stage.thread.max()) for stage in self.stages) + lasts_s
        end = begin + (0.0 if saving is None else float(saving.max()))
        for rank, own in enumerate([] if saving is None else saving.tolist()):
            self.run.pauses.append(Pause(rank, "save-checkpoint", begin, begin + own, iteration))
        for stage in self.stages:
            stage.thread[:] = end
            stage.stream[:] = end

    # --- operations --------------------------------------------------------------------------

    def _set_mark(self, stage: _Stage, slot: int) -> None:
        np.maximum(stage.stream, stage.thread, out=stage.reached[slot])
        stage.launch_marks[slot] = stage.thread
        stage.thread = stage.thread + MARK_S

    def _mark(self, stage: _Stage, operation: Mark) -> bool:
        self._set_mark(stage, operation.slot)
        return True

    def _keep_up(self, stage: _Stage, launches: float) -> None:
        """Let a thread that is too far ahead wait for its stream."""
        stage.launched += launches
        while stage.ahead and stage.ahead[0][0] <= stage.launched - MOST_AHEAD:
            np.maximum(stage.thread, stage.ahead.popleft()[1], out=stage.thread)

    @staticmethod
    def _think_for(stage: _Stage, seconds: Figures) -> None:
        ends = stage.thread + seconds
        for place, bursts in stage.thread_bursts:
            ends[place] = stretched(float(stage.thread[place]), float(seconds[place]), bursts)
        stage.thread = ends

    def _work(self, stage: _Stage, work: Work) -> bool:
        self._keep_up(stage, work.launches)
        begin = np.maximum(stage.stream, stage.thread)
        self._think_for(stage, stage.launches_s[work.number])
        seconds = stage.works_s[work.number]
        if stage.lanes and any((end > begin).any() for end in stage.lanes.values()):
            beside = sum((end > begin) for end in stage.lanes.values())
            seconds = np.where(beside, seconds * CROWDED, seconds)
        ends = begin + seconds
        for place, bursts in stage.device_bursts:
            ends[place] = stretched(float(begin[place]), float(seconds[place]), bursts)
        if work.is_of_pass:
            stage.own += ends - begin
        stage.stream = np.maximum(ends, stage.thread + seconds / max(1.0, work.launches))
        stage.ahead.append((stage.launched, stage.stream))
        return True

    def _talk(self, stage: _Stage, talk: Talk) -> bool:
        ways = self.ways(talk.axis, stage)
        self._set_mark(stage, talk.begin)
        begin = stage.reached[talk.begin]
        if talk.lane and talk.lane in stage.lanes:
            np.maximum(begin, stage.lanes[talk.lane], out=begin)
        start = ways.gathered(begin)
        ends = start + stage.talks_s[talk.number]
        if stage.nic_bursts and ways.nic_s.any():
            self._flap(stage, ways, start, talk, ends)
        stage.reached[talk.end] = ends
        self._keep_up(stage, 1)
        stage.thread = stage.thread + self.job.hardware.launch_s * 2
        stage.launch_marks[talk.end] = stage.thread
        if talk.lane:
            stage.lanes[talk.lane] = ends
        else:
            stage.stream = ends.copy()
            stage.ahead.append((stage.launched, stage.stream))
        return True

    @staticmethod
    def _flap(stage: _Stage, ways: Ways, start: Figures, talk: Talk, ends: Figures) -> None:
        """Stretch the transfers of groups whose member has a card that comes and goes."""
        for place, bursts in stage.nic_bursts:
            for group in ways.members[(ways.members == place).any(axis=1)]:
                if ways.nic_s[place]:
                    seconds = float(stage.talks_s[talk.number][place])
                    ends[group] = np.maximum(
                        ends[group], stretched(float(start[place]), seconds, bursts)
                    )

    @staticmethod
    def _join(stage: _Stage, operation: Join) -> bool:
        end = stage.lanes.pop(operation.lane, None)
        if end is not None:
            stage.stream = np.maximum(stage.stream, end)
        return True

    @staticmethod
    def _synchronize(stage: _Stage, _: Synchronize) -> bool:
        stage.thread = np.maximum(stage.thread, stage.stream) + 6e-6
        return True

    def _think(self, stage: _Stage, operation: Think) -> bool:
        noise = stage.luck.thoughts[operation.number] * stage.luck.warmth
        slow = self.effects.thread[stage.ranks] * self.job.launch_ratio
        self._think_for(stage, operation.seconds * noise * slow)
        return True

    def _load(self, stage: _Stage, operation: Load) -> bool:
        """Take a batch: those that load wait until theirs is ready."""
        loads = self._loading[stage.program.stage]
        stage.reached[operation.begin] = stage.thread
        self._think_for(stage, np.where(loads, 3e-4, 4e-5))
        stage.thread = np.where(loads, np.maximum(stage.thread, stage.ready), stage.thread)
        stage.reached[operation.end] = stage.thread
        stage.taken.append(stage.thread)
        if len(stage.taken) > self.job.num_prefetched:
            stage.taken.popleft()
        free = stage.taken[0] if len(stage.taken) == self.job.num_prefetched else 0.0
        seconds = stage.luck.batches_s[operation.microbatch] * self.effects.load[stage.ranks]
        stage.ready = np.maximum(stage.ready, free) + seconds
        return True

    def _collect(self, stage: _Stage, operation: Collect) -> bool:
        pauses = stage.luck.collect_s[operation.number].copy()
        generations = stage.luck.generations[operation.number].copy()
        if operation.number == self.iteration % stage.program.num_collects:
            extra = self.effects.collect_s[stage.ranks]
            pauses, generations = pauses + extra, np.where(extra > 0, 2, generations)
        for place in np.flatnonzero(pauses):
            begin = float(stage.thread[place])
            rank, name = int(stage.ranks[place]), f"gc-generation-{generations[place]}"
            pause = Pause(rank, name, begin, begin + float(pauses[place]), self.iteration)
            self.run.pauses.append(pause)
        stage.thread = stage.thread + pauses
        return True

    # --- between stages ----------------------------------------------------------------------

    def _swap(self, stage: _Stage, operation: Swap) -> bool:
        """Send and receive: every message moves once both of its ends are there."""
        if not stage.posted:
            self._set_mark(stage, operation.begin)
            stage.posted = [self._post(stage, operation, each) for each in operation.messages]
        others = [self._posts.get((end, not sends)) for end, sends in stage.posted]
        if any(other is None for other in others):
            return False
        begin = stage.reached[operation.begin]
        ends = begin.copy()
        for message, other in zip(operation.messages, others, strict=True):
            assert other is not None
            noise = stage.luck.swaps[operation.number] if message.sends else other[1]
            start = np.maximum(begin, other[0])
            np.maximum(ends, self._arrived(stage, message, start, noise), out=ends)
        stage.posted = []
        ends += stage.luck.swap_ends_s[operation.number]
        stage.reached[operation.end] = ends
        stage.launch_marks[operation.end] = stage.launch_marks[operation.begin] + 3e-5
        stage.stream, stage.thread = ends, ends + 1.2e-5
        stage.ahead.clear()
        return True

    def _post(self, stage: _Stage, operation: Swap, message: Message) -> tuple[End, bool]:
        """Say that one end of a message is there."""
        own = stage.program.stage
        way = (own, message.peer) if message.sends else (message.peer, own)
        count = (own, message.sends, (*way, message.forward))
        end = (*way, message.forward, self._counts[count])
        self._counts[count] += 1
        noise = stage.luck.swaps[operation.number]
        self._posts[end, message.sends] = (stage.reached[operation.begin], noise)
        return end, message.sends

    def _arrived(self, stage: _Stage, message: Message, start: Figures, noise: Figures) -> Figures:
        """Return when a message that starts then is there."""
        job, machine = self.job, self.job.hardware
        own, peers = stage.ranks, message.peer * job.ranks_of_stage + np.arange(len(stage.ranks))
        size = self._message_bytes * share_of_bytes(stage.luck, message.microbatch, experts=False)
        far = job.hosts[own] != job.hosts[peers]
        link = np.maximum(self.effects.link[own], self.effects.link[peers])
        card = np.maximum(self.effects.nic[own], self.effects.nic[peers])
        near_s = 6e-6 + size / (0.8 * machine.link_bytes_per_s) * link * noise**0.3
        far_s = 2e-5 + size / (0.85 * machine.nic_bytes_per_s) * card * noise
        seconds = np.where(far, far_s, near_s)
        ends = start + seconds
        for place in np.flatnonzero(far):
            for rank in (int(own[place]), int(peers[place])):
                if bursts := self.effects.nic_bursts.get(rank):
                    ends[place] = stretched(float(start[place]), float(seconds[place]), bursts)
        return np.asarray(ends)

    def _meet(self, stage: _Stage, operation: Meet) -> bool:
        """Reduce across stages, from the last member's start on."""
        met = self._met.setdefault(operation.number, {})
        if stage.program.stage not in met:
            self._set_mark(stage, operation.begin)
            met[stage.program.stage] = stage.reached[operation.begin]
        at_ends = operation.axis == "embd"
        wanted = {0, self.job.pp - 1} if at_ends else set(range(self.job.pp))
        if set(met) != wanted:
            return False
        begins = np.zeros(self.job.num_ranks)
        for number, begin in met.items():
            begins[self.stages[number].ranks] = begin
        ways = self._ways_across(operation.axis)
        moved = MOVED["all_reduce"](ways.size) * operation.size_bytes
        seconds = moved * np.maximum(ways.link_s * self.effects.link, ways.nic_s * self.effects.nic)
        ends = (ways.gathered(begins) + ways.gathered(seconds + ways.least_s))[stage.ranks]
        ends += stage.luck.meet_ends_s[operation.number]
        stage.reached[operation.end] = ends
        stage.thread = stage.thread + self.job.hardware.launch_s * 2
        stage.launch_marks[operation.end] = stage.thread
        stage.stream = ends.copy()
        return True

    def _ways_across(self, axis: str) -> Ways:
        if (axis, -1) not in self._ways:
            members = members_across(self.job, axis)
            everyone = np.arange(self.job.num_ranks)
            self._ways[axis, -1] = ways_of(self.job, members, everyone)
        return self._ways[axis, -1]
