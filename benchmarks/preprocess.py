"""How fast is preprocessing, does it use its cores, and does its memory stay flat?

    python -m benchmarks.preprocess [--megabytes 24] [--rounds 3] [-o RESULT.md]

Real English (`training.sample_corpus`, its own BPE of 8,192 ids, repeated up to the size), by the
real command with one worker and one a core, plain, gzip and xz, and beside it a stand-in for
Megatron-LM's own tool, whose file is in no package: a pool's `imap` over lines in chunks of 32,
json, the same tokenizer's `encode`, megatron.core's own `IndexedDatasetBuilder`. Both must write
the same bytes.

Wall times count from the start of the process to its end. Rounds take turns, the quickest of each
counts; CPU seconds are of the process and its workers together. How far it scales beyond the cores
that are here is told by CPU time: what a further megabyte costs the one process that reads and
writes, and what it costs a worker.
"""

from __future__ import annotations

import argparse
import filecmp
import gzip
import json
import lzma
import multiprocessing
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.jobs import publish
from training.data.tokenizers import Tokenizer, load_gpt2
from training.sample_corpus import main as sample_corpus

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data, 6, mtime=0),
    ".xz": lambda data: lzma.compress(data, preset=1),
}


# Runs a module and writes down how large this process ever was, and the CPU seconds of this process
# and of its workers. (The kernel's ru_maxrss will not do: it counts the parent in whose memory a
# process was started.)
NOTING = """
import pathlib, re, resource, runpy, sys
place, module = sys.argv.pop(1), sys.argv[1]
sys.argv[:2] = [module]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
finally:
    status = pathlib.Path("/proc/self/status").read_text()
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = [usage.ru_utime + usage.ru_stime for usage in both]
    peak = re.search(r"VmHWM:\\s+(\\d+)", status)[1]
    pathlib.Path(place).write_text(f"{peak} {seconds[0]} {seconds[1]}")
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run: wall seconds, and CPU seconds of the process and its workers."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command line, and how the tables call it."""

    name: str
    num_workers: int
    size_bytes: int
    command: tuple[str, ...]
    prefix: Path


def measure(case: Case) -> Measured:
    """Run a command; its failure ends the benchmark."""
    started = time.monotonic()
    usage = _run(case, ("-m", *case.command))
    return Measured(wall_s=time.monotonic() - started, cpu_s=usage.ru_utime + usage.ru_stime)


@dataclass(frozen=True, kw_only=True)
class Inside:
    """One run seen from inside: the first process's largest MiB, CPU seconds of it and the rest."""

    peak_mib: float
    own_cpu_s: float
    workers_cpu_s: float


def look_inside(case: Case) -> Inside:
    """Run a command that says at its end what it has used."""
    place = case.prefix.with_suffix(".used")
    _run(case, ("-c", NOTING, str(place), *case.command))
    peak_kib, own_s, workers_s = map(float, place.read_text().split())
    return Inside(peak_mib=peak_kib / 1024, own_cpu_s=own_s, workers_cpu_s=workers_s)


def _run(case: Case, words: tuple[str, ...]) -> resource.struct_rusage:
    for path in case.prefix.parent.glob(f"{case.prefix.name}[_.]*"):
        path.unlink()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = os.posix_spawn(
        sys.executable, [sys.executable, *words], environment,
        file_actions=[(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_WRONLY, 0)
                      for descriptor in (1, 2)],
    )  # fmt: skip
    _, status, usage = os.wait4(process, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} ended with {status}")
    return usage


def stand_in(source: str, prefix: str, folder: str, num_workers: int) -> None:
    """The loop that Megatron-LM's tool has, made of public parts."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    vocab_size = load_gpt2(*_tokenizer_files(folder)).vocab_size
    dtype = DType.optimal_dtype(vocab_size)
    builder = IndexedDatasetBuilder(f"{prefix}_text_document.bin", dtype=dtype)
    with multiprocessing.Pool(num_workers, _load, (folder,)) as pool, Path(source).open() as lines:
        for ids in pool.imap(_encode, lines, 32):
            builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}_text_document.idx")


_of_worker: dict[str, Tokenizer] = {}


def _load(folder: str) -> None:
    _of_worker["tokenizer"] = load_gpt2(*_tokenizer_files(folder))


def _encode(line: str) -> list[int]:
    tokenizer = _of_worker["tokenizer"]
    text = json.loads(line)["text"]
    return [*tokenizer._library.encode(text).ids, tokenizer.eod]  # type: ignore[attr-defined]


def _tokenizer_files(folder: str) -> tuple[str, str]:
    return f"{folder}/vocab.json", f"{folder}/merges.txt"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the corpus, measure, print the page."""
    options = _parser().parse_args(arguments)
    if options.stand_in:
        source, prefix, folder, num_workers = options.stand_in
        stand_in(source, prefix, folder, int(num_workers))
        return
    with TemporaryDirectory() as name:
        page = _page(Path(name), options)
    publish(page, options.output)


def _page(folder: Path, options: argparse.Namespace) -> str:
    sample_corpus(["-o", str(folder), "--vocab-size", "8192", "--max-megabytes", "12"])
    corpus = (folder / "corpus.jsonl").read_bytes()
    cores = max(2, len(os.sched_getaffinity(0)))
    speed = [
        *[_ours(folder, _sized(folder, corpus, options.megabytes, suffix), suffix, workers)
          for suffix, workers in (("", 1), ("", cores), (".gz", cores), (".xz", cores))],
        *[_theirs(folder, _sized(folder, corpus, options.megabytes, ""), workers)
          for workers in (1, cores)],
    ]  # fmt: skip
    best = {case: measure(case) for case in speed}
    for _ in range(options.rounds - 1):
        for case in speed:
            best[case] = min(best[case], measure(case), key=lambda run: run.wall_s)
    _check_same([case.prefix for case in speed])
    growth = []
    for factor in (1, 2, 4):
        source = _sized(folder, corpus, options.megabytes * factor, "")
        growth += [_ours(folder, source, "", 1), _theirs(folder, source, 1)]
    feeding = {suffix: [
        look_inside(_ours(folder, _sized(folder, corpus, megabytes, suffix), suffix, 2))
        for megabytes in (options.megabytes, 3 * options.megabytes)
    ] for suffix in PACKERS}  # fmt: skip
    return "\n".join([
        *_head(options), "", *_speed_table(best), "", *_scaling(best), "",
        *_feeding_table(feeding, 2 * options.megabytes), "",
        *_growth_table({case: look_inside(case).peak_mib for case in growth}), "", *_COMPARED, "",
    ])  # fmt: skip


def _sized(folder: Path, corpus: bytes, megabytes: int, suffix: str) -> Path:
    path = folder / f"in-{megabytes}.jsonl{suffix}"
    if not path.exists():
        whole = corpus * (1 + int(megabytes * 1e6) // len(corpus))
        cut = whole.rindex(b"\n", 0, int(megabytes * 1e6)) + 1
        path.write_bytes(PACKERS[suffix](whole[:cut]))
    return path


def _ours(folder: Path, source: Path, suffix: str, num_workers: int) -> Case:
    prefix = folder / f"ours{suffix.replace('.', '-')}-{num_workers}"
    vocab, merges = _tokenizer_files(str(folder))
    words = ("training.preprocess_data", "--input", str(source), "--append-eod", "--workers",
             str(num_workers), "--output-prefix", str(prefix), "--tokenizer-type",
             "GPT2BPETokenizer", "--vocab-file", vocab, "--merge-file", merges)  # fmt: skip
    return Case(name=f"this project, .jsonl{suffix}", num_workers=num_workers, command=words,
                prefix=prefix, size_bytes=_plain_bytes(source))  # fmt: skip


def _theirs(folder: Path, source: Path, num_workers: int) -> Case:
    prefix = folder / f"theirs-{num_workers}"
    words = ("benchmarks.preprocess", "--stand-in", str(source), str(prefix), str(folder),
             str(num_workers))  # fmt: skip
    return Case(name="stand-in for Megatron-LM's, .jsonl", num_workers=num_workers, command=words,
                prefix=prefix, size_bytes=_plain_bytes(source))  # fmt: skip


def _plain_bytes(source: Path) -> int:
    name = source.name.removesuffix(".gz").removesuffix(".xz")
    return int(name.removeprefix("in-").removesuffix(".jsonl")) * 1_000_000


def _check_same(prefixes: Sequence[Path]) -> None:
    for prefix in prefixes[1:]:
        for suffix in ("bin", "idx"):
            one, other = (f"{path}_text_document.{suffix}" for path in (prefixes[0], prefix))
            if not filecmp.cmp(one, other, shallow=False):
                raise SystemExit(f"{one} and {other} differ")


def _head(options: argparse.Namespace) -> list[str]:
    return [
        "# Preprocessing: speed, cores, memory",
        "",
        f"`python -m benchmarks.preprocess --megabytes {options.megabytes} --rounds "
        f"{options.rounds}` on {os.cpu_count()} cores ({platform.processor() or platform.machine()}"
        f", Python {platform.python_version()}; load at the end {os.getloadavg()[0]:.1f}). "
        f"{options.megabytes} MB of English JSON Lines with a BPE of 8,192 ids; MB are unpacked "
        "input; all outputs were compared and are the same bytes.",
    ]


def _speed_table(runs: dict[Case, Measured]) -> list[str]:
    rows = [
        f"| {case.name} | {case.num_workers} | {case.size_bytes / 1e6 / run.wall_s:.2f} "
        f"| {case.size_bytes / 1e6 / run.cpu_s:.2f} | {run.cpu_s / run.wall_s:.2f} |"
        for case, run in runs.items()
    ]
    return ["| what | workers | MB/s | MB per CPU second | cores in use |", "|---|---|---|---|---|",
            *rows]  # fmt: skip


def _scaling(runs: dict[Case, Measured]) -> list[str]:
    """Wall time with all cores against one worker, for both tools, plain input."""
    lines = []
    for name in ("this project, .jsonl", "stand-in for Megatron-LM's, .jsonl"):
        one, many = (case for case in runs if case.name == name)
        gain = runs[one].wall_s / runs[many].wall_s
        lines.append(f"- {name}: {many.num_workers} workers are {gain:.2f} times as fast as one.")
    return lines


def _feeding_table(pairs: dict[str, list[Inside]], megabytes: int) -> list[str]:
    """What a further megabyte costs, which says how many workers one process can feed.

    Each pair is a run of some size and one of ``megabytes`` more; starting costs both alike.
    """
    rows = []
    for suffix, (small, large) in pairs.items():
        own = (large.own_cpu_s - small.own_cpu_s) / megabytes
        work = (large.workers_cpu_s - small.workers_cpu_s) / megabytes
        rows.append(f"| .jsonl{suffix} | {own * 1e3:.1f} | {work * 1e3:.0f} | {work / own:.0f} |")
    return [
        "CPU time of a further MB, start-up taken out. The last column is how many workers one "
        "process can feed before it is what limits them:",
        "",
        "| input | reading and writing, ms | tokenizing, ms | workers fed |",
        "|---|---|---|---|",
        *rows,
    ]


_COMPARED = (
    "What was compared: Megatron-LM's tool is `tools/preprocess_data.py` of its repository; the "
    "package megatron-core does not carry it, nor `megatron.training`, which it imports, so it "
    "cannot run beside an installed megatron-core. The stand-in is its loop of public parts: "
    "`multiprocessing.Pool.imap` over the lines in chunks of 32, `json.loads`, the tokenizer, "
    "`IndexedDatasetBuilder.add_document` in the first process. It has the tokenizer of this "
    "project's command. Its CPU time and memory include importing torch and megatron.core, once "
    "in the first process.",
)


def _growth_table(peaks: dict[Case, float]) -> list[str]:
    rows = [
        f"| {case.name} | {case.size_bytes / 1e6:.0f} | {peak:.0f} |"
        for case, peak in sorted(peaks.items(), key=lambda item: (item[0].name, item[0].size_bytes))
    ]
    return ["One worker, growing input:", "", "| what | MB | first process, MiB at most |",
            "|---|---|---|", *rows]  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--megabytes", type=int, default=24, metavar="N", help="size of the input")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the page there")
    parser.add_argument("--stand-in", nargs=4, metavar="WORD", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
