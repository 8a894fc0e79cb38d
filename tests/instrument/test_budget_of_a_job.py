"""`--trace-budget` on real ranks: a job that tracing costs much lowers it, another one does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import ranks

ROOT = Path(__file__).parents[2]
BUDGETS = ("0.5%", "99%")

TRAINER = """
import itertools, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import megascan
dist.init_process_group("gloo")
LEAST_S = 10  # each of three decisions holds from a second later on, also on a quick machine

def goes_on(iteration, lasts, begin):
    if iteration % 100:
        return True
    ended = torch.tensor(iteration >= (2000 if lasts else 600)
                         and time.monotonic() - begin > LEAST_S * lasts)
    dist.broadcast(ended, 0)
    return not ended

for budget in sys.argv[2:]:
    layers = [torch.nn.Linear(4, 4), *(torch.nn.Identity() for _ in range(200))]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    config = megascan.TraceConfig(
        enabled=True, directory=Path(sys.argv[1]) / budget, interval=4, window=2,
        budget_ratio=float(budget.removesuffix("%")) / 100)
    tracer = megascan.start(config, model=model)
    begin = time.monotonic()
    for iteration in itertools.count(1):
        with tracer.iteration(iteration):
            model(torch.ones(2, 4)).sum().backward()
        if not goes_on(iteration, budget == sys.argv[2], begin):
            break
    tracer.close()
dist.destroy_process_group()
"""


@pytest.fixture
def job(once, tmp_path_factory):
    """(folder of the traces, what was said) of a job that is traced twice, by either budget."""

    def train():
        folder = tmp_path_factory.mktemp("budgets")
        (folder / "trainer.py").write_text(TRAINER)
        done = ranks.run(folder / "trainer.py", folder, *BUDGETS, num_ranks=2, check=True)
        return folder, done.stderr

    return once("job", train)


def levels(folder):
    """Of each rank: granularity and interval of its windows, by their first iterations."""
    for path in sorted(folder.glob("benchmark-data-*.json")):
        records = [
            event["args"]
            for event in json.loads(path.read_text())
            if event["name"] == "megascan_window"
        ]
        yield {each["first_iteration"]: (each["granularity"], each["interval"]) for each in records}


@pytest.mark.distributed
@pytest.mark.alone
def test_a_job_that_tracing_costs_more_than_the_budget_lowers_it_on_all_ranks_alike(job):
    folder, said = job
    first, second = levels(folder / BUDGETS[0])
    both = first.keys() & second.keys()  # a busy machine may drop a window of either
    assert {key: first[key] for key in both} == {key: second[key] for key in both}
    for rank in (first, second):
        granularities = [granularity for granularity, _ in rank.values()]
        assert granularities[0] == "full" and granularities[-1] == "base"
        assert granularities == sorted(granularities, reverse=True)  # once, and never back
    assert said.count("granularity base from iteration") == 1
    assert "more than --trace-budget 0.50%" in said
    header = json.loads((next((folder / BUDGETS[0]).glob("*.json"))).read_text())[0]["args"]
    assert header["trace"]["budget_ratio"] == 0.005


@pytest.mark.distributed
@pytest.mark.alone
def test_the_summary_says_that_it_was_lowered(job):
    folder, _ = job
    words = ("aggregate", "-b", folder / BUDGETS[0], "-o", folder / "timeline.json", "--force")
    done = ranks.run("-m", "megascan", *words, check=True)
    summary = " ".join((done.stdout + done.stderr).split())
    assert "granularity changed during the run (--trace-budget)" in summary


@pytest.mark.distributed
@pytest.mark.alone
def test_a_generous_budget_changes_nothing(job):
    folder, _ = job
    for rank in levels(folder / BUDGETS[1]):
        assert set(rank.values()) == {("full", 4)}
