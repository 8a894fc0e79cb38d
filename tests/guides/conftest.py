"""The guides of docs/guides are executed, block by block, as a reader would type them.

The convention, for whoever writes a guide
------------------------------------------
Every fenced block has a mark on the line above it, an HTML comment that no reader sees:

    <!-- test: run -->
    ```bash
    bash scripts/run_single_gpt.sh --num-gpus 2 -- --train-iters 6
    ```

`<!-- test: MARK [OPTION…][: REASON] -->`, with one MARK of

- `run`      bash executes it for real and it must end with exit code 0.
- `dry-run`  bash executes it with MEGASCAN_DRY_RUN=1, which our scripts take as `--dry-run`.
             For what needs a cluster, GPUs or an hour.
- `syntax`   it is parsed only, and the paths of this repository that it names must exist. Needs a
             REASON. `python`, `json`, `yaml` and `toml` blocks are parsed in their language.
- `output`   what the blocks executed so far on this page printed. Its lines must be found there in
             this order; a number stands for any number, a line `…` for any lines, `…` at the end
             of a line for its rest. With the option `exact` numbers must be the same, too.
- `none`     nothing to check (a picture in characters, a fragment). Needs a REASON; a `bash` block
             cannot have it.

Options of `run` and `dry-run`: `timeout=SECONDS` (60), `exit=CODE` (0), `distributed` (starts
several ranks: the page's test gets that pytest mark), `background` (started, and waited for when
the next block without `background` is done), `needs=PROGRAM,…` (parsed only, with a warning, on a
machine that lacks one).

Where blocks run: in one sandbox a page, a folder that looks like a checkout (copies of scripts/,
docker/ and docs/, links to the packages), so nothing is written into the repository. The blocks of
a page run in order; files, exported variables and the current folder carry over. `python`,
`megascan` and `torchrun` are those of the interpreter that runs the tests (forked from one that has
imported the packages: tests/warm_python.py), there are no GPUs, and
MEGASCAN_PYTHON is set, so that nothing is installed. Programs that a machine without a cluster
lacks are replaced by the stand-ins of tests/guides/stand_ins and tests/scripts/stand_ins (put
first on the PATH in `run` and `dry-run` alike): an executable file there, named like the program.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import ranks

REPOSITORY = Path(__file__).parents[2]
GUIDES = REPOSITORY / "docs" / "guides"
STAND_INS = (REPOSITORY / "tests/guides/stand_ins", REPOSITORY / "tests/scripts/stand_ins")
COPIED = ("scripts", "docker", "docs")
LINKED = ("megascan", "training", "aggregate", "detect", "megascope", "benchmarks", "aggregate.py",
          "README.md", "pyproject.toml", "hatch_build.py", "constraints.txt", "LICENSE",
          "CHANGELOG.md")  # fmt: skip

OPTIONS = {
    "run": {"timeout", "exit", "distributed", "background", "needs"},
    "dry-run": {"timeout", "exit", "distributed", "background", "needs"},
    "output": {"exact"},
    "syntax": set[str](),
    "none": set[str](),
}
MARKS = tuple(OPTIONS)
SHELLS = ("bash", "sh", "shell", "console")
MARK = re.compile(r"^ *<!-- test: (?P<words>[^:>]+?)(?:: (?P<reason>[^>]+))? -->$")
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<language>[\w-]*)")
OUR_PATH = re.compile(r"(?<![\w./$}-])(?:scripts|docker|docs|tests|benchmarks)/[\w./-]*\w")
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?")


class GuideError(AssertionError):
    """A guide that does not do what it says, with the page and line of the block."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block and its mark; `line` is that of the opening fence, from 1."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    reason: str
    options: dict[str, str] = field(default_factory=dict)

    def error(self, what: str) -> GuideError:
        """An error that says where the block stands."""
        return GuideError(f"{self.page}:{self.line}: {what}\n{self.text}")


def read_blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page; GuideError for one without a mark that fits it."""
    lines = page.read_text(encoding="utf-8").splitlines()
    blocks, number = [], 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if not fence:
            number += 1
            continue
        end = number + 1
        while end < len(lines) and lines[end].strip() != fence["ticks"]:
            end += 1
        indent = len(fence["indent"])
        text = "\n".join(line[indent:] for line in lines[number + 1 : end]) + "\n"
        above = lines[number - 1] if number else ""
        blocks.append(_marked(page.name, number + 1, fence["language"], text, above))
        number = end + 1
    return blocks


def _marked(page: str, line: int, language: str, text: str, above: str) -> Block:
    found = MARK.match(above)
    words = found["words"].split() if found else [""]
    options = dict(word.partition("=")[::2] for word in words[1:])
    reason = (found["reason"] or "").strip() if found else ""
    block = Block(page=page, line=line, language=language, text=text, mark=words[0], reason=reason,
                  options=options)  # fmt: skip
    if block.mark not in MARKS:
        raise block.error(f"this block needs a mark on the line above: <!-- test: {MARKS} -->")
    if set(options) - OPTIONS[block.mark]:
        raise block.error(f"options {sorted(options)} do not belong to mark {block.mark}")
    if block.mark in ("syntax", "none") and not reason:
        raise block.error(f"mark {block.mark} needs a reason: <!-- test: {block.mark}: why -->")
    if block.mark in ("run", "dry-run") and language not in SHELLS:
        raise block.error(f"only shell blocks can be executed, this one is {language or 'plain'}")
    if block.mark == "none" and language in SHELLS:
        raise block.error("a shell block is executed, or at least parsed: mark it otherwise")
    return block


def check_syntax(block: Block) -> None:
    """Parse a block in its language."""
    try:
        if block.language in SHELLS:
            done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
            if done.returncode:
                raise block.error(done.stderr)
        elif block.language == "python":
            ast.parse(block.text)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language in ("yaml", "yml"):
            list(pytest.importorskip("yaml").safe_load_all(block.text))
    except (SyntaxError, ValueError) as error:
        raise block.error(f"does not parse as {block.language}: {error}") from error


def check_paths(block: Block) -> None:
    """The paths of this repository that a block names must exist."""
    missing = [path for path in OUR_PATH.findall(block.text) if not (REPOSITORY / path).exists()]
    if missing:
        raise block.error(f"there is no {', '.join(missing)} in the repository")


def check_output(block: Block, printed: str) -> None:
    """Find the block's lines, numbers aside unless they must be exact, among what was printed."""
    plain = _blankless if "exact" in block.options else _numberless
    remaining = iter([plain(line) for line in printed.splitlines()])
    for line in block.text.splitlines():
        if line.strip() in ("…", ""):
            continue
        wanted = plain(line)
        if not any(_matches(wanted, found) for found in remaining):
            raise block.error(f"nothing printed so far has the line {line!r}; it was\n{printed}")


def _matches(wanted: str, found: str) -> bool:
    """Whether a printed line is the wanted one, which may leave its end open with `…`."""
    return found == wanted or (wanted.endswith("…") and found.startswith(wanted.rstrip(" …")))


def _numberless(line: str) -> str:
    return _blankless(NUMBER.sub("0", line))


def _blankless(line: str) -> str:
    return " ".join(line.split())


class Reader:
    """Follows one page in a sandbox, as a person at a terminal would."""

    def __init__(self, sandbox: Path) -> None:
        self._checkout = sandbox / "checkout"
        self._state = sandbox / "state"
        self._printed = ""
        self._background: list[tuple[Block, subprocess.Popen[bytes], Path]] = []
        self._sandbox = sandbox
        self._programs = _programs(sandbox / "bin")
        _make_checkout(self._checkout)
        self._state.write_text(f"cd {self._checkout}\n")

    def follow(self, page: Path) -> None:
        """Do all that the page says; GuideError at the first block that fails."""
        try:
            for block in read_blocks(page):
                self._do(block)
            self._wait()
        finally:
            for _, process, _ in self._background:
                _end(process)

    def _do(self, block: Block) -> None:
        if block.mark == "none":
            return
        if block.mark == "output":
            check_output(block, self._printed)
            return
        check_syntax(block)
        if block.mark == "syntax":
            check_paths(block)
            return
        missing = [name for name in block.options.get("needs", "").split(",")
                   if name and not shutil.which(name, path=self._programs)]  # fmt: skip
        if missing:
            warnings.warn(
                f"{block.page}:{block.line}: not executed without {missing}", stacklevel=2
            )
            return
        self._execute(block)

    def _execute(self, block: Block) -> None:
        output = self._sandbox / f"output-{block.line}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", self._script(block)], stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, env=self._environment(), start_new_session=True,
            )  # fmt: skip
        self._background.append((block, process, output))
        if "background" not in block.options:
            self._wait()

    def _wait(self) -> None:
        """End of all blocks under way, the one in front first."""
        while self._background:
            block, process, output = self._background.pop()
            try:
                code = process.wait(float(block.options.get("timeout", "60")))
            except subprocess.TimeoutExpired:
                code = -1
            finally:
                _end(process)
            printed = output.read_text(encoding="utf-8", errors="replace")
            self._printed += printed
            expected = int(block.options.get("exit", "0"))
            if code != expected:
                said = "no end in time" if code == -1 else f"exit code {code}"
                raise block.error(f"{said}, expected exit code {expected}; it printed\n{printed}")

    def _script(self, block: Block) -> str:
        """The block between what an earlier one left behind and what it leaves behind."""
        keep = f"{{ export -p; printf 'cd %q\\n' \"$PWD\"; }} > {self._state}"
        return "\n".join([
            "set -euo pipefail",
            f"source {self._state}",
            "export MEGASCAN_DRY_RUN=1" if block.mark == "dry-run" else "unset MEGASCAN_DRY_RUN",
            block.text,
            "unset MEGASCAN_DRY_RUN",
            keep if "background" not in block.options else "",
        ])  # fmt: skip

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items()
               if not name.startswith(("MEGASCAN", "SLURM", "PYTEST", "TORCHELASTIC"))}  # fmt: skip
        return {
            **own,
            "PATH": self._programs,
            "HOME": str(self._sandbox),
            "PYTHONPATH": str(self._checkout),
            "MEGASCAN_PYTHON": ranks.warm(),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a block and whatever it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def _make_checkout(folder: Path) -> None:
    folder.mkdir()
    for name in COPIED:
        if (REPOSITORY / name).exists():
            shutil.copytree(REPOSITORY / name, folder / name)
    for name in LINKED:
        (folder / name).symlink_to(REPOSITORY / name)


def _programs(folder: Path) -> str:
    """A PATH on which the tests' interpreter and the stand-ins come first."""
    folder.mkdir()
    for name, module in (("python", ""), ("python3", ""), ("torchrun", " -m torch.distributed.run"),
                         ("megascan", " -m megascan")):  # fmt: skip
        program = folder / name
        program.write_text(f'#!/bin/bash\nexec "{ranks.warm()}"{module} "$@"\n')
        program.chmod(0o755)
    return ":".join([str(folder), *map(str, STAND_INS), os.environ["PATH"]])


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Follow a page in a sandbox of its own; GuideError when it does not do what it says."""
    yield Reader(tmp_path).follow
    shutil.rmtree(tmp_path, ignore_errors=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a page; `distributed` when one of its blocks says so."""
    if "guide" not in metafunc.fixturenames:
        return
    pages = []
    for path in sorted(GUIDES.glob("*.md")):
        lines = path.read_text(encoding="utf-8").splitlines()
        marks = []
        if any(line.startswith("<!-- test: ") and " distributed" in line for line in lines):
            marks = [pytest.mark.distributed]
        pages.append(pytest.param(path, id=path.stem, marks=marks))
    metafunc.parametrize("guide", pages)
