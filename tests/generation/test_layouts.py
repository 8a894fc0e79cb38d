"""The same tokens in every layout and beside any neighbours, and those that transformers gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests import ranks
from tests.launcher import free_ports

from .conftest import FAMILIES, NUM_TOKENS, PROGRAM, Expected

LAYOUTS = ("1x1", "2x1", "1x2", "2x2")
Found = dict[str, dict[str, dict[str, Any]]]
"""By layout, model and company."""


def cases_of(prompts: list[list[int]]) -> list[dict[str, object]]:
    """Greedy rows as transformers had them, then sampled and scored rows of other lengths."""
    greedy = [{"prompt": one, "max_tokens": NUM_TOKENS, "sampling": {}} for one in prompts]
    sampled = [
        {
            "prompt": prompts[0][:size],
            "max_tokens": 8,
            "sampling": {"temperature": 1.0, "top_k": top_k, "top_p": 0.9, "seed": 7 + size,
                         "presence_penalty": 0.5},
            "num_logprobs": 2,
        }
        for size, top_k in ((3, 0), (10, 20), (1, 5))
    ]  # fmt: skip
    return [*greedy, *sampled]


def generate(models: dict[str, Expected]) -> Found:
    """All layouts of all models in one job of four ranks."""
    cases = cases_of(next(iter(models.values())).prompts)
    found: Found = {}
    with TemporaryDirectory() as folder:
        done = ranks.run(
            PROGRAM, *(model.folder for model in models.values()), num_ranks=4,
            CASES=json.dumps(cases), PORTS=json.dumps(free_ports(4)), RESULTS=folder,
        )  # fmt: skip
        for file in Path(folder).iterdir():
            found |= json.loads(file.read_text(encoding="utf-8"))
    assert len(found) == len(LAYOUTS), done.stdout + done.stderr
    return found


Once = Callable[[object, Callable[[], Found]], Found]


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_and_sampling_is_the_same_in_every_layout(
    layout: str, family: str, models: dict[str, Expected], once: Once
) -> None:
    found = once("found", lambda: generate(models))
    rows, alone = (found[one][family]["together"] for one in (layout, "1x1"))
    assert [row["tokens"] for row in rows[:3]] == models[family].greedy
    for here, there in zip(rows[3:], alone[3:], strict=True):
        assert here["tokens"] == there["tokens"]
        assert here["logprobs"] == pytest.approx(there["logprobs"], abs=2e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_same_alone_and_beside_others(
    family: str, models: dict[str, Expected], once: Once
) -> None:
    found = once("found", lambda: generate(models))["1x1"][family]
    for beside, alone in zip(found["together"], found["alone"], strict=True):
        assert beside["tokens"] == alone["tokens"]
    assert [len(row["logprobs"]) for row in found["alone"][3:]] == [2 + 8, 9 + 8, 8]


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_give_the_same(family: str, models: dict[str, Expected], once: Once) -> None:
    found = once("found", lambda: generate(models))["1x1"][family]
    for replayed, computed in zip(found["replayed"], found["together"], strict=True):
        assert replayed["tokens"] == computed["tokens"]
        assert replayed["logprobs"] == pytest.approx(computed["logprobs"], abs=2e-4)
    # Three rows at most, of 64 places at most: one recording for each number of rows.
    assert found["num_recorded"] == 3
    assert found["num_replayed"] > 10


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_whoever_looks_at_the_last_layer_sees_all_tokens_and_changes_none(
    family: str, models: dict[str, Expected], once: Once
) -> None:
    found = once("found", lambda: generate(models))["1x1"][family]
    assert found["watched"][0]["tokens"] == found["alone"][0]["tokens"]
    assert found["seen"] == 10 + NUM_TOKENS - 1  # nothing is computed for the token that comes last


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_exact_as_in_transformers(
    family: str, models: dict[str, Expected], once: Once
) -> None:
    (row,) = once("found", lambda: generate(models))["1x1"][family]["bf16"]
    expected = models[family]
    ours, theirs = (
        max(abs(one - exact) for one, exact in zip(found, expected.exact, strict=True))
        for found in (row["logprobs"], expected.rounded)
    )
    # The largest of nine errors: which of the two is larger is a matter of luck.
    assert 0 < ours < 4 * theirs
