"""What the live watch sees, how soon, and what it costs.

    python -m benchmarks.watch healthy --windows 10000 --jobs 16   accusations among healthy windows
    python -m benchmarks.watch delay --jobs 2              iterations from onset to alert
    python -m benchmarks.watch cost                        CPU at 8 ranks with default trace flags
    python -m benchmarks.watch real --gap-s 5              the same of a real process, on the clock
    python -m benchmarks.watch kill --gap-s 0.3            kill -9 and restart, again and again
    python -m benchmarks.watch scale                       a window of 1,024 ranks at `base`
    python -m benchmarks.watch day --windows 10000         memory over a day's windows

Rank files of simulated jobs are written window by window, as a running job would, and a `Watcher`
looks after each. CPU time is this process's; results are in benchmarks/results/watch.md. `healthy`
and `delay` spread their jobs over processes; `--kept FILE` keeps what is done, a line a job, and a
later run with the same file does the rest.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from aggregate import build_timeline
from detect import DetectorSettings
from detect.causes import compute
from detect.causes.power import Power
from detect.detector import judge
from detect.observe.extract import observe
from megascan.schema import Granularity
from megascan.simulate import (
    Clocks,
    Imbalance,
    JobModel,
    Noise,
    communication_heavy,
    compute_bound,
    parse_fault,
    simulate_trace,
    write_rank_files,
)
from megascan.topology import Layout
from megascan.watch.delivery import Outbox
from megascan.watch.watcher import CPU_SHARE, StateFile, Watcher, WatchSettings

_MARK = b'"name":"megascan_window"'


@dataclass
class Replay:
    """Rank files that grow a window a step. They are mapped: a day of windows stays on disk."""

    source: Path
    target: Path
    _texts: dict[str, mmap.mmap] = field(default_factory=dict)
    _offset: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted(self.source.glob("benchmark-data-*.json")):
            with path.open("rb") as file:
                self._texts[path.name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def step(self) -> bool:
        """Append each rank's next window; False at the end."""
        grown = False
        for name, text in self._texts.items():
            begin = self._offset.get(name, 0)
            at = text.find(_MARK, begin)
            if at < 0:
                continue
            end = text.find(b"\n", at)
            end = len(text) if end < 0 else end - (text[end - 1 : end] == b",")
            with (self.target / name).open("ab") as file:
                file.write(text[begin:end])
            self._offset[name] = end
            grown = True
        return grown


@dataclass
class Watch:
    """A watcher on a folder, and the events that it told."""

    watcher: Watcher
    said: list[Mapping[str, Any]]

    @classmethod
    def on(cls, folder: Path, **settings: Any) -> Watch:
        """Watch a folder with default settings and a state file."""
        said: list[Mapping[str, Any]] = []
        watcher = Watcher(
            settings=WatchSettings(folders=(folder,), detector=DetectorSettings(), **settings),
            state_file=StateFile(folder / "state.json"),
            outbox=Outbox((), print),
            say=said.append,
            warn=lambda text: print(text, file=sys.stderr),
        )
        return cls(watcher, said)

    @property
    def accusations(self) -> list[Mapping[str, Any]]:
        """Findings of nodes that were raised."""
        return [
            event
            for event in self.said
            if event["event"] == "raised" and event["finding"]["owner"] == "node"
        ]


def job_of(layout: Layout, iterations: int, **values: Any) -> JobModel:
    """A small job, every iteration traced and a window by itself unless `values` say otherwise."""
    costs = values.pop("costs", compute_bound)
    return JobModel(
        layout=layout, costs=costs(layout), iterations=iterations, ranks_per_host=4,
        **{"num_layers": 4, "num_microbatches": 4, "interval": 1, "window": 1, **values},
    )  # fmt: skip


def replayed(job: JobModel, faults: list[str], seed: int, folder: Path) -> Replay:
    """Simulate a job into a folder that is replayed into another."""
    shutil.rmtree(folder, ignore_errors=True)
    target = folder / "grows"
    target.mkdir(parents=True)
    trace = simulate_trace(job, [parse_fault(text) for text in faults], seed=seed)
    write_rank_files(trace, folder / "source")
    return Replay(folder / "source", target)


_LAWS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "noisy compute 3 %": {"noise": Noise(compute_ratio=0.03)},
    "noisy compute 6 %": {"noise": Noise(compute_ratio=0.06)},
    "uneven chips 1 %": {"noise": Noise(device_ratio=0.01)},
    "noisy links": {"noise": Noise(transfer_ratio=0.3), "costs": communication_heavy},
    "spikes": {"noise": Noise(spike_probability=0.002, spike_ns=3e6, device_ratio=0.003)},
    "uneven sequences": {"imbalance": Imbalance(sequence_ratio=0.15)},
    "very uneven sequences": {"imbalance": Imbalance(sequence_ratio=0.4)},
    "heavy last stage": {"imbalance": Imbalance(stage_ratio={1: 1.4})},
    "collector on every rank": {"imbalance": Imbalance(gc_interval=10)},
    "checkpoints": {"imbalance": Imbalance(checkpoint_interval=12)},
    "slow first iterations": {"imbalance": Imbalance(warmup_ratio=2.0)},
    "clocks apart": {"clocks": Clocks(offset_ms=50.0, drift_ppm=20.0)},
    "CPU": {"device": "cpu"},
}
"""Noise and look-alikes without a node at fault."""
_LAYOUTS = (Layout(pp=2, dp=4), Layout(dp=8), Layout(tp=2, dp=4), Layout(tp=2, pp=2, dp=2))
_STAGES = tuple(layout for layout in _LAYOUTS if layout.pp > 1)
_ITERATIONS = 80
_FIRST_LOOK = 20
_ONSET = 25


def _leave_out_planting() -> None:
    """Take the formula for the least slowdown that would be found: no finding depends on it, and to
    plant slowdowns until they are found takes half of a verdict's time.
    """
    compute.planted_power = lambda inquiry, first, slow, judged: Power(first, first)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class HealthyJob:
    """One job of `healthy`."""

    law: str
    seed: int

    def watched(self) -> dict[str, Any]:
        """Watch it, each window judged; what was named, told or not, with its q-value."""
        _leave_out_planting()
        layouts = _STAGES if self.law == "heavy last stage" else _LAYOUTS
        job = job_of(layouts[self.seed % len(layouts)], _ITERATIONS, **_LAWS[self.law])
        named: list[tuple[str, float]] = []
        with tempfile.TemporaryDirectory() as name:
            replay = replayed(job, [], self.seed, Path(name) / "job")
            watch, num_windows = Watch.on(replay.target, cpu_share=1.0), 0
            while replay.step():
                watch.watcher.look()
                num_windows += 1
            for verdict in (one for one in watch.said if one["event"] == "verdict"):
                named += [
                    (each["cause"], each["q_value"])
                    for each in verdict["findings"]
                    if each["owner"] == "node"
                ]
            watch.watcher.close()
        return {
            "law": self.law,
            "seed": self.seed,
            "windows": num_windows,
            "verdicts": watch.watcher.gauges.num_verdicts,
            "named": named,
            "told": [one["text"] for one in watch.accusations],
        }


@dataclass(frozen=True)
class FaultyJob:
    """One job of `delay`: rank 4 is slow from iteration 25 on."""

    law: str
    factor: float
    seed: int

    def watched(self) -> dict[str, Any]:
        """Watch it as a default watch does, and with a verdict for each window."""
        layout = _LAYOUTS[self.seed % len(_LAYOUTS)]
        rank = (3 * self.seed + 1) % 8
        fault = f"rank={rank},kind=compute,factor={self.factor},from={_ONSET}"
        after: dict[str, int | None] = {}
        with tempfile.TemporaryDirectory() as name:
            for how, share in (("default", CPU_SHARE), ("each window", 1.0)):
                job = job_of(layout, 45, **_LAWS[self.law])
                replay = replayed(job, [fault], self.seed, Path(name) / how)
                after[how] = _raised_after(replay, rank, share)
        return {"law": self.law, "factor": self.factor, "seed": self.seed, "after": after}


def _raised_after(replay: Replay, rank: int, cpu_share: float) -> int | None:
    """Return how many slow iterations came until the alert; None without one."""
    watch, iteration = Watch.on(replay.target, cpu_share=cpu_share), 0
    while replay.step():
        iteration += 1
        if iteration < _FIRST_LOOK:
            continue
        watch.watcher.look()
        if any(rank in one["finding"]["ranks"] for one in watch.accusations):
            break
    else:
        iteration = 0
    watch.watcher.close()
    return iteration - _ONSET + 1 if iteration else None


Job = HealthyJob | FaultyJob


def _watched(job: Job) -> dict[str, Any]:
    return job.watched()


def outcomes(jobs: Sequence[Job], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Watch the jobs, several at a time, until the limit; take those of `--kept` from there."""
    began = time.monotonic()
    kept: Path | None = arguments.kept
    lines = kept.read_text(encoding="utf-8").splitlines() if kept and kept.exists() else []
    found = [json.loads(line) for line in lines]
    done = {tuple(one.get(key) for key in _KEYS) for one in found}
    left = [job for job in jobs if tuple(getattr(job, key, None) for key in _KEYS) not in done]
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        waiting = [pool.submit(_watched, job) for job in left]
        try:
            for each in as_completed(waiting, arguments.limit_s):
                found.append(each.result())
                print(f"{len(found)} of {len(jobs)} jobs, {time.monotonic() - began:.0f} s",
                      file=sys.stderr, flush=True)  # fmt: skip
                if kept:
                    with kept.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(found[-1]) + "\n")
        except TimeoutError:
            print(f"ended by --limit-s with {len(found)} of {len(jobs)} jobs", file=sys.stderr)
            pool.shutdown(wait=False, cancel_futures=True)
    return found


_KEYS = ("law", "factor", "seed")


def healthy(arguments: argparse.Namespace) -> None:
    """Watch healthy jobs of all laws and layouts."""
    num_jobs = -(-arguments.windows // _ITERATIONS)
    laws = list(_LAWS)
    jobs = [HealthyJob(laws[seed % len(laws)], seed) for seed in range(num_jobs)]
    found = outcomes(jobs, arguments)
    for law in laws:
        some = [one for one in found if one["law"] == law]
        named = sorted(q for one in some for _, q in one["named"])
        print(
            f"{law}: {sum(one['windows'] for one in some)} windows, "
            f"{sum(one['verdicts'] for one in some)} verdicts, "
            f"{sum(len(one['told']) for one in some)} accusations; verdicts that name a node "
            f"{len(named)}" + (f" (least q {named[0]:.2g})" if named else "")
        )
    told = [(one["law"], one["seed"], text) for one in found for text in one["told"]]
    print(f"all: {sum(one['windows'] for one in found)} windows, {len(told)} accusations")
    print(*told, sep="\n")


def delay(arguments: argparse.Namespace) -> None:
    """Plant faults from iteration 25 on; count windows until the alert."""
    laws = ("plain", "noisy compute 3 %", "noisy compute 6 %", "noisy links", "uneven sequences")
    jobs = [
        FaultyJob(law, factor, seed)
        for seed in range(arguments.repetitions)
        for law in laws
        for factor in (1.05, 1.1, 1.3)
    ]
    found = outcomes(jobs, arguments)
    for law in laws:
        for factor in (1.05, 1.1, 1.3):
            some = [one for one in found if (one["law"], one["factor"]) == (law, factor)]
            each, default = (
                sorted(one["after"][how] or 99 for one in some)
                for how in ("each window", "default")
            )
            later = sum(
                (one["after"]["default"] or 99) > (one["after"]["each window"] or 99)
                for one in some
            )
            print(f"{law}, {factor}: {each} iterations; by default {default}, {later} later")


_COST_LAYOUT = Layout(tp=2, pp=2, dp=2)
_FULL_RING = 12
"""Windows after which the ring is full."""


def cost_job(num_windows: int) -> JobModel:
    """8 ranks with default trace flags: granularity full, interval 5, window 2."""
    return job_of(
        _COST_LAYOUT, 5 * num_windows, num_layers=16, num_microbatches=8, interval=5, window=2,
        device="cpu",
    )  # fmt: skip


def cost(arguments: argparse.Namespace, folder: Path) -> None:
    """Look at 8 ranks with default flags; then at files that stand still; then stage by stage."""
    source = replayed(cost_job(arguments.windows), [], 1, folder / "job").source
    for share, gap_s in ((1.0, 10), (CPU_SHARE, 3), (CPU_SHARE, 5), (CPU_SHARE, 10)):
        replay = Replay(source, folder / f"{share}-{gap_s}")
        replay.target.mkdir()
        watch, num_windows, spent = Watch.on(replay.target, cpu_share=share), 0, 0.0
        watch.watcher.monotonic_s = lambda: gap_s * num_windows  # noqa: B023
        while replay.step():
            num_windows += 1
            if num_windows == _FULL_RING:
                spent, judged = 0.0, watch.watcher.gauges.num_verdicts
            began = time.process_time()
            watch.watcher.look()
            spent += time.process_time() - began
        began = time.process_time()
        for _ in range(1000):
            watch.watcher.look()
        idle = (time.process_time() - began) / 1000
        print(
            f"a window every {gap_s} s, --cpu-share {share}: {num_windows - _FULL_RING} windows, "
            f"{watch.watcher.gauges.num_verdicts - judged} verdicts, "
            f"{spent / (gap_s * (num_windows - _FULL_RING)) + idle:.2%} of a core; a look at files "
            f"that stand still {1e3 * idle:.2f} ms; RSS {_rss_mb()} MB",
            flush=True,
        )
        watch.watcher.close()
    _print_stages(source, folder / "stages")


def _print_stages(source: Path, target: Path) -> None:
    """Print what reading, glancing at and judging a window cost, CPU ms, the median of eight."""
    target.mkdir()
    replay, spent = Replay(source, target), defaultdict[str, list[float]](list)
    watch = Watch.on(target, cpu_share=1.0)
    for _ in range(_FULL_RING):
        replay.step()
    watch.watcher.look()
    ring = watch.watcher.ring

    def timed(name: str, function: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = function()
        spent[name].append(1e3 * (time.process_time() - began))
        return result

    for _ in range(8):
        replay.step()
        (window,) = timed("reading", watch.watcher.files.poll)
        timed("glancing", lambda: watch.watcher.spending.push(window))  # noqa: B023
        timed("glancing again", lambda: watch.watcher.spending.is_unusual(2, 2))
        ring.push(window)
        trace = timed("joining", ring.trace)
        timeline = timed("aligning", partial(build_timeline, trace))
        seen = timed("observing", partial(observe, timeline))
        timed("judging", partial(judge, seen, ring.settings))
        timed("all of a verdict", ring.judge)
    watch.watcher.close()
    print(*(f"{name} {median(times):.1f} ms" for name, times in spent.items()), sep=", ")


def real(arguments: argparse.Namespace, folder: Path) -> None:
    """Feed a real `megascan watch` with default flags a window every --gap-s, as time passes."""
    replay = replayed(cost_job(arguments.windows), [], 1, folder)
    for _ in range(_FULL_RING):
        replay.step()
    process = subprocess.Popen(
        [sys.executable, "-m", "megascan", "watch", str(replay.target), "--json"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()  # the first verdict: imports and history are read
    began, spent, num_windows = time.monotonic(), _cpu_s(process.pid), 0
    while replay.step():
        num_windows += 1
        time.sleep(max(0.0, began + num_windows * arguments.gap_s - time.monotonic()))
    elapsed = time.monotonic() - began
    spent = _cpu_s(process.pid) - spent
    process.terminate()
    num_verdicts = process.communicate()[0].count('"event":"verdict"')
    print(
        f"a window every {arguments.gap_s} s: {num_windows} windows, {num_verdicts} verdicts, "
        f"{spent:.2f} CPU s in {elapsed:.0f} s: {spent / elapsed:.2%} of a core"
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_COMING_AND_GOING = {1: (20, 34), 6: (50, 64), 3: (80, 94)}
"""Rank: from and to which iteration it is slow."""


def kill(arguments: argparse.Namespace, folder: Path) -> None:
    """Kill a real watch again and again while faults come and go; compare told with planted."""
    faults = [
        f"rank={rank},kind=compute,factor=1.3,from={first},to={last}"
        for rank, (first, last) in _COMING_AND_GOING.items()
    ]
    replay = replayed(job_of(Layout(pp=2, dp=4), arguments.windows), faults, 1, folder)
    told, draw, num_kills = folder / "told.jsonl", random.Random(1), 0
    tell = folder / "tell.sh"
    tell.write_text(f"#!/bin/sh\ntr -d '\\n' >> {told}; echo >> {told}\n", encoding="ascii")
    tell.chmod(0o755)
    words = [sys.executable, "-m", "megascan", "watch", str(replay.target), "--exec", str(tell)]
    words += ["--cpu-share", "1", "--hang-after", "3600"]

    def start() -> tuple[subprocess.Popen[bytes], float]:
        process = subprocess.Popen([*words, "--interval", "0.1"], stdout=subprocess.DEVNULL)
        return process, time.monotonic() + draw.uniform(1.0, 8.0)

    process, killed_at = start()
    while replay.step():
        time.sleep(arguments.gap_s)
        if time.monotonic() > killed_at:
            process.kill()
            process.wait()
            num_kills += 1
            process, killed_at = start()
    process.kill()
    process.wait()
    subprocess.run([*words, "--once"], stdout=subprocess.DEVNULL, check=False)
    lines = told.read_text(encoding="utf-8").splitlines()
    events = {event["number"]: event for event in map(json.loads, lines)}
    for event in events.values():
        finding = event["finding"]
        print(event["number"], event["event"], event["id"], "ranks", finding["ranks"],
              "since", finding["since_iteration"], "last", finding["last_iteration"])  # fmt: skip
    print(f"{num_kills + 1} kills, {len(lines)} deliveries of {len(events)} events; planted on "
          f"ranks {list(_COMING_AND_GOING)}, each to be raised and cleared")  # fmt: skip


def scale(arguments: argparse.Namespace, folder: Path) -> None:
    """Look at 1,024 ranks at base; every window is judged."""
    layout = Layout(tp=8, pp=8, dp=16)
    job = job_of(
        layout, 5 * arguments.windows, num_layers=16, num_microbatches=8, interval=5, window=2,
        granularity=Granularity.BASE,
    )  # fmt: skip
    replay = replayed(job, [], 1, folder)
    before = _rss_mb()
    watch = Watch.on(replay.target, cpu_share=1.0)
    while replay.step():
        began, wall = time.process_time(), time.perf_counter()
        watch.watcher.look()
        print(
            f"CPU {time.process_time() - began:.2f} s, wall {time.perf_counter() - wall:.2f} s, "
            f"{len(watch.watcher.ring.windows)} windows of "
            f"{watch.watcher.ring.windows[-1].num_spans:,} spans in the ring, {_now_mb()} MB now "
            f"(most {_rss_mb()}, {before} before the watch began)",
            flush=True,
        )


def day(arguments: argparse.Namespace, folder: Path) -> None:
    """Watch a tiny job for very many windows, a look each; the size of the process now and then.

    By the watch's clock they come every --gap-s.
    """
    layout, began = Layout(dp=4), time.monotonic()
    job = job_of(layout, arguments.windows, num_layers=1, num_microbatches=1)
    replay = replayed(job, [], 1, folder)
    print(f"{arguments.windows} windows are written ({time.monotonic() - began:.0f} s)", flush=True)
    watch, done = Watch.on(replay.target), 0
    watch.watcher.monotonic_s = lambda: arguments.gap_s * done
    while replay.step() and time.monotonic() - began < arguments.limit_s:
        done += 1
        watch.watcher.look()
        watch.said[:] = watch.accusations
        if done % max(1, arguments.windows // 10) == 0:
            print(
                f"{done} windows, {watch.watcher.gauges.num_verdicts} verdicts: "
                f"memory {_now_mb()} MB, {time.process_time():.0f} CPU s, "
                f"{time.monotonic() - began:.0f} s, {len(watch.said)} accusations",
                flush=True,
            )


_WINDOWS = {"healthy": 10_000, "cost": 40, "real": 40, "kill": 120, "scale": 6, "day": 10_000}


_ALONE = {"cost": cost, "real": real, "kill": kill, "scale": scale, "day": day}
"""Measurements of one watch."""


def _rss_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _now_mb() -> int:
    """Memory of this process now, without the files that are mapped to be replayed."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) >> 10


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["healthy", "delay", *_ALONE])
    parser.add_argument("--windows", type=int, default=0, help="of the job, or of all jobs")
    parser.add_argument("--repetitions", type=int, default=4, help="delay: of each kind of job")
    parser.add_argument(
        "--gap-s", type=float, default=5.0, help="real, kill, day: between two windows"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="end after this")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="healthy, delay: go on with it")
    arguments = parser.parse_args()
    arguments.windows = arguments.windows or _WINDOWS.get(arguments.what, 0)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    match arguments.what:
        case "healthy":
            healthy(arguments)
        case "delay":
            delay(arguments)
        case what:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                _ALONE[what](arguments, folder)


if __name__ == "__main__":
    main()
