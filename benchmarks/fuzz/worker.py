"""python -m benchmarks.fuzz.worker SEED FIRST COUNT STEP FOLDER: tries some inputs of a campaign.

A line of JSON on stdout for each outcome that is neither a result nor one sentence; the last line
counts the outcomes. The number of the input at work stands in FOLDER/at, for the case that the
process dies of it.
"""

from __future__ import annotations

import json
import resource
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from aggregate import build_timeline, render_text, summarise
from benchmarks.fuzz.inputs import Inputs
from benchmarks.fuzz.samples import Sample, make_samples
from megascan.errors import MegaScanError
from megascan.export import write_timeline
from megascan.reader import read_timeline, read_trace
from megascan.viewer import read_record

SECONDS_AN_INPUT = 20
MOST_BYTES = 6 << 30
LONGEST_MESSAGE = 1000
_WRITTEN_EVERY = 25


class _TookTooLongError(Exception):
    pass


def main(words: list[str]) -> int:
    """Try the inputs FIRST, FIRST + STEP, …, COUNT of them."""
    seed, first, count, step = map(int, words[:4])
    place = Path(words[4])
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    signal.signal(signal.SIGALRM, _too_long)
    shutil.rmtree(place, ignore_errors=True)
    samples = make_samples(place / "samples")
    inputs = Inputs(samples, seed)
    for sample in samples:
        fault = trouble(sample, sample.content, place / "healthy", written=True)[1]
        if fault:
            raise RuntimeError(f"{sample.name} is not healthy: {fault}")
    outcomes: Counter[str] = Counter()
    for number in range(first, first + count * step, step):
        (place / "at").write_text(str(number))
        sample, content = inputs[number]
        outcome, fault = trouble(
            sample, content, place / "input", written=number % _WRITTEN_EVERY == 0
        )
        outcomes[outcome] += 1
        if fault:
            print(json.dumps({"input": number, "sample": sample.name, "fault": fault}), flush=True)
    print(json.dumps({"outcomes": outcomes}))
    return 0


def trouble(sample: Sample, content: bytes, folder: Path, *, written: bool) -> tuple[str, str]:
    """What came of an input ("read", "refused" or "fault"), and what was wrong with that."""
    shutil.rmtree(folder, ignore_errors=True)
    sample.write(folder, content)
    try:
        with _limited(SECONDS_AN_INPUT):
            _use(sample, folder, written=written)
    except MegaScanError as error:
        fault = _complaint(str(error))
        return ("fault" if fault else "refused"), fault
    except BaseException:
        return "fault", traceback.format_exc()
    return "read", ""


def _use(sample: Sample, folder: Path, *, written: bool) -> None:
    """Everything that is done with what was read; a rank's file also by itself."""
    if sample.is_trace:
        timeline = build_timeline(read_trace(folder))
    else:
        path = folder / sample.file_name
        timeline = read_timeline(path)
        read_record(path)
    timeline.spans.validate(full=True)
    summary = summarise(timeline)
    render_text(summary)
    json.dumps(summary.to_json(), allow_nan=False)
    if written:
        for suffix in (".json", ".pftrace"):
            write_timeline(timeline, folder / f"out{suffix}")


def _complaint(message: str) -> str:
    """What is wrong with an error's message, "" for one sentence."""
    if "\n" in message:
        return f"several lines: {message}"
    if len(message) > LONGEST_MESSAGE:
        return f"{len(message)} characters: {message[:200]}"
    return "" if "; " in message else f"does not say what to do: {message}"


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise _TookTooLongError(f"signal {number} after {SECONDS_AN_INPUT} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
