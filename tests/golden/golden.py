"""Freeze what the commands write today, and compare what they write later with it.

Each case of cases.toml runs the real commands in a temporary folder, all of them in one process
(`megascan.cli.main:main`, one command after the other). What they said goes to transcript.txt, the
results as they are, timelines, pages and pictures as digests of their content (and of a page the
text one sees). Nothing of the product is imported here, but in that process (driver.py).

examples:
  python tests/golden/golden.py --check
  python tests/golden/golden.py --write --case only-tp4
"""

from __future__ import annotations

import argparse
import difflib
import gzip
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXPECTED = HERE / "expected"
PRODUCTION = ROOT.parent / "shared" / "data" / "whatif"
NOT_HERE = 3  # exit code: the case's input is not on this machine

_DIGESTED = ("timeline", "ideal")  # what JSON of these names holds is too long to keep in full
_MAX_RELATIVE_ERROR = 1e-9  # of fractions in JSON: processors differ in the last bits of a sum
_MAX_ABSOLUTE_ERROR = 1e-12
_FULL_PRECISION = re.compile(rb"-?\b\d+\.\d{12,}(?:e[+-]?\d+)?\b")
_FRACTION = re.compile(r"-?\b\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)\b")
_MAX_LINES_SHOWN = 40


class Commands:
    """One process in which commands run one after the other, as starting each takes a second."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, HERE / "driver.py"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
        )

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, command: str, folder: Path) -> str:
        """Run one command in `folder`/work; return what a terminal would show."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([str(folder / "work"), shlex.split(command)]) + "\n")
        self._process.stdin.flush()
        code = self._process.stdout.readline().strip()
        said = (folder / "stdout").read_text()
        errors = (folder / "stderr").read_text()
        if not code:
            raise RuntimeError(f"megascan {command} did not return:\n{said}{errors}")
        said += "".join(f"stderr: {line}" for line in errors.splitlines(keepends=True))
        shown = f"$ megascan {command.strip()}\n{said}exit code {code}\n\n"
        return shown.replace(str(folder), "FOLDER")


def main() -> int:
    """Return 0 when all is as frozen, 1 when not, 3 when the input of the one case is absent."""
    cases = tomllib.loads((HERE / "cases.toml").read_text())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="freeze")
    action.add_argument("--check", action="store_true", help="compare with what is frozen")
    parser.add_argument("--case", choices=cases, metavar="NAME", help="this one only")
    arguments = parser.parse_args()
    codes = {}
    with Commands() as commands:
        for name in [arguments.case] if arguments.case else cases:
            got = outputs_of(cases[name], commands)
            differences = [] if arguments.write or not got else differences_from_frozen(name, got)
            if arguments.write and got:
                _write(EXPECTED / name, got)
            codes[name] = int(bool(differences)) if got else NOT_HERE
            print(f"{name}: {_verdict(codes[name], write=arguments.write)}", *differences, sep="\n")
    if arguments.case:
        return codes[arguments.case]
    differing = [name for name, code in codes.items() if code == 1]
    print(f"{len(codes)} cases, {len(differing)} differ: {', '.join(differing) or 'none'}")
    return int(bool(differing))


def _verdict(code: int, *, write: bool) -> str:
    if code == NOT_HERE:
        return f"not run, {PRODUCTION} is absent"
    return "differs" if code else "frozen" if write else "as frozen"


def outputs_of(case: Mapping[str, Any], commands: Commands) -> dict[str, str]:
    """Return what the commands wrote, file name to text; nothing when the source is not here."""
    if "op_table" in case and not PRODUCTION.is_dir():
        return {}
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        return _outputs_in(Path(folder), case, commands)


def _outputs_in(folder: Path, case: Mapping[str, Any], commands: Commands) -> dict[str, str]:
    work = folder / "work"
    work.mkdir()
    source = _lay_out(case, work)
    given = {path.name for path in work.iterdir()}
    transcript, digests = "", {}
    if "simulate" in case:
        transcript = commands.run(f"simulate {case['simulate']} -o input", folder)
        digests["input"] = _digest_of_folder(work / "input")
    if "cut" in case:
        os.truncate(work / "input" / case["cut"]["file"], case["cut"]["bytes"])
    for command in [*_commands(source, case.get("flags", "")), *case.get("also", [])]:
        transcript += commands.run(command, folder)
    got = {"transcript.txt": transcript}
    written = [path for path in work.iterdir() if path.is_file() and path.name not in given]
    for path in sorted(written, key=lambda path: (path.name.startswith("detect-of"), path.name)):
        _take_in(path, got, digests)
    return {**got, "digests.json": json.dumps(digests, indent=1, sort_keys=True) + "\n"}


def _lay_out(case: Mapping[str, Any], work: Path) -> str:
    """Put the source into `work`; return its name there."""
    if "timeline" in case:
        return Path(shutil.copy(ROOT / "examples" / case["timeline"], work)).name
    if "op_table" in case:
        for name in (f"trace-{case['op_table']}.parquet", f"meta-{case['op_table']}.yaml"):
            shutil.copy(PRODUCTION / name, work)
        return f"trace-{case['op_table']}.parquet"
    if "folder" in case:
        shutil.copytree(HERE / "inputs" / case["folder"], work / "input")
    return "input"


def _commands(source: str, flags: str) -> Iterator[str]:
    """Yield what is asked of every source; of a folder its timelines are judged, too."""
    if source == "input":
        yield f"aggregate -b input -d -o timeline.json --json summary.json {flags}"
        for suffix in (".json.gz", ".pftrace"):
            yield f"aggregate -b input -o timeline{suffix} {flags}"
            yield f"detect timeline{suffix} --json detect-of-timeline{suffix}.json"
    yield f"detect {source} --json detect.json {flags}"
    ideal = "" if source.endswith(".parquet") else "--ideal ideal.json"
    yield f"whatif {source} --json whatif.json --heat-map heat.svg {ideal} {flags}"
    yield f"report {source} -o report.html {flags}"


def _take_in(path: Path, texts: dict[str, str], digests: dict[str, str]) -> None:
    """Keep the file in full or its digest, and of a page what one sees."""
    content = path.read_bytes()
    if path.suffix == ".json" and not path.name.startswith(_DIGESTED):
        text = content.decode()
        if path.name.startswith("detect-of") and text == texts.get("detect.json"):
            digests[path.name] = "equal to detect.json"
        else:
            texts[path.name] = text
        return
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    digests[path.name] = _digest(_FULL_PRECISION.sub(_six_digits, content))
    if path.suffix == ".html":
        texts[f"{path.stem}.txt"] = _visible_text(content.decode())


def _six_digits(fraction: re.Match[bytes]) -> bytes:
    """Round a number written with all its digits: the last of them are the processor's."""
    return f"{float(fraction[0]):.6g}".encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of_folder(folder: Path) -> str:
    files = sorted(folder.iterdir())
    return _digest(
        "".join(f"{file.name} {_digest(file.read_bytes())}\n" for file in files).encode()
    )


class _Visible(HTMLParser):
    """Collects the text of a page, one line an element."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "script")

    def handle_data(self, data: str) -> None:
        if words := " ".join(data.split()):
            self.lines += [] if self._hidden else [words]


def _visible_text(page: str) -> str:
    parser = _Visible()
    parser.feed(page)
    return "\n".join(parser.lines) + "\n"


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / name).write_text(text)


def differences_from_frozen(name: str, got: Mapping[str, str]) -> list[str]:
    """Return the lines that say where `got` is not what is frozen for the case `name`."""
    expected = {path.name: path.read_text() for path in (EXPECTED / name).glob("*")}
    return list(_differences(expected, got))


def _differences(expected: Mapping[str, str], got: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(expected.keys() | got.keys()):
        if name not in got or name not in expected:
            yield f"  {name}: {'not written any more' if name in expected else 'not expected'}"
        elif not _is_same(name, expected[name], got[name]):
            lines = difflib.unified_diff(
                expected[name].splitlines(),
                got[name].splitlines(),
                f"expected/{name}",
                name,
                n=1,
                lineterm="",
            )
            yield from (f"  {line}" for line in list(lines)[:_MAX_LINES_SHOWN])


def _is_same(name: str, expected: str, got: str) -> bool:
    """Tell whether two texts agree: to the letter, fractions in JSON to 9 digits."""
    if expected == got or not name.endswith(".json"):
        return expected == got
    if _FRACTION.sub("x", expected) != _FRACTION.sub("x", got):
        return False
    pairs = zip(_FRACTION.findall(expected), _FRACTION.findall(got), strict=True)
    return all(
        math.isclose(
            float(one), float(other), rel_tol=_MAX_RELATIVE_ERROR, abs_tol=_MAX_ABSOLUTE_ERROR
        )
        for one, other in pairs
    )


if __name__ == "__main__":
    sys.exit(main())
