"""A guide that lies is caught."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Follow = Callable[[Path], None]
Write = Callable[[str], Path]

REPOSITORY = Path(__file__).parents[2]
STATE_AND_OUTPUT = """
# A page
<!-- test: run -->
```bash
export NAME=seven && mkdir made && cd made
```
Text.
<!-- test: run -->
```bash
echo "$NAME $(basename "$PWD")"; echo 'took 3.25 s'; echo last; [[ -z ${MEGASCAN_DRY_RUN:-} ]]
```
<!-- test: output -->
```text
seven made
…
took 17 …
```
1. In a list

   <!-- test: dry-run -->
   ```bash
   [[ $MEGASCAN_DRY_RUN == 1 && $NAME == seven ]]
   ```

<!-- test: run exit=3 -->
```bash
exit 3
```
<!-- test: syntax: needs a cluster -->
```bash
squeue --me && bash scripts/quickstart.sh
```
<!-- test: none: a picture -->
```text
a ──► b
```
"""


@pytest.fixture
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    def page(text: str) -> Path:
        path = tmp_path_factory.mktemp("page") / "page.md"
        path.write_text(text, encoding="utf-8")
        return path

    return page


def test_a_page_whose_blocks_hold_is_followed_to_its_end(follow: Follow, write: Write) -> None:
    follow(write(STATE_AND_OUTPUT))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```bash\ntrue\n```\n", "page.md:1: this block needs a mark"),
        ("<!-- test: maybe -->\n```bash\ntrue\n```\n", "page.md:2: this block needs a mark"),
        ("<!-- test: run -->\n\n```bash\ntrue\n```\n", "page.md:3: this block needs a mark"),
        ("<!-- test: syntax -->\n```bash\ntrue\n```\n", "needs a reason"),
        ("<!-- test: none: lazy -->\n```bash\ntrue\n```\n", "a shell block is executed"),
        ("<!-- test: run -->\n```yaml\na: 1\n```\n", "only shell blocks can be executed"),
        ("<!-- test: run loudly -->\n```bash\ntrue\n```\n", "do not belong"),
        ("<!-- test: run -->\n```bash\necho why; false\n```\n", "why"),
        ("<!-- test: run -->\n```bash\nfalse | cat; true\n```\n", "exit code 1"),
        ("<!-- test: run exit=2 -->\n```bash\ntrue\n```\n", "exit code 0, expected exit code 2"),
        ("<!-- test: run timeout=1 -->\n```bash\nsleep 30\n```\n", "no end in time"),
        ("<!-- test: run -->\n```bash\necho $UNKNOWN_VARIABLE\n```\n", "UNKNOWN_VARIABLE"),
        ("<!-- test: syntax: x -->\n```bash\ncat docs/gone.md\n```\n", "there is no docs/gone"),
        ("<!-- test: syntax: x -->\n```bash\nif true\n```\n", "syntax error"),
        ("<!-- test: syntax: x -->\n```json\n{,}\n```\n", "does not parse as json"),
        ("<!-- test: syntax: x -->\n```python\ndef f(:\n```\n", "does not parse as python"),
        (
            "<!-- test: run -->\n```bash\necho b; echo a 1\n```\n"
            "<!-- test: output -->\n```text\na 2\nb\n```\n",
            "has the line 'b'",
        ),
        (
            "<!-- test: run -->\n```bash\necho rank 2\n```\n"
            "<!-- test: output exact -->\n```text\nrank 3\n```\n",
            "has the line 'rank 3'",
        ),
        ("<!-- test: run exact -->\n```bash\ntrue\n```\n", "do not belong"),
    ],
)  # fmt: skip
def test_a_page_that_lies_is_caught(follow: Follow, write: Write, text: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says.replace(".", r"\.")):
        follow(write(text))


def test_blocks_in_the_background_meet_the_one_in_front(follow: Follow, write: Write) -> None:
    follow(
        write(
            "<!-- test: run background -->\n```bash\nmkfifo pipe || true; echo met > pipe\n```\n"
            "<!-- test: run -->\n```bash\nuntil [[ -p pipe ]]; do sleep 0.1; done; cat pipe\n```\n"
            "<!-- test: output -->\n```text\nmet\n```\n"
        )
    )


def test_a_background_block_that_fails_is_caught(follow: Follow, write: Write) -> None:
    page = write(
        "<!-- test: run background -->\n```bash\nexit 4\n```\n"
        "<!-- test: run -->\n```bash\ntrue\n```\n"
    )
    with pytest.raises(AssertionError, match="exit code 4"):
        follow(page)


def test_nothing_is_written_into_the_repository(follow: Follow, write: Write) -> None:
    before = sorted(path.name for path in REPOSITORY.iterdir())
    follow(write("<!-- test: run -->\n```bash\necho x > new; echo y > scripts/new.sh\n```\n"))
    assert sorted(path.name for path in REPOSITORY.iterdir()) == before
    assert not (REPOSITORY / "scripts/new.sh").exists()


def test_a_program_that_is_missing_is_said(follow: Follow, write: Write) -> None:
    page = write("<!-- test: run needs=no-such-program -->\n```bash\nno-such-program\n```\n")
    with pytest.warns(UserWarning, match="not executed without"):
        follow(page)
