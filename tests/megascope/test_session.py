"""What the page is told of a model that speaks, against transformers and over layouts."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascan.errors import ConfigError
from megascope.capture import Capture, Notes, find_spots, in_order
from megascope.session import STRIP_PLACES, principal_axes, read_command

from .conftest import Written, run_ranks

sys.path.insert(0, str(Path(__file__).parent))  # the program imports its neighbour by name

PROGRAM = Path(__file__).with_name("session_ranks.py")


@pytest.fixture(scope="module")
def inspected(alone: None, written: dict[str, Written]) -> Any:
    """A session on the whole model, that has carried out all commands."""
    from session_ranks import Inspected, commands

    made = Inspected(written["llama"].folder, 1, 1)
    made.do([*commands()])
    return made


def test_probabilities_are_those_of_transformers(
    inspected: Any, written: dict[str, Written]
) -> None:
    first = inspected.frames(1)[0]
    theirs = written["llama"].logits[0, -1].log_softmax(-1)
    best = theirs.topk(20)
    top = first.header["top"]
    assert [one[0] for one in top] == best.indices.tolist()
    np.testing.assert_allclose([one[1] for one in top], best.values, atol=1e-5)
    assert first.header["next"] == top[0][0] and first.header["logprob"] == top[0][1]


def test_strips_are_of_transformers_hidden_states(
    inspected: Any, written: dict[str, Written]
) -> None:
    first = inspected.frames(1)[0]
    strip = first.arrays["residual"][..., 0]  # layer, token
    assert first.header["layers"]["residual"] == [1, 2, 3, 4]
    for layer in (1, 2, 3):
        rms = written["llama"].hidden[layer][0].square().mean(-1).sqrt()
        np.testing.assert_allclose(strip[layer - 1], rms, atol=1e-5)
    assert first.arrays["key"].shape == (4, 24, 1)
    later = inspected.frames(1)[3]
    assert later.header["start"] == 26 and later.arrays["key"].shape == (4, 1, 1)


def test_what_is_noted_is_what_passes(inspected: Any) -> None:
    """The engine's layers write to no tensor again, so that it may be looked at later."""
    lent = inspected.looking._session._model
    spots = find_spots([lent.module], sorted(STRIP_PLACES))
    shown: dict[str, list[torch.Tensor]] = {}
    with Capture(spots, lambda one: shown.setdefault(one.spot.name, []).append(one.tensor.clone())):
        compute_twice(lent)
    notes = Notes(spots)
    compute_twice(lent)
    noted = {spot.name: tensors for spot, tensors in notes.take()}
    assert noted.keys() == shown.keys() and len(shown) == 4 * 10 + 1
    for name, tensors in noted.items():
        for one, expected in zip(tensors, shown[name], strict=True):
            assert torch.equal(in_order(name.split()[-1], one), expected), name
    assert not any(tensors for _, tensors in notes.take())
    notes.close()
    compute_twice(lent)
    assert not any(tensors for _, tensors in notes.take())


def compute_twice(lent: Any) -> None:
    lent.compute(PROMPT_OF(), 0, temperature=0.0, draw=0.0)
    lent.compute([5], len(PROMPT_OF()), temperature=0.0, draw=0.0)


@pytest.mark.parametrize(
    ("pause_s", "told"),
    [(0.02, [0, 1, 0, 0, 3, 0, 0, 3, 0, 0, 3, 0, 2]), (0.06, [0, *[1] * 12])],
)
def test_steps_are_told_together_as_often_as_a_page_can_draw(
    pause_s: float, told: list[int], inspected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from session_ranks import RUN

    session, now = inspected.looking._session, 100.0
    compute = session._model.compute

    def slow(*given: Any, **options: Any) -> Any:
        nonlocal now
        now += pause_s
        return replace(compute(*given, **options), chosen_at_s=now)

    monkeypatch.setattr(session._model, "compute", slow)
    session.receive({**RUN, "id": 160, "max_tokens": 12})
    heard = inspected.said[160] = []
    found = []
    while session.has_work:
        session.work()
        found.append(sum(one is not None for one in heard) - sum(found))
    assert found == told
    starts = [frame.header["start"] for frame in inspected.frames(160)]
    assert starts == [0, *range(24, 35)]
    monkeypatch.undo()
    inspected.said.pop(161, None)
    inspected.do([{**RUN, "id": 161, "max_tokens": 12}])
    for one, two in zip(inspected.frames(160), inspected.frames(161), strict=True):
        assert one.header | {"run": 161} == two.header
        for place, table in one.arrays.items():
            np.testing.assert_array_equal(table, two.arrays[place])


def test_a_place_that_the_model_lacks_has_no_strip(
    inspected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all layers have experts."""
    from session_ranks import RUN

    session = inspected.looking._session
    spots = [spot for spot in session._spots if spot.place.name != "fc1"]
    monkeypatch.setattr(session, "_spots", spots)
    inspected.do([{**RUN, "id": 170, "places": ["fc1", "residual"]}])
    for frame in inspected.frames(170):
        assert frame.arrays.keys() == frame.header["layers"].keys() == {"residual"}


def test_a_run_is_what_the_server_answers_to_anybody(inspected: Any) -> None:
    from session_ranks import PROMPT, request

    tokens = [frame.header["next"] for frame in inspected.frames(1)]
    assert inspected.do([], [request(PROMPT, 5)]) == tokens
    changed = [frame.header["logprob"] for frame in inspected.frames(2)]
    assert changed != [frame.header["logprob"] for frame in inspected.frames(1)]


def test_attention_maps_are_those_of_transformers(
    inspected: Any, written: dict[str, Written]
) -> None:
    from session_ranks import ATTENTION

    inspected.do([{"do": "run", "id": 20, "prompt": PROMPT_OF(), "max_tokens": 1},
                  {**ATTENTION, "id": 21, "run": 20}])  # fmt: skip
    (frame,) = inspected.frames(21)
    theirs = written["llama"].attentions[1][0, [0, 5, 11]]
    assert frame.header["heads"] == [0, 5, 11]
    np.testing.assert_allclose(frame.arrays["weights"], theirs, atol=1e-3)  # halves
    inspected.do([{**ATTENTION, "id": 22, "run": 20, "rows": [7, 3]}])
    (some,) = inspected.frames(22)
    assert np.array_equal(some.arrays["weights"], frame.arrays["weights"][:, [7, 3]])


def PROMPT_OF() -> list[int]:  # noqa: N802 - a constant that needs its module
    from session_ranks import PROMPT

    return list(PROMPT)


def test_the_lens_ends_in_what_the_model_says(inspected: Any) -> None:
    inspected.do([{"do": "run", "id": 30, "prompt": PROMPT_OF(), "max_tokens": 3},
                  {"do": "lens", "id": 31, "run": 30}])  # fmt: skip
    steps, (lens,) = inspected.frames(30), inspected.frames(31)
    assert lens.header["layers"] == [1, 2, 3, 4] and lens.header["first"] == 0
    assert lens.arrays["ids"].shape == (4, 26, 5)
    for step, place in zip(steps, (23, 24, 25), strict=True):
        assert lens.arrays["ids"][-1, place].tolist() == [one[0] for one in step.header["top"][:5]]
        np.testing.assert_allclose(
            lens.arrays["logprobs"][-1, place],
            [one[1] for one in step.header["top"][:5]],
            atol=1e-4,
        )


def test_pca_has_every_token_and_layer(inspected: Any) -> None:
    (frame,) = inspected.frames(5)
    assert frame.arrays["points"].shape == (4, 28, 3)
    assert 0.3 < sum(frame.header["shares"]) <= 1


def test_principal_axes_keep_distances_in_a_plane() -> None:
    random = np.random.default_rng(1)
    flat = random.normal(size=(40, 2)) @ random.normal(size=(2, 30))
    places, shares = principal_axes(flat)
    apart = [np.linalg.norm(one[:, None] - one[None], axis=-1) for one in (flat, places)]
    np.testing.assert_allclose(apart[0], apart[1], atol=1e-9)
    assert sum(shares[:2]) == pytest.approx(1)


def test_others_are_served_beside_and_see_no_change(inspected: Any) -> None:
    from session_ranks import CHANGED, request

    alone = inspected.do([], [request([5, 6, 7], 12)])
    assert inspected.do([{**CHANGED, "id": 40}], [request([5, 6, 7], 12)]) == alone
    assert len(inspected.frames(40)) == 5


def test_a_stopped_run_computes_no_more(inspected: Any) -> None:
    from session_ranks import RUN

    session = inspected.looking._session
    session.receive({**RUN, "id": 50, "max_tokens": 30})
    session.receive({**RUN, "id": 51, "max_tokens": 30})
    with torch.inference_mode():
        for _ in range(4):
            session.work()
    session.receive({"do": "stop", "id": 50})
    session.receive({"do": "stop", "id": 51})
    assert not session.has_work
    assert len(inspected.frames(50)) == 3 and inspected.frames(51) == []


def test_a_run_that_was_forgotten_is_said(inspected: Any) -> None:
    inspected.do([{"do": "pca", "id": 60, "run": 999}])
    (frame,) = inspected.frames(60)
    assert frame.header["kind"] == "error" and "run the prompt again" in frame.header["text"]


def test_a_stream_that_is_not_finite_has_no_axes_and_harms_nobody(inspected: Any) -> None:
    clean = logprobs(inspected, 62)
    grows = {"place": "residual", "kind": "scale", "amount": 1e6, "layers": [3]}
    logprobs(inspected, 63, interventions=[grows] * 8)
    inspected.do([{"do": "pca", "id": 64, "run": 63}, {"do": "lens", "id": 65, "run": 63}])
    (frame,) = inspected.frames(64)
    assert "not finite from layer 3 on" in frame.header["text"]
    assert inspected.frames(65)[0].header["kind"] == "lens"
    assert logprobs(inspected, 66) == clean


def test_more_attention_than_fits_is_refused_before_it_is_computed(
    inspected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logprobs(inspected, 67)
    monkeypatch.setattr("megascope.session.MOST_WEIGHTS", 2 * 27 * 27)
    attention = {"do": "attention", "run": 67, "layer": 2, "rows": []}
    inspected.do([{**attention, "id": 68, "heads": [0, 5]},
                  {**attention, "id": 69, "heads": [0, 5, 11]}])  # fmt: skip
    assert inspected.frames(68)[0].header["kind"] == "attention"
    assert "ask for fewer heads" in inspected.frames(69)[0].header["text"]


def logprobs(inspected: Any, identifier: int, **command: Any) -> list[float]:
    from session_ranks import RUN

    inspected.do([{**RUN, "id": identifier, "max_tokens": 3, **command}])
    return [frame.header["logprob"] for frame in inspected.frames(identifier)]


def test_values_that_are_zero_leave_the_heads_nothing_to_gather(inspected: Any) -> None:
    """Keys and values are changed before they go into the cache, at every later token as well."""
    nothing = logprobs(inspected, 70, interventions=[{"place": "context", "kind": "zero"}])
    silent = logprobs(inspected, 71, interventions=[{"place": "value", "kind": "zero"}])
    assert silent == nothing
    keys = [{"place": "key", "kind": "zero", "layers": [2], "units": [1], "tokens": [4]}]
    assert logprobs(inspected, 72, interventions=keys) != logprobs(inspected, 73)
    attention = {"do": "attention", "id": 74, "run": 72, "layer": 2, "heads": [3, 4, 5]}
    inspected.do([{**attention, "rows": [9]}])
    (frame,) = inspected.frames(74)  # scores of a key that is zero are zero: that of no other is
    weights = frame.arrays["weights"].astype(float)[:, 0, :10]
    assert weights.sum(-1) == pytest.approx([1, 1, 1], abs=1e-2)


@pytest.mark.parametrize("place", ["neurons", "query", "value", "context", "fc1", "qkv"])
def test_patching_goes_wherever_strips_were_asked_of(place: str, inspected: Any) -> None:
    """Run B differs by its embedding; with all of A's values in one layer that layer says as A's
    did."""
    spoilt = {"place": "embedding", "kind": "noise", "amount": 0.5, "seed": 8}
    patch = {"place": place, "kind": "replace", "layers": [2]}
    clean = logprobs(inspected, 80, places=[place, "residual"])
    before = logprobs(inspected, 81, places=[place], interventions=[spoilt])
    logprobs(inspected, 80, places=[place, "residual"])
    after = logprobs(inspected, 82, places=[place], interventions=[spoilt, patch], replace_from=80)
    assert before not in (clean, after)
    seen = inspected.looking._session._seen
    ours, theirs = (seen[number].joined(place, 2) for number in (82, 80))
    assert torch.equal(ours[:24], theirs[:24])


def test_patching_a_place_that_was_not_kept_says_what_to_do(inspected: Any) -> None:
    logprobs(inspected, 90, places=["residual"])
    patch = [{"place": "fc1", "kind": "replace"}]
    inspected.do([{"do": "run", "id": 91, "prompt": PROMPT_OF(), "max_tokens": 1,
                   "interventions": patch, "replace_from": 90}])  # fmt: skip
    (frame,) = inspected.frames(91)
    assert "kept nothing of fc1: choose it among the strips" in frame.header["text"]


def test_patching_from_a_forgotten_run_is_said(inspected: Any) -> None:
    from session_ranks import PATCHED

    inspected.do([{**PATCHED, "id": 61, "replace_from": 999}])
    (frame,) = inspected.frames(61)
    assert frame.header["kind"] == "error" and "patch from" in frame.header["text"]


@pytest.mark.distributed
def test_the_page_is_told_the_same_in_every_layout(
    alone: None, written: dict[str, Written], tmp_path: Path
) -> None:
    from session_ranks import Inspected, commands

    whole = Inspected(written["llama"].folder, 1, 1)
    whole.do([*commands()])
    run_ranks(2, PROGRAM, tmp_path, "2,1", "1,2", "--", written["llama"].folder)
    for layout in ("2,1", "1,2"):
        said = pickle.loads((tmp_path / f"{layout}.pickle").read_bytes())
        for command in commands():
            ours, theirs = whole.frames(command["id"]), said[command["id"]]
            assert len(ours) == len(theirs)
            for frame, (header, arrays) in zip(ours, theirs, strict=True):
                compare(frame.header, header)
                for name, array in frame.arrays.items():
                    far = 2e-3 if command["do"] == "attention" else 1e-4
                    np.testing.assert_allclose(np.abs(arrays[name]), np.abs(array), atol=far)


def compare(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("next", "layers", "heads", "start", "first"):
        assert one.get(name) == other.get(name), name
    if "logprob" in one:
        assert other["logprob"] == pytest.approx(one["logprob"], abs=1e-5)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ({"do": "eval", "code": "1"}, "do is 'eval'"),
        ({"do": "run", "prompt": []}, "no tokens"),
        ({"do": "run", "prompt": [203], "max_tokens": 1}, "prompt is '203'"),
        ({"do": "run", "prompt": [1], "max_tokens": 0}, "max_tokens is '0'"),
        ({"do": "run", "prompt": [1] * 60, "max_tokens": 1}, "prompt must be a list of at most"),
        ({"do": "run", "prompt": [1], "max_tokens": 1, "places": ["loss"]}, "places must be"),
        ({"do": "run", "prompt": [1], "max_tokens": 1, "reduction": "top"}, "reduction 'top'"),
        ({"do": "run", "prompt": [1], "max_tokens": 1, "temperature": "x"}, "temperature must"),
        ({"do": "run", "prompt": [1], "max_tokens": 1,
          "interventions": [{"place": "logits", "kind": "zero"}]}, "logits cannot be changed"),
        ({"do": "attention", "run": 1, "layer": -1}, "layer is '-1'"),
        ({"do": "attention", "run": 1, "layer": 1, "heads": [0] * 65}, "heads must be"),
        ({"do": "lens"}, "run is 'None'"),
        ([], "must be an object"),
    ],
)  # fmt: skip
def test_wrong_commands_are_refused_in_a_sentence(command: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_command(command, 60, 203)
