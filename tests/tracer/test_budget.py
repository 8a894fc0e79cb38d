"""A budget lowers what is traced when the cost is beyond doubt, alike on all ranks, and never on
noise."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megascan.config import TraceConfig
from megascan.errors import ConfigError
from megascan.header import Activity, WindowRecord
from megascan.reader import read_trace
from megascan.reader.rank_files import read_rank_files
from megascan.schema import Granularity
from megascan.tracer.budget import Budget, Level
from tests import ranks

ROOT = Path(__file__).parents[2]
MS = 1_000_000


class Board(dict):
    """Announcements in memory."""

    def publish(self, number, text):
        assert number not in self
        self[number] = text

    def read(self, number):
        return self.get(number)


class Job:
    """Runs cycles of a made-up job under a budget of 1 %, as rank 0's tracer would report them."""

    def __init__(
        self,
        cost_of,
        *,
        noise=0.0,
        seed=1,
        granularity=Granularity.FULL,
        largest_stride=1,
        last_stride=1,
        budget_ratio=0.01,
    ):
        self.config = TraceConfig(
            enabled=True,
            interval=5,
            window=1,
            granularity=granularity,
            layer_stride=1,
            budget_ratio=budget_ratio,
        )
        self.rng = random.Random(seed)
        self.noise = noise
        self.cost_of = cost_of
        self.board = Board()
        self.levels: list[Level] = []
        self.iteration, self.iteration_ns = 0, 10 * MS
        self.budget = Budget(
            self.config,
            self.board,
            decides=True,
            lower=self.levels.append,
            current_iteration=lambda: self.iteration,
            largest_stride=lambda: largest_stride,
            last_stride=lambda: last_stride,
        )

    def run(self, num_windows):
        for _ in range(num_windows):
            granularity, interval = self.config.granularity, self.config.interval
            for level in self.levels:
                if self.iteration + 1 >= level.from_iteration:
                    granularity, interval = level.granularity, level.interval
            first = self.iteration + 1
            timings = []
            for place in range(interval):
                self.iteration += 1
                traced = place == 0
                factor = 1 + (self.cost_of(granularity) if traced else 0)
                duration = self.iteration_ns * factor * (1 + self.noise * abs(self.rng.gauss(0, 1)))
                activity = Activity.TRACED if traced else Activity.NONE
                timings.append((self.iteration, activity, round(duration)))
            self.budget.window_written(
                WindowRecord(
                    run_id="r",
                    window=0,
                    first_iteration=first,
                    last_iteration=first,
                    num_spans=1,
                    granularity=granularity,
                    interval=interval,
                    timings=tuple(timings),
                )
            )


def test_full_becomes_base_and_stays_when_that_is_enough(warnings_of_megascan):
    job = Job(lambda granularity: 0.2 if granularity is Granularity.FULL else 0.01, noise=0.01)
    job.run(100)
    (level,) = job.levels
    assert (level.granularity, level.interval) == (Granularity.BASE, 5)
    assert level.from_iteration % 5 == 1  # where an interval begins
    (warning,) = warnings_of_megascan()
    assert "more than --trace-budget 1.00%; granularity base from iteration" in warning


def test_modules_of_fewer_layers_come_first(warnings_of_megascan):
    """Each of 128 layers costs a thousandth of an iteration, and 64 of them stand for two."""
    job = Job(lambda granularity: 0.0, largest_stride=64)
    job.cost_of = lambda granularity: (
        0.0
        if granularity is Granularity.BASE
        else 1.28 / (job.levels[-1].layer_stride if job.levels else job.config.layer_stride)
    )
    job.run(200)
    assert [(level.granularity, level.layer_stride) for level in job.levels] == [("full", 32)]
    assert "modules of one layer in 32 only from iteration" in warnings_of_megascan()[0]


def test_without_a_budget_layers_take_turns_and_then_windows_become_fewer(warnings_of_megascan):
    job = Job(lambda granularity: 5.0, largest_stride=4, budget_ratio=0.0)  # the run lasts twice
    job.run(200)
    assert [(level.granularity, level.interval, level.layer_stride) for level in job.levels] == [
        ("full", 5, 4),
        ("full", 160, 4),  # 3.1 %
    ]
    turns, windows = warnings_of_megascan()
    assert "more than 2.00%; modules of one layer in 4 only from iteration" in turns
    assert "more than 5.00%; a window every 160 iterations from iteration" in windows


def test_without_a_budget_a_job_bound_by_its_hosts_keeps_all_windows_up_to_a_twentieth(
    warnings_of_megascan,
):
    job = Job(lambda granularity: 0.2, noise=0.01, budget_ratio=0.0)  # 4 % of the run
    job.run(200)
    assert job.levels == [] and warnings_of_megascan() == []


def test_at_granularity_base_windows_become_fewer_unasked():
    job = Job(lambda granularity: 0.4, noise=0.01, granularity=Granularity.BASE, budget_ratio=0.0)
    job.run(100)  # 8 % of the run
    assert [(level.granularity, level.interval) for level in job.levels] == [("base", 10)]


def test_a_single_layer_is_the_last_step_and_taken_where_two_cost_too_much(warnings_of_megascan):
    job = Job(lambda granularity: 0.0, largest_stride=4, last_stride=8, budget_ratio=0.0)
    job.cost_of = lambda granularity: 0.7 / (job.levels[-1].layer_stride if job.levels else 1)
    job.run(200)  # 14 % of the run, 3.5 % with two layers, 1.75 % with one
    assert [level.layer_stride for level in job.levels] == [4, 8]
    assert len(warnings_of_megascan()) == 2
    job = Job(lambda granularity: 0.0, largest_stride=4, last_stride=8, budget_ratio=0.0)
    job.cost_of = lambda granularity: 0.3 / (job.levels[-1].layer_stride if job.levels else 1)
    job.run(200)
    assert [level.layer_stride for level in job.levels] == [4]


def test_few_steps_lead_to_a_single_layer_where_layers_cost_much():
    """A short job of many layers would end on the way otherwise."""
    job = Job(lambda granularity: 5.0, largest_stride=50, last_stride=201, budget_ratio=0.005)
    job.run(100)
    steps = [(level.granularity, level.layer_stride) for level in job.levels[:3]]
    assert steps == [("full", 50), ("full", 201), ("base", 201)]


def test_without_a_budget_a_traced_iteration_may_cost_a_little(warnings_of_megascan):
    job = Job(lambda granularity: 0.08, noise=0.005, largest_stride=64, budget_ratio=0.0)
    job.run(200)  # 1.6 % of the run
    assert job.levels == [] and warnings_of_megascan() == []


def test_a_level_with_layers_reaches_the_other_ranks():
    job, learned = Job(lambda granularity: 0.5, largest_stride=64), []
    job.run(60)
    other = Budget(
        job.config, job.board, decides=False, lower=learned.append, current_iteration=lambda: 0
    )
    record = WindowRecord(run_id="r", window=0, first_iteration=1, last_iteration=1, num_spans=1)
    for _ in job.levels:
        other.window_written(record)
    assert learned == job.levels and learned[0].layer_stride > 8


def test_windows_become_fewer_when_base_is_too_dear(warnings_of_megascan):
    job = Job(lambda granularity: 0.3, noise=0.01)  # 6 % of the run
    job.run(120)
    assert [(level.granularity, level.interval) for level in job.levels] == [
        ("base", 5),
        ("base", 40),  # 0.75 %
    ]
    assert "a window every 40 iterations" in warnings_of_megascan()[-1]


def test_a_cost_that_nothing_lowers_is_said_once(warnings_of_megascan):
    job = Job(lambda granularity: 50.0)
    job.run(200)
    assert job.levels[-1].interval == 5 * 64
    assert sum("nothing left to lower" in text for text in warnings_of_megascan()) == 1


@pytest.mark.parametrize("seed", range(10))
def test_noise_lowers_nothing(seed):
    job = Job(lambda granularity: 0.0, noise=0.3, seed=seed)  # run ratios some per cent either way
    job.run(400)
    assert job.levels == [] and job.board == {}


@pytest.mark.parametrize("seed", range(10))
def test_noise_takes_no_layers_either(seed):
    """Though less evidence is enough for them."""
    job = Job(lambda granularity: 0.0, noise=0.3, seed=seed, largest_stride=64, budget_ratio=0.0)
    job.run(400)
    assert job.levels == [] and job.board == {}


def test_layers_take_turns_soon_where_iterations_are_long_enough():
    """At the first look, after seven windows, from the sixth interval behind it on."""
    job = Job(lambda granularity: 0.3, noise=0.05, largest_stride=4, budget_ratio=0.0)
    job.iteration_ns = 300 * MS
    job.run(7)
    (level,) = job.levels
    assert (level.layer_stride, level.from_iteration) == (4, 6 * 5 + 6 * 5 + 1)


def test_a_cost_within_the_budget_lowers_nothing():
    job = Job(lambda granularity: 0.04, noise=0.005)  # 0.8 % of the run
    job.run(300)
    assert job.levels == []


def test_the_other_ranks_take_what_rank_0_announced():
    job = Job(lambda granularity: 0.2)
    learned: list[Level] = []
    other = Budget(
        job.config,
        job.board,
        decides=False,
        lower=learned.append,
        current_iteration=lambda: 0,
    )
    record = WindowRecord(
        run_id="r",
        window=0,
        first_iteration=1,
        last_iteration=1,
        num_spans=1,
        timings=((1, Activity.TRACED, 99 * MS), (2, Activity.NONE, MS)),  # its own says nothing
    )
    other.window_written(record)
    assert learned == []
    job.run(60)
    for _ in range(3):
        other.window_written(record)
    assert learned == job.levels and len(learned) == 2


def test_a_level_is_taken_up_where_an_interval_begins(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=4, window=2)
    for iteration in range(1, 21):
        if iteration == 3:
            level = Level(granularity=Granularity.BASE, interval=8, from_iteration=9)
            tracer.lower(level)
        with tracer.iteration(iteration):
            assert tracer.full == (iteration < 9)
    tracer.close()
    windows = read_rank_file(path).windows
    assert [(w["first_iteration"], w["granularity"], w["interval"]) for w in windows] == [
        (1, "full", 4),
        (5, "full", 4),
        (9, "base", 8),
        (17, "base", 8),
    ]


def test_a_level_that_comes_late_waits_for_the_next_interval(make_tracer, read_rank_file):
    tracer, path = make_tracer(interval=4, window=2)
    for iteration in range(1, 14):
        if iteration == 6:
            tracer.lower(Level(granularity=Granularity.BASE, interval=4, from_iteration=1))
        with tracer.iteration(iteration):
            pass
    tracer.close()
    windows = read_rank_file(path).windows
    assert [(w["first_iteration"], w["granularity"]) for w in windows] == [
        (1, "full"),
        (5, "full"),
        (9, "base"),
        (13, "base"),
    ]


def test_a_budget_without_untraced_iterations_is_refused():
    with pytest.raises(ConfigError, match="leaves none"):
        TraceConfig(enabled=True, interval=3, window=3, budget_ratio=0.01)


TRAINER = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
import megascan

dist.init_process_group("gloo")
config = megascan.TraceConfig(
    enabled=True, directory=Path(sys.argv[1]), interval=4, window=1, budget_ratio=0.01
)
tracer = megascan.start(config)
for iteration in range(1, 1201):
    with tracer.iteration(iteration):
        time.sleep(0.001)
        for _ in range(400):
            with tracer.span("tiny", "compute"):
                pass
        dist.all_reduce(torch.ones(1))
tracer.close()
dist.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.alone
def test_a_real_job_of_two_ranks_lowers_itself_alike(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    folder = tmp_path / "trace"
    finished = ranks.run(script, folder, num_ranks=2, check=True)
    lines = [line for line in finished.stderr.splitlines() if "--trace-budget" in line]
    assert "granularity base from iteration" in lines[0]
    assert "a window every" in lines[1]
    first, second = (
        {
            window.first_iteration: (window.granularity, window.interval)
            for window in read_rank_files([path])[0].windows
        }
        for path in sorted(folder.iterdir())
    )
    common = first.keys() & second.keys()  # a slow disk may have cost either one a window
    assert len(common) > 15 and all(first[start] == second[start] for start in common)
    levels = list(dict.fromkeys(first.values()))
    assert levels[:2] == [("full", 4), ("base", 4)]
    assert all(interval > 4 for _, interval in levels[2:])  # none when the run ended before it held
    notes = read_trace(folder).completeness.notes
    assert any("granularity changed during the run (--trace-budget)" in note for note in notes)
