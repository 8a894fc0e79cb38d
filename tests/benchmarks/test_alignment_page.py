"""The page of the alignment benchmark is what the benchmark writes, and nothing by hand."""

import re
from pathlib import Path

from benchmarks.alignment import _page

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "alignment.md"


def test_the_page_can_be_written_again() -> None:
    page = PAGE.read_text(encoding="utf-8")
    (words,) = re.findall(r"^    python -m benchmarks.alignment (.*)$", page, re.MULTILINE)
    (text,) = re.findall(r"^```\n(.*?)```$", page, re.MULTILINE | re.DOTALL)
    machine = re.compile(r"\n\n.*; numpy .*\n")
    assert machine.sub("", _page(words, text)) == machine.sub("", page)
    assert (PAGE.parent / "alignment_notes.md").is_file()
