"""Small random models that transformers has written, with what it saw in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.weights import exaggerate

PROGRAM = Path(__file__).with_name("scoped_model.py")
_SMALL = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 12,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "vocab_size": 203,
}  # fmt: skip
FAMILIES = {
    "gpt2": ("GPT2Config", {"n_embd": 48, "n_layer": 4, "n_head": 12, "n_positions": 64,
                            "vocab_size": 203}),
    "llama": ("LlamaConfig", _SMALL),
    "qwen3": ("Qwen3Config", _SMALL | {"head_dim": 16, "tie_word_embeddings": True}),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Written:
    """A folder, and hidden states, attentions and logits of the fixed tokens by transformers."""

    folder: Path
    hidden: list[torch.Tensor]
    attentions: list[torch.Tensor]
    logits: torch.Tensor


def write(folder: Path, family: str) -> Written:
    transformers = pytest.importorskip("transformers")
    from .scoped_model import TOKENS

    name, fields = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, name)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().float()
    exaggerate(model)
    with torch.no_grad():
        seen = model(TOKENS, output_hidden_states=True, output_attentions=True)
    model.save_pretrained(folder)
    return Written(
        folder=folder, hidden=list(seen.hidden_states), attentions=list(seen.attentions),
        logits=seen.logits,
    )  # fmt: skip


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    """A model of each family."""
    root = tmp_path_factory.mktemp("scoped")
    return {family: write(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process as a job of one rank, which leaves nothing to the tests after it."""
    from megatron.core import parallel_state

    from training.distributed import Launch, finalize

    from .scoped_model import join

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "localhost")
        patch.setenv("MASTER_PORT", "0")
        join(1, 1, Launch(rank=0, local_rank=0, world_size=1, local_world_size=1))
        yield
        parallel_state.destroy_model_parallel()
        finalize()


@pytest.fixture
def model_of(alone: None, written: dict[str, Written]) -> Callable[[str], Any]:
    """The model of a family, whole, in this process."""
    from .scoped_model import load

    return lambda family: load(written[family].folder, 1, 1)


def run_ranks(num_ranks: int, *words: object, timeout_s: float = 280) -> str:
    """Run a program on some ranks; its output."""
    done = ranks.run(*words, num_ranks=num_ranks, timeout_s=timeout_s, check=True)
    return done.stdout + done.stderr
