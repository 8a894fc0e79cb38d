"""The same tokens in every layout, and those that Hugging Face's generate gives."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import PROGRAM, ROOT, command_of, environment

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
Rows = dict[str, list[dict[str, Any]]]


def cases_of(prompts: list[list[int]]) -> list[dict[str, object]]:
    """Greedy rows as transformers had them, then sampled and scored rows of other lengths."""
    greedy = [{"prompt": one, "max_tokens": 20, "sampling": {}} for one in prompts]
    sampled = [
        {
            "prompt": prompts[0][:size],
            "max_tokens": 12,
            "sampling": {"temperature": 1.0, "top_k": top_k, "top_p": 0.9, "seed": 7 + size,
                         "presence_penalty": 0.5},
            "num_logprobs": 2,
        }
        for size, top_k in ((3, 0), (10, 20), (1, 5))
    ]  # fmt: skip
    return [*greedy, *sampled]


def generated(layout: tuple[int, int], models: dict[str, Any]) -> Rows:
    tensor, pipeline = layout
    first = next(iter(models.values()))
    done = subprocess.run(
        command_of(
            tensor * pipeline,
            [str(PROGRAM), str(tensor), str(pipeline), *(str(m.folder) for m in models.values())],
        ),
        cwd=ROOT, env={**environment(), "CASES": json.dumps(cases_of(first.prompts))},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    line = next((one for one in done.stdout.splitlines() if one.startswith("RESULT ")), None)
    assert line is not None, done.stdout + done.stderr
    found: Rows = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_equals_transformers_and_sampling_is_the_same_in_every_layout(
    layout: tuple[int, int],
    models: dict[str, Any],
    once: Callable[[object, Callable[[], Rows]], Rows],
) -> None:
    alone = once((1, 1), lambda: generated((1, 1), models))
    found = alone if layout == (1, 1) else generated(layout, models)
    for family, expected in models.items():
        assert [row["tokens"] for row in found[family][:3]] == expected.greedy, family
        for here, there in zip(found[family][3:], alone[family][3:], strict=True):
            assert here["tokens"] == there["tokens"], family
            assert here["logprobs"] == pytest.approx(there["logprobs"], abs=2e-4)


def test_a_row_is_the_same_alone_and_beside_others(
    models: dict[str, Any],
    once: Callable[[object, Callable[[], Rows]], Rows],
) -> None:
    together = once((1, 1), lambda: generated((1, 1), models))
    cases = cases_of(models["gpt2"].prompts)
    done = subprocess.run(
        command_of(1, [str(PROGRAM), "1", "1", str(models["gpt2"].folder)]),
        cwd=ROOT, env={**environment(), "CASES": json.dumps(cases[4:5])},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    line = next(one for one in done.stdout.splitlines() if one.startswith("RESULT "))
    (row,) = json.loads(line.removeprefix("RESULT "))["gpt2"]
    assert row["tokens"] == together["gpt2"][4]["tokens"]
    assert len(row["logprobs"]) == 9 + 12  # the prompt's first token has none
