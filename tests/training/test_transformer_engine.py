"""Transformer Engine: asked for or left alone, and instrumented like the local layers.

The package runs on GPUs only. What can be held here: that nobody imports it unasked, that its
absence is one sentence, and that every class of megatron.core whose forward replaces that of an
instrumented one is in the table of places.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

from megascan.instrument import table

REPOSITORY = Path(__file__).parents[2]
CORE = Path(megatron.core.__file__).parent
INSTRUMENTED = {
    attribute.removesuffix(".forward")
    for _, _, attribute in table.MODULES
    if attribute.endswith(".forward")
}
# Kept out on purpose: part of a module that is recorded, or of models other than GPT.
WITHIN_OTHERS = {"SharedExpertMLP", "MLPLayer", "RealQuantTransformerLayer"}


def overriding_classes() -> dict[str, set[str]]:
    """Classes with a `forward` of their own, and the names of their bases, over megatron.core."""
    found: dict[str, set[str]] = {}
    for path in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(
                isinstance(part, ast.FunctionDef) and part.name == "forward" for part in node.body
            ):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                found.setdefault(node.name, set()).update(bases)
    return found


def test_every_forward_that_replaces_an_instrumented_one_is_in_the_table() -> None:
    overriding = overriding_classes()
    assert not INSTRUMENTED - set(overriding)
    replacing = {name for name, bases in overriding.items() if bases & INSTRUMENTED}
    assert "TEFusedMLP" in replacing
    assert replacing - INSTRUMENTED <= WITHIN_OTHERS


def test_the_attention_of_transformer_engine_is_marked_when_it_is_recomputed() -> None:
    recomputed = {attribute.partition(".")[0] for _, _, attribute in table.RECOMPUTED}
    assert {"DotProductAttention", "TEDotProductAttention"} <= recomputed
    source = (CORE / "extensions" / "transformer_engine.py").read_text(encoding="utf-8")
    assert "class TEDotProductAttention(" in source


@pytest.fixture
def broken_engine(tmp_path: Path) -> Path:
    """A package of that name which cannot be imported, and says so in a file."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise OSError('undefined symbol')\n"
    )
    return tmp_path


def test_local_layers_never_import_it(broken_engine: Path, tiny: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "training.pretrain_gpt", *tiny, "--train-iters", "1"],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{broken_engine}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "lm loss: " in done.stdout
    assert not (broken_engine / "imported").exists()
