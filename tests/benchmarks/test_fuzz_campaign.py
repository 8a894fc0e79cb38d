"""The fuzzing campaign: every input can be made again, and the readers hold out for a short one."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from benchmarks.fuzz.__main__ import main
from benchmarks.fuzz.damage import ACTIONS, damaged
from benchmarks.fuzz.inputs import Inputs
from benchmarks.fuzz.samples import make_samples
from benchmarks.fuzz.worker import trouble


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(make_samples(tmp_path_factory.mktemp("samples")), seed=1)


def test_samples_are_healthy_and_of_every_format(inputs: Inputs, tmp_path: Path) -> None:
    names = {sample.name.split(",")[0].split(" ")[0] for sample in inputs.samples}
    assert names == {"rank", "timeline", "original", "profiler"}
    for sample in inputs.samples[::3]:
        assert trouble(sample, sample.content, tmp_path / "in", written=True) == ("read", "")


def test_every_action_damages_and_every_input_can_be_made_again(inputs: Inputs) -> None:
    text = inputs.samples[0].content
    for action in ACTIONS:
        assert any(action(text, Random(seed)) != text for seed in range(5)), action.__name__
    for number in (0, 500, inputs.num_cuts, inputs.num_cuts + 77):
        assert inputs[number] == inputs[number]
    sample = inputs.samples[-1]
    assert damaged(sample.content, True, Random(3)) == damaged(sample.content, True, Random(3))


def test_random_damage_ends_in_a_result_or_a_sentence(inputs: Inputs, tmp_path: Path) -> None:
    """Always the same hundred; a campaign tries others."""
    first = inputs.num_cuts
    for number in range(first, first + 100):
        sample, content = inputs[number]
        outcome, fault = trouble(sample, content, tmp_path / "in", written=number % 20 == 0)
        assert (number, fault) == (number, "")
        assert outcome in ("read", "refused")


@pytest.mark.parametrize(
    ("seed", "number"),
    [(1, 52822), (1, 58846), (1, 64948), (1, 70455), (1, 71448), (1, 71841), (1, 96318),
     (8, 69232)],
)  # fmt: skip
def test_inputs_of_a_campaign_that_once_failed(
    inputs: Inputs, tmp_path: Path, seed: int, number: int
) -> None:
    """Numbers beyond 32 bits, ranks of billions, names within brackets, spans all lost."""
    sample, content = Inputs(inputs.samples, seed)[number]
    assert trouble(sample, content, tmp_path / "in", written=False)[1] == ""


def test_a_short_campaign(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--inputs", "30", "--workers", "1", "--seed", "2"]) == 0
    assert "30 inputs in " in capfd.readouterr().out


def test_an_input_for_a_closer_look(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "100000", "--keep", str(tmp_path / "kept")]) == 0
    assert "damaged" in capfd.readouterr().out
    assert list((tmp_path / "kept").iterdir())
