"""Pages that must agree with the code."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megascan import vocabulary
from megascan.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGES = ("megascan", "aggregate", "detect", "training", "megascope")


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
    assert [name for name in COMMANDS if f"megascan {name}" not in readme] == [], (
        "give the command a row in README's tables of commands"
    )


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
    assert broken == [], (
        "the link's file has moved or is gone: mend the path, from the page's folder"
    )


def test_the_files_that_the_architecture_names_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = [ROOT, *(ROOT / name for name in (*PACKAGES, "tests"))]
    known = {path.name for folder in folders[1:] for path in folder.rglob("*.py")}
    named = set(re.findall(r"`([\w./-]+\.py)`", page))
    missing = [
        name
        for name in sorted(named)
        if not (
            any((folder / name).exists() for folder in folders) if "/" in name else name in known
        )
    ]
    assert len(named) > 40
    assert missing == [], (
        "the file has moved or is gone: say in docs/architecture.md where it is now"
    )


def recorded_names() -> Iterator[str]:
    """Yield the names of spans that instrumentation takes out of the vocabulary."""
    declared = {word.name for word in vocabulary.WORDS}
    for path in (ROOT / "megascan" / "instrument").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "megascan.vocabulary":
                values = [getattr(vocabulary, alias.name) for alias in node.names]
                yield from (
                    name
                    for value in values
                    if isinstance(value, str)
                    for name in (value, vocabulary.recompute_of(value))
                    if name in declared
                )


def test_the_page_about_tracing_lists_what_is_recorded():
    page = (ROOT / "docs" / "tracing-your-job.md").read_text(encoding="utf-8")
    recorded = set(recorded_names())
    passes = {vocabulary.recompute_of(name) for name in recorded}  # said once for all modules
    assert len(recorded) > 15
    assert [name for name in sorted(recorded - passes) if f"`{name}`" not in page] == [], (
        "name it in the table of docs/tracing-your-job.md"
    )


def imported_names(text: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what Python examples on a page import of our packages."""
    for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        plain = re.sub(r"^(>>>|\.\.\.) ?", "", block, flags=re.MULTILINE)
        for line in re.findall(r"^from [\w.]+ import [^(\n]+$", plain, flags=re.MULTILINE):
            (statement,) = ast.parse(line.strip()).body
            assert isinstance(statement, ast.ImportFrom)
            module = statement.module or ""
            if module.split(".")[0] in PACKAGES:
                yield from ((module, alias.name) for alias in statement.names)


def is_offered(module: str, name: str) -> bool:
    """Tell whether a module binds a name, without importing it (some need torch)."""
    path = ROOT / module.replace(".", "/")
    if (path / f"{name}.py").exists():
        return True
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    bound = {
        word
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        for word in (
            getattr(node, "name", None),
            getattr(node, "asname", None),
            node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None,
            node.value if isinstance(node, ast.Constant) else None,  # a name in __all__
        )
    }
    return name in bound


def test_what_examples_import_is_there():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    imports = [
        (page.name, module, name)
        for page in pages
        for module, name in imported_names(page.read_text(encoding="utf-8"))
    ]
    assert len(imports) > 8
    assert [one for one in imports if not is_offered(*one[1:])] == [], (
        "the example imports what is not there any more: (page, module, name); mend the page"
    )
    assert not is_offered("detect.whatif", "render_text")
