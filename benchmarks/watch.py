"""What the live watch sees, how soon, and what it costs.

    python -m benchmarks.watch healthy --windows 1000      accusations among healthy windows
    python -m benchmarks.watch delay                       iterations from onset to alert
    python -m benchmarks.watch cost                        CPU at 8 ranks with default trace flags
    python -m benchmarks.watch scale                       a window of 1,024 ranks at `base`
    python -m benchmarks.watch day --windows 10000         memory over a day's windows

Rank files of simulated jobs are written window by window, as a running job would, and a `Watcher`
looks after each. CPU time is this process's; results are in benchmarks/results/watch.md.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detect import DetectorSettings
from megascan.schema import Granularity
from megascan.simulate import (
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
from megascan.watch.channels import Outbox
from megascan.watch.state import StateFile
from megascan.watch.watcher import Watcher, WatchSettings

_MARK = b'"name":"megascan_window"'


@dataclass
class Replay:
    """Rank files that grow a window a step."""

    source: Path
    target: Path
    _offset: dict[str, int] = field(default_factory=dict)

    def step(self) -> bool:
        """Append each rank's next window; False at the end."""
        grown = False
        for path in sorted(self.source.glob("benchmark-data-*.json")):
            begin = self._offset.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(begin)
                text, at = b"", -1
                while at < 0 and (piece := file.read(1 << 20)):
                    text += piece
                    at = text.find(_MARK)
                if at < 0:
                    continue
                while (end := text.find(b"\n", at)) < 0 and (piece := file.read(1 << 16)):
                    text += piece
            end = len(text) if end < 0 else end - (text[end - 1 : end] == b",")
            with (self.target / path.name).open("ab") as file:
                file.write(text[:end])
            self._offset[path.name] = begin + end
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
    "uneven chips 1 %": {"noise": Noise(device_ratio=0.01)},
    "noisy links": {"noise": Noise(transfer_ratio=0.3), "costs": communication_heavy},
    "uneven sequences": {"imbalance": Imbalance(sequence_ratio=0.15)},
    "heavy last stage": {"imbalance": Imbalance(stage_ratio={1: 1.4})},
    "collector on every rank": {"imbalance": Imbalance(gc_interval=10)},
    "checkpoints": {"imbalance": Imbalance(checkpoint_interval=12)},
    "CPU": {"device": "cpu"},
}
_LAYOUTS = (Layout(pp=2, dp=4), Layout(dp=8), Layout(tp=2, dp=4))
_ITERATIONS = 60
_WINDOWS_A_LOOK = 10
_FIRST_LOOK = 20


def healthy(num_windows: int, limit_s: float, folder: Path) -> None:
    """Watch healthy jobs of all laws and layouts, one after the other."""
    began, counted, accused, seed = time.monotonic(), dict.fromkeys(_LAWS, 0), [], 100
    while sum(counted.values()) < num_windows and time.monotonic() - began < limit_s:
        for name, values in _LAWS.items():
            seed += 1
            layout = _LAYOUTS[seed % len(_LAYOUTS)]
            if name == "heavy last stage":
                layout = _LAYOUTS[0]
            replay = replayed(job_of(layout, _ITERATIONS, **values), [], seed, folder)
            watch = Watch.on(replay.target)
            while replay.step():
                watch.watcher.look()
                counted[name] += 1
            accused += [(name, str(layout), seed, one["text"]) for one in watch.accusations]
            watch.watcher.close()
            print(f"{sum(counted.values())} windows, {len(accused)} accusations", flush=True)
    for name, count in counted.items():
        print(f"{name}: {count} windows, {sum(one[0] == name for one in accused)} accusations")
    print(*accused, sep="\n")


def delay(folder: Path) -> None:
    """Plant faults from iteration 25 on; count windows until the alert, and time that look."""
    for factor in (1.05, 1.1, 1.3):
        for seed in range(6):
            rank = (3 * seed + 1) % 8
            fault = f"rank={rank},kind=compute,factor={factor},from=25"
            layout = _LAYOUTS[seed % len(_LAYOUTS)]
            replay = replayed(job_of(layout, 36), [fault], seed, folder)
            watch, iteration = Watch.on(replay.target), 0
            while replay.step():
                iteration += 1
                if iteration < _FIRST_LOOK:
                    continue
                began = time.perf_counter()
                watch.watcher.look()
                right = [one for one in watch.accusations if rank in one["finding"]["ranks"]]
                if right:
                    took = time.perf_counter() - began
                    print(f"factor {factor}, {layout}: {iteration - 24} iterations, {took:.2f} s")
                    break
            else:
                print(f"factor {factor}, {layout}: not raised within 12 iterations")
            sys.stdout.flush()
            watch.watcher.close()


def cost(folder: Path) -> None:
    """Look at 8 ranks, granularity full, interval 5, window 2; then at files that stand still."""
    layout = Layout(tp=2, pp=2, dp=2)
    job = job_of(layout, 120, num_layers=16, num_microbatches=8, interval=5, window=2, device="cpu")
    replay = replayed(job, [], 1, folder)
    watch, spent = Watch.on(replay.target), []
    while replay.step():
        began = time.process_time()
        watch.watcher.look()
        spent.append(time.process_time() - began)
    steady = sorted(spent[12:])
    began = time.process_time()
    for _ in range(1000):
        watch.watcher.look()
    idle = (time.process_time() - began) / 1000
    middle = steady[len(steady) // 2]
    print(
        f"{len(steady)} windows: CPU median {middle:.3f} s, most {steady[-1]:.3f} s; "
        f"a look at files that stand still {1e3 * idle:.2f} ms; RSS {_rss_mb()} MB"
    )
    for gap in (5, 10, 20, 60):
        print(f"a window every {gap} s: {middle / gap + idle:.2%} of a core")


def scale(folder: Path) -> None:
    """Look at 1,024 ranks at base."""
    layout = Layout(tp=8, pp=8, dp=16)
    job = job_of(
        layout, 22, num_layers=16, num_microbatches=8, interval=5, window=2,
        granularity=Granularity.BASE,
    )  # fmt: skip
    replay = replayed(job, [], 1, folder)
    before = _rss_mb()
    watch = Watch.on(replay.target)
    while replay.step():
        began, wall = time.process_time(), time.perf_counter()
        watch.watcher.look()
        print(
            f"CPU {time.process_time() - began:.2f} s, wall {time.perf_counter() - wall:.2f} s, "
            f"{len(watch.watcher.ring.windows)} windows of "
            f"{watch.watcher.ring.windows[-1].num_spans:,} spans in the ring, RSS {_now_mb()} MB "
            f"(most {_rss_mb()}, {before} before the watch began)",
            flush=True,
        )


def day(num_windows: int, folder: Path) -> None:
    """Watch a tiny job for very many windows, ten a look; the size of the process now and then."""
    layout = Layout(dp=4)
    job = job_of(layout, num_windows, num_layers=1, num_microbatches=1)
    replay = replayed(job, [], 1, folder)
    watch, done, began = Watch.on(replay.target), 0, time.process_time()
    while replay.step():
        done += 1
        if done % _WINDOWS_A_LOOK:
            continue
        watch.watcher.look()
        watch.said[:] = watch.accusations
        if done % max(_WINDOWS_A_LOOK, num_windows // 10) == 0:
            print(
                f"{done} windows, {watch.watcher.gauges.num_verdicts} verdicts: "
                f"RSS {_now_mb()} MB, "
                f"{time.process_time() - began:.0f} CPU s, {len(watch.said)} accusations",
                flush=True,
            )


def _rss_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def _now_mb() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() >> 20


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["healthy", "delay", "cost", "scale", "day"])
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="healthy: end after this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        match arguments.what:
            case "healthy":
                healthy(arguments.windows, arguments.limit_s, folder)
            case "day":
                day(arguments.windows, folder)
            case what:
                {"delay": delay, "cost": cost, "scale": scale}[what](folder)


if __name__ == "__main__":
    main()
