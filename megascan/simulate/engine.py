"""The recursion: when every instruction of every stage begins and ends.

Problem: from durations of single operations, find all times. Idea: a rank runs its program in
order, so its next operation begins when the last one has ended and, on a GPU, when the host has
launched it; a communication ends for everybody a transfer after its last member has arrived. No
wait is ever written down; each is the difference of two such times.

    host         launch += duration            (loading, collecting; on a CPU: time += duration)
    compute      begin = max(time, launch);  launch += dispatch
                 time = max(begin + duration, launch + duration of the last kernel)
    collective   time = max over the group of arrival  + transfer + own jitter
                 launch += dispatch
    overlapped   the same without stopping, then time = max(time, its end)
    exchange     time = max over its transfers of max(own post, peer's post) + transfer

Each step acts on all ranks of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascan.schema import NOT_APPLICABLE
from megascan.simulate.draws import StageDraws
from megascan.simulate.grid import Floats, Grid
from megascan.simulate.order import Dependencies, PostKey, feasible_order
from megascan.simulate.program import NO_SPAN, Code, Instruction, StageProgram

NUM_KERNELS = 100
"""Kernels of one computation: the last one, at least, cannot run before the host launched it."""

_BETWEEN_RANKS = frozenset(
    (Code.COLLECTIVE, Code.LAUNCH, Code.FINISH, Code.POST, Code.WAIT, Code.JOIN)
)


@dataclass(frozen=True)
class Recording:
    """Where one stage's iteration is written: arrays (span, place), NaN where a span is absent."""

    start: Floats
    end: Floats
    launch: Floats
    cpu: Floats


class Engine:
    """Advances the whole job one iteration at a time."""

    def __init__(self, grid: Grid, programs: list[StageProgram]) -> None:
        self.grid = grid
        self.dependencies = Dependencies.of(programs)
        self.order = feasible_order(programs, self.dependencies)
        shape = (grid.layout.pp, grid.num_places)
        self.time: Floats = np.zeros(shape)
        self.launch: Floats = np.zeros(shape)
        self.cpu: Floats = np.zeros(shape)

    def run(self, draws: list[StageDraws], recordings: list[Recording]) -> None:
        """Advance every rank by one iteration and write its spans."""
        posts: dict[PostKey, Floats] = {}
        for stage, instruction in self.order:
            recording = recordings[stage]
            if instruction.code in _BETWEEN_RANKS:
                self._communicate(stage, instruction, draws, recording, posts)
            else:
                self._advance(stage, instruction, draws[stage], recording)

    def _advance(
        self, stage: int, instruction: Instruction, draws: StageDraws, recording: Recording
    ) -> None:
        """What ranks do by themselves."""
        code, span = instruction.code, instruction.span
        if code == Code.COMPUTE:
            self._compute(stage, instruction, draws, recording)
        elif code == Code.OPEN:
            self._start(stage, span, recording)
        elif code == Code.CLOSE:
            self._end(stage, span, recording)
        elif code == Code.HOST_OPEN:
            recording.start[span] = self._host(stage, draws)
            recording.cpu[span] = self.cpu[stage]
        elif code == Code.HOST_CLOSE:
            recording.end[span] = self._host(stage, draws)
            recording.cpu[span] = self.cpu[stage] - recording.cpu[span]
        elif code == Code.SYNCHRONIZE:
            self._synchronize(stage)
        elif code == Code.PAUSE:
            self._pause(stage, instruction, draws, recording)
        else:
            self._save(stage, instruction, draws, recording)

    def _host(self, stage: int, draws: StageDraws) -> Floats:
        """Where the host is: ahead of a GPU, or itself what computes."""
        now: Floats = self.time[stage] if draws.host_is_device else self.launch[stage]
        return now

    def _synchronize(self, stage: int) -> None:
        self.time[stage] = np.maximum(self.time[stage], self.launch[stage])
        self.launch[stage] = self.time[stage]

    def _communicate(
        self,
        stage: int,
        instruction: Instruction,
        draws: list[StageDraws],
        recording: Recording,
        posts: dict[PostKey, Floats],
    ) -> None:
        code = instruction.code
        if code == Code.COLLECTIVE:
            self._collective(stage, instruction, draws[stage], recording)
        elif code == Code.LAUNCH:
            self._launch(stage, instruction, recording, posts)
        elif code == Code.FINISH:
            self._finish(stage, instruction, draws[stage], recording, posts)
        elif code == Code.POST:
            self._post(stage, instruction, recording, posts)
        elif code == Code.WAIT:
            self._wait(stage, instruction, draws, recording, posts)
        else:
            self._join(stage, instruction, draws, recording, posts)

    def _start(self, stage: int, span: int, recording: Recording) -> None:
        begin = np.maximum(self.time[stage], self.launch[stage], out=recording.start[span])
        recording.launch[span] = self.launch[stage]
        recording.cpu[span] = self.cpu[stage]
        self.time[stage] = begin

    def _end(self, stage: int, span: int, recording: Recording) -> None:
        recording.end[span] = self.time[stage]
        recording.cpu[span] = self.cpu[stage] - recording.cpu[span]

    def _compute(
        self, stage: int, instruction: Instruction, draws: StageDraws, recording: Recording
    ) -> None:
        """The device works through a train of kernels while the host launches them."""
        row, time, launch = instruction.row, self.time[stage], self.launch[stage]
        duration = draws.compute[row]
        if not draws.on_device[row]:
            host = self._host(stage, draws)
            host += duration
            self.cpu[stage] += draws.compute_cpu[row]
            return
        if instruction.span != NO_SPAN:
            self._start(stage, instruction.span, recording)
        else:
            np.maximum(time, launch, out=time)
        time += duration
        self.cpu[stage] += draws.compute_cpu[row]
        launch += draws.dispatch[row]
        np.maximum(time, launch + duration / NUM_KERNELS, out=time)

    def _collective(
        self, stage: int, instruction: Instruction, draws: StageDraws, recording: Recording
    ) -> None:
        row, span = instruction.row, instruction.span
        arrival = np.maximum(self.time[stage], self.launch[stage])
        if span != NO_SPAN:
            self._start(stage, span, recording)
        last = self.grid.group_max(arrival, instruction.axis)
        self.time[stage] = last + draws.transfer[row] + draws.jitter[row]
        self.launch[stage] += draws.transfer_dispatch[row]
        self.cpu[stage] += draws.transfer_cpu[row]
        if span != NO_SPAN:
            self._end(stage, span, recording)

    def _launch(
        self,
        stage: int,
        instruction: Instruction,
        recording: Recording,
        posts: dict[PostKey, Floats],
    ) -> None:
        if instruction.span != NO_SPAN:
            self._start(stage, instruction.span, recording)
        posts[stage, instruction.slot] = np.maximum(self.time[stage], self.launch[stage])

    def _finish(
        self,
        stage: int,
        instruction: Instruction,
        draws: StageDraws,
        recording: Recording,
        posts: dict[PostKey, Floats],
    ) -> None:
        row, span = instruction.row, instruction.span
        last = self.grid.group_max(posts[stage, instruction.slot], instruction.axis)
        done = last + draws.transfer[row] + draws.jitter[row]
        self.launch[stage] += draws.transfer_dispatch[row]
        self.time[stage] = np.maximum(self.time[stage], done)
        if span != NO_SPAN:
            recording.end[span] = done
            recording.cpu[span] = NOT_APPLICABLE

    def _post(
        self,
        stage: int,
        instruction: Instruction,
        recording: Recording,
        posts: dict[PostKey, Floats],
    ) -> None:
        for offset in range(instruction.num_spans):
            self._start(stage, instruction.span + offset, recording)
        posts[stage, instruction.slot] = np.maximum(self.time[stage], self.launch[stage])

    def _wait(
        self,
        stage: int,
        instruction: Instruction,
        draws: list[StageDraws],
        recording: Recording,
        posts: dict[PostKey, Floats],
    ) -> None:
        own = posts[stage, instruction.slot]
        done = own
        for partner in self.dependencies.partners[stage, instruction.slot]:
            transfer = draws[partner.row_stage].transfer[partner.row]
            both = np.maximum(own, posts[partner.post]) + transfer
            done = np.maximum(done, both)
            self.cpu[stage] += draws[partner.row_stage].transfer_cpu[partner.row]
        self._leave(stage, instruction, done, draws, recording)
        self.launch[stage] = self.time[stage]

    def _join(
        self,
        stage: int,
        instruction: Instruction,
        draws: list[StageDraws],
        recording: Recording,
        posts: dict[PostKey, Floats],
    ) -> None:
        join = self.dependencies.joins[instruction.axis]
        last = np.maximum.reduce([posts[key] for key in join.posts])
        last = self.grid.group_max(last, instruction.axis)
        transfer = draws[join.first_stage].transfer[join.row]
        self.cpu[stage] += draws[join.first_stage].transfer_cpu[join.row]
        self._leave(stage, instruction, last + transfer, draws, recording)

    def _leave(
        self,
        stage: int,
        instruction: Instruction,
        done: Floats,
        draws: list[StageDraws],
        recording: Recording,
    ) -> None:
        self.time[stage] = done + draws[stage].jitter[instruction.slot]
        for offset in range(instruction.num_spans):
            self._end(stage, instruction.span + offset, recording)

    def _pause(
        self, stage: int, instruction: Instruction, draws: StageDraws, recording: Recording
    ) -> None:
        """The host stands still; the device goes on with what was launched."""
        pauses = draws.pause
        if not pauses.any():
            return
        host = self._host(stage, draws)
        if instruction.span != NO_SPAN:
            absent = pauses <= 0
            recording.start[instruction.span] = np.where(absent, np.nan, host)
            recording.end[instruction.span] = np.where(absent, np.nan, host + pauses)
            recording.cpu[instruction.span] = pauses
        host += pauses

    def _save(
        self, stage: int, instruction: Instruction, draws: StageDraws, recording: Recording
    ) -> None:
        if draws.save is None:
            return
        if instruction.span != NO_SPAN:
            self._start(stage, instruction.span, recording)
        self.time[stage] += draws.save
        self._synchronize(stage)
        if instruction.span != NO_SPAN:
            self._end(stage, instruction.span, recording)


def empty_recording(num_spans: int, num_places: int) -> Recording:
    """Arrays that say "absent" until a span is written."""
    blank: list[npt.NDArray[np.float64]] = [
        np.full((num_spans, num_places), np.nan) for _ in range(4)
    ]
    return Recording(*blank)
