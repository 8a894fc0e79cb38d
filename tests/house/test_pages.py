"""Pages that must agree with the code."""

import subprocess
import sys
from pathlib import Path

from megascan.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


def test_format_page_follows_the_schema():
    done = subprocess.run(
        [sys.executable, "scripts/format_page.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr


def test_every_command_is_described_in_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"megascan {name}" not in readme] == []


def test_changelog_keeps_an_unreleased_section_on_top():
    headings = [
        line
        for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("## ")
    ]
    assert headings[0] == "## Unreleased"


def test_links_between_our_pages_lead_somewhere():
    broken = []
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for target in (part.split(")")[0] for part in text.split("](")[1:]):
            path = target.split("#")[0]
            if path and "://" not in path and not (page.parent / path).exists():
                broken.append(f"{page.name} → {target}")
    assert broken == []
