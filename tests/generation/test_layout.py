"""Where the tokens of a step stand, how they are turned, and what they see."""

from __future__ import annotations

import pytest
import torch

from training.generation.scheduler import RowTokens, _visible, lay_out
from training.generation.stage import Rotation, attend, rotate

SHARES = (
    RowTokens(slot=0, start=9, tokens=(5,)),
    RowTokens(slot=2, start=4, tokens=(6,)),
    RowTokens(slot=1, start=0, tokens=(7, 8, 9)),
    RowTokens(slot=3, start=2, tokens=(1, 2)),
)


def test_single_tokens_come_first_and_every_token_has_its_position_and_place() -> None:
    layout = lay_out(SHARES, max_length=10, device="cpu")
    assert layout.tokens.tolist() == [[5, 6, 7, 8, 9, 1, 2]]
    assert layout.positions.tolist() == [[9, 4, 0, 1, 2, 2, 3]]
    assert layout.places.tolist() == [9, 24, 10, 11, 12, 32, 33]
    assert layout.decoding is not None
    assert layout.decoding.length == 10
    assert [piece.first_token for piece in layout.pieces] == [2, 5]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_piece_sees_its_row_up_to_each_token_on_every_device(device: str) -> None:
    """The pattern for GPUs is checked on the CPU, where torch makes a mask of it."""
    torch.manual_seed(0)
    queries = torch.randn(1, 4, 2, 8)
    keys, values = torch.randn(2, 1, 2, 4, 8)
    mask = _visible(SHARES[3], device)
    context = attend(queries, keys, values, visible=mask, is_causal=False, scale=0.5)
    for token, num_seen in ((0, 3), (1, 4)):
        seen = attend(
            queries[:, :, token : token + 1], keys[:, :, :num_seen], values[:, :, :num_seen],
            visible=None, is_causal=False, scale=0.5,
        )  # fmt: skip
        torch.testing.assert_close(context[:, :, token : token + 1], seen)


@pytest.mark.parametrize("num_turned", [8, 4])
def test_rotation_turns_pairs_half_a_head_apart(num_turned: int) -> None:
    torch.manual_seed(0)
    frequencies = torch.tensor([1.0, 0.5, 0.25, 0.125][: num_turned // 2])
    turns = Rotation(frequencies, 10, torch.float32).at(torch.tensor([0, 3]))
    states = torch.randn(2, 5, 8)
    turned = rotate(states, turns)
    assert torch.equal(turned[0], states[0])  # position 0 stands still
    pairs = torch.complex(*states[1, :, :num_turned].chunk(2, dim=-1))
    expected = pairs * torch.polar(torch.ones_like(frequencies), 3 * frequencies)
    torch.testing.assert_close(
        turned[1, :, :num_turned], torch.cat((expected.real, expected.imag), dim=-1)
    )
    assert torch.equal(turned[..., num_turned:], states[..., num_turned:])
