"""The direction of imports: who may know whom, and how light the core is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("megascan", "training", "aggregate", "detect", "megascope")
MAY_IMPORT = {
    "megascan": {"megascan"},
    "training": {"megascan", "training"},
    "aggregate": {"megascan", "aggregate"},
    "detect": {"megascan", "detect"},
    "megascope": {"megascan", "megascope"},
}
COMPOSERS = ("megascan/cli/", "megascan/watch/", "megascan/api.py")
SEAMS = ("training/scope.py", "training/generation/scope.py")
"""Where the trainer and the server bring MegaScope in, by the flag --scope."""
# Lower rooms never import higher ones; composers stand above all.
LEVELS = (
    {"errors", "arrays", "overwriting", "parallel"},
    {"schema", "listening"},
    {"vocabulary", "connection"},
    {"topology"},
    {"header", "config", "probes"},
    {"rankfile", "overhead"},
    {"tracer"},
    {"instrument"},
    {"timeline", "launch", "callbacks"},
    {"reader", "export", "simulate"},
    {"viewer"},
)


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return modules


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_stands_below_them(package):
    wrong = []
    for path in sources(package):
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith((*COMPOSERS, *SEAMS)) or path.name == "__main__.py":
            continue
        first_words = {module.split(".")[0] for module in imported(path)}
        wrong += [
            f"{relative} imports {name}"
            for name in first_words & set(PACKAGES) - MAY_IMPORT[package]
        ]
    assert not wrong, (
        "move what both need down (schema, vocabulary, timeline), or compose them in megascan/cli"
    )


def test_rooms_of_the_core_import_downwards_only():
    level_of = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
    wrong = []
    for path in sources("megascan"):
        room = path.relative_to(ROOT / "megascan").parts[0].removesuffix(".py")
        if room not in level_of:
            assert room in ("__init__", "__main__", "api", "cli", "watch"), (
                f"put {room} into LEVELS of {Path(__file__).name}, above all that it imports"
            )
            continue
        for module in imported(path):
            parts = module.split(".")
            other = parts[1] if parts[0] == "megascan" and len(parts) > 1 else room
            if level_of.get(other, 0) > level_of[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports megascan.{other}")
    assert not wrong, (
        "a lower room knows a higher one: move what it needs down, or hand it in as an argument"
    )


MEASURING = ("detect/observe", "detect/stats")
SHARED_BY_CAUSES = {
    "finding", "searches", "hits", "pass_hits", "device", "launching", "ordinary", "power",
    "longer_steps", "connections", "crossings", "slow_modules", "burst_data", "one_of_two",
    "readings", "host_data", "compute_owner", "slow_links", "burst_owner",
}  # fmt: skip
"""Of causes: what several of them use, parts of one that are a subject of their own, what else
explains slow computing, and power."""


def test_what_measures_and_compares_knows_neither_causes_nor_what_renders():
    above = ("detect.causes", "detect.page", "detect.text", "detect.comparison", "detect.detector")
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for folder in MEASURING
        for path in (ROOT / folder).glob("*.py")
        for module in imported(path)
        if module.startswith(above)
    ]
    assert wrong == [], (
        "measuring and comparing say what is; move what names or draws it to detect/causes or above"
    )


def test_causes_do_not_import_each_other():
    wrong = []
    for path in sorted((ROOT / "detect" / "causes").glob("*.py")):
        others = {
            module.split(".")[2] for module in imported(path) if module.startswith("detect.causes.")
        }
        wrong += [f"{path.stem} imports {one}" for one in others - SHARED_BY_CAUSES]
    assert wrong == [], (
        "move what causes share to finding.py, searches.py or hits.py; what one found reaches the "
        "others by `Inquiry`"
    )


@pytest.mark.parametrize("package", ["megascan", "aggregate", "detect"])
def test_only_tracing_and_training_touch_torch(package):
    allowed = (
        "megascan/tracer",
        "megascan/instrument",
        "megascan/launch.py",
        "megascan/callbacks.py",
    )
    wrong = [
        path.relative_to(ROOT).as_posix()
        for path in sources(package)
        if {"torch", "megatron"} & {module.split(".")[0] for module in imported(path)}
    ]
    assert [path for path in wrong if not path.startswith(allowed)] == [], (
        "analysis runs where there is no torch: put what needs it in megascan/tracer or "
        "megascan/instrument"
    )


@pytest.mark.parametrize("package", ["megascan", "aggregate", "detect", "megascope", "training"])
def test_nothing_asks_arrow_for_what_needs_pandas(package):
    """The newest Arrow gives a type's `to_pandas_dtype` without pandas, those before 26 fail."""
    calls = {
        (path.relative_to(ROOT).as_posix(), node.attr)
        for path in sources(package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and "pandas" in node.attr
    }
    assert calls == set(), "use number_type or numbers of megascan.timeline"


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import megascan", {"torch", "pandas", "pyarrow", "scipy", "numpy"}),
        ("import megascan.cli.main", {"torch", "pandas", "pyarrow", "scipy"}),
        ("import megascan.rankfile, megascan.config", {"torch", "pandas", "pyarrow", "scipy"}),
        ("import aggregate, detect", {"torch", "megatron"}),
        ("import training.pipeline.schedule", {"torch", "pyarrow", "scipy", "numpy"}),
    ],
)
def test_what_an_import_pulls_in(statement, heavy):
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert heavy & {name.split(".")[0] for name in done.stdout.split()} == set(), (
        "import these within the functions that need them, so that the others start at once"
    )


def test_no_module_shadows_the_standard_library_or_a_package():
    reserved = set(sys.stdlib_module_names) | set(PACKAGES)
    first_on_path = [*(ROOT / "training").iterdir()]  # torchrun -m puts this folder's parent first
    names = {path.stem for path in first_on_path} | {
        path.stem for path in (ROOT / "scripts").iterdir()
    }
    assert names & reserved == set(), "rename it: Python would import it in the other one's place"


def test_tests_have_no_init_files():
    assert list((ROOT / "tests").rglob("__init__.py")) == [], (
        "remove it: tests are imported by path (--import-mode=importlib)"
    )
