"""Interventions: what they do, that they repeat, that nothing is left of them, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megascan.errors import ConfigError
from megascope.interventions import Intervening, TensorShares, flip_bits
from megascope.request import Intervention, read_interventions

from .scoped_model import CHANGES, changed, run, see

Model = Callable[[str], Any]
ALONE = TensorShares(rank=0, size=1)


@pytest.fixture(scope="module")
def model(alone: None, written: dict[str, Any]) -> Any:
    from .scoped_model import load

    return load(written["llama"].folder, 1, 1)


@pytest.mark.parametrize("name", CHANGES)
def test_it_changes_repeats_and_is_undone_bit_for_bit(name: str, model: Any) -> None:
    before = run(model)
    weights = [parameter.clone() for parameter in model.parameters()]
    once = changed(model, CHANGES[name])
    assert not torch.equal(once, before)
    assert torch.equal(once, changed(model, CHANGES[name]))
    assert torch.equal(before, run(model))
    assert all(
        torch.equal(kept, now) for kept, now in zip(weights, model.parameters(), strict=True)
    )


def seen_with(model: Any, change: Intervention, place: str, layer: int) -> torch.Tensor:
    with Intervening([model], [change], shares=ALONE):
        tensor, _ = see(model, [place])[place, layer]
    return tensor


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("zero", torch.zeros_like),
        ("scale", lambda x: x * 2.5),
        ("offset", lambda x: x + 2.5),
    ],
)
@pytest.mark.parametrize("place", ["residual", "qkv", "attention_out", "fc2", "embedding"])
def test_a_value_becomes_what_the_kind_says(
    place: str, kind: str, made: Callable[[torch.Tensor], torch.Tensor], model: Any
) -> None:
    layer = 0 if place == "embedding" else 3
    change = Intervention(place=place, kind=kind, layers=(3,), amount=2.5)
    before, _ = see(model, [place])[place, layer]
    assert torch.equal(seen_with(model, change, place, layer), made(before))


def test_only_the_units_layers_and_tokens_meant_change(model: Any) -> None:
    change = Intervention(
        place="context", kind="zero", layers=(2,), units=(1, 4), tokens=(3, 7), amount=0
    )
    before, _ = see(model, ["context"])["context", 2]
    after = seen_with(model, change, "context", 2)
    differs = (before != after).view(before.shape[0], 12, 4).any(-1)
    assert differs.nonzero().tolist() == [[3, 1], [3, 4], [7, 1], [7, 4]]
    assert torch.equal(see(model, ["context"])["context", 1][0][:3], before[:3]) is False


def test_noise_has_the_deviation_that_is_asked_for(model: Any) -> None:
    change = Intervention(place="embedding", kind="noise", amount=0.25, seed=1)
    before, _ = see(model, ["embedding"])["embedding", 0]
    noise = seen_with(model, change, "embedding", 0) - before
    assert float(noise.std()) == pytest.approx(0.25, rel=0.1)
    other = Intervention(place="embedding", kind="noise", amount=0.25, seed=2)
    assert not torch.equal(seen_with(model, other, "embedding", 0) - before, noise)


def test_patching_brings_an_earlier_runs_values(model: Any) -> None:
    """With the whole stream of a clean run the logits are that run's, whatever came before."""
    clean = run(model)
    stream = {("residual", 2): see(model, ["residual"])["residual", 2][0]}
    corrupt = Intervention(place="embedding", kind="noise", amount=3.0)
    patch = Intervention(place="residual", kind="replace", layers=(2,))
    with Intervening([model], [corrupt], shares=ALONE):
        spoilt = run(model)
    with Intervening([model], [corrupt, patch], shares=ALONE, replacements=stream):
        patched = run(model)
    assert not torch.allclose(spoilt, clean, atol=0.1)
    assert torch.equal(patched, clean)


def test_a_change_holds_from_its_first_moment_to_its_last(model: Any) -> None:
    bits = Intervention(place="fc1", kind="flip", amount=8, bit=24, first=3, last=4)
    zero = Intervention(place="residual", kind="zero", layers=(1,), first=4, last=4)
    clean = run(model)
    with Intervening([model], [bits, zero], shares=ALONE) as inside:
        found = []
        for moment in (2, 3, 4, 5):
            inside.restart(moment)
            found.append(run(model))
    assert torch.equal(found[0], clean) and torch.equal(found[3], clean)
    assert not torch.equal(found[1], clean) and not torch.equal(found[2], found[1])


def test_an_error_inside_undoes_everything(model: Any) -> None:
    before = run(model)
    flip = Intervention(place="fc2", kind="flip", amount=20)
    noise = Intervention(place="residual", kind="noise", amount=1.0)
    with pytest.raises(RuntimeError, match="inside"):  # noqa: SIM117
        with Intervening([model], [flip, noise], shares=ALONE):
            raise RuntimeError("inside")
    assert torch.equal(before, run(model))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_bit_of_any_format_flips_and_flips_back(kind: torch.dtype) -> None:
    weight = torch.randn(64).to(kind)
    kept = weight.clone()
    width = 8 * weight.element_size()
    with flip_bits(weight, torch.arange(width), torch.arange(width)):
        size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
        masks = weight.view(size).long() ^ kept.view(size).long()
        every = 2**width - 1 if width < 64 else -1
        powers = [mask & every for mask in masks[:width].tolist()]
        assert [bin(one & (2**width - 1)).count("1") for one in powers] == [1] * width
    assert torch.equal(weight.view(size), kept.view(size))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"place": "nowhere", "kind": "zero"}, "place is 'nowhere'"),
        ({"place": "residual", "kind": "eval"}, "kind is 'eval'"),
        ({"place": "residual"}, "needs kind"),
        ({"place": "residual", "kind": "noise", "amount": float("nan")}, "amount is nan"),
        ({"place": "residual", "kind": "noise", "amount": "1"}, "amount is '1'"),
        ({"place": "residual", "kind": "zero", "layers": [True]}, "layers is"),
        ({"place": "residual", "kind": "zero", "units": list(range(5000))}, "units is"),
        ({"place": "residual", "kind": "zero", "code": "1"}, "'code' is no part"),
        ({"place": "residual", "kind": "zero", "seed": -1}, "seed is -1"),
        ({"place": "residual", "kind": "flip", "amount": 1}, "flip needs a place"),
        ({"place": "fc1", "kind": "flip", "amount": 0.5}, "amount is 0.5"),
        (["residual"], "must be an object"),
    ],
)
def test_what_makes_no_sense_is_refused(record: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_interventions([record])


def test_what_makes_sense_is_read() -> None:
    (one,) = read_interventions(
        [{"place": "fc1", "kind": "flip", "layers": [2], "amount": 3, "bit": 5, "first": 1}]
    )
    assert one == Intervention(place="fc1", kind="flip", layers=(2,), amount=3.0, bit=5, first=1)
    with pytest.raises(ConfigError, match="list of at most"):
        read_interventions([{}] * 65)
