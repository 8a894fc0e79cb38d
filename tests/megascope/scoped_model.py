"""Looking into a model of a Hugging Face folder in one layout; also a program for several ranks.

    torchrun … scoped_model.py OUT TENSOR,PIPELINE[,sequence]… -- FOLDER…

Every rank writes OUT/<layout>-<model>-<rank>.pt: what it saw of the model, with and without
interventions, and the logits of its share.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megascope.capture import Capture, Sight, find_spots
from megascope.interventions import Intervening, TensorShares
from megascope.request import Intervention
from training.arguments import resolve_sizes
from training.checkpoint_folder import settings_to_use
from training.distributed import Launch, initialize, read_launch, seed_everything
from training.hf.families import read_family
from training.hf.weights import load_hf

NUM_TOKENS = 24
TOKENS = torch.arange(NUM_TOKENS)[None] * 7 % 203
CHANGES = {
    "noise": Intervention(place="residual", kind="noise", layers=(2,), amount=0.1, seed=3),
    "neurons": Intervention(place="neurons", kind="scale_noise", amount=0.5, seed=4),
    "head": Intervention(place="context", kind="zero", layers=(1, 3), units=(1, 6)),
    "key": Intervention(place="query", kind="scale", layers=(2,), units=(0, 7), amount=3.0),
    "fc1": Intervention(place="fc1", kind="scale", units=(0, 70, 100), amount=-1.0),
    "bias": Intervention(place="attention_out", kind="zero", layers=(4,)),
    "token": Intervention(place="residual", kind="zero", layers=(1,), tokens=(5, 9)),
    "bits": Intervention(place="fc1", kind="flip", layers=(2,), amount=40, seed=9, bit=24),
    "more bits": Intervention(place="fc2", kind="flip", amount=40, seed=9, bit=24),
}


def join(tensor: int, pipeline: int, launch: Launch, *, sequence: bool = False) -> None:
    """Take this process's place in a layout, for the first time or anew."""
    values = {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 12}
    values |= {"max_position_embeddings": 64}
    settings = settings_to_use(
        values,
        "float32",
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        sequence_parallel=sequence,
    )
    sizes = resolve_sizes(settings, launch.world_size, is_trained=False)
    if not dist.is_initialized():
        initialize(settings, sizes, launch, "cpu")
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
    )
    seed_everything(1)


def load(folder: Path, tensor: int, pipeline: int, *, sequence: bool = False) -> Any:
    """The part of a folder's model that this rank has."""
    from training.distributed import allow_without_transformer_engine
    from training.model import build_bare_model

    allow_without_transformer_engine()
    values = read_family(folder)
    settings = settings_to_use(
        values,
        "float32",
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        sequence_parallel=sequence,
    )
    sizes = resolve_sizes(settings, dist.get_world_size(), is_trained=False)
    (model,) = build_bare_model(settings, sizes, int(str(values["model_vocab_size"])), "cpu")
    load_hf(folder, [model])
    return model


def run(model: Any) -> torch.Tensor | None:
    """Run the fixed tokens through all stages; the logits of this rank's share, on the last."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    positions = torch.arange(NUM_TOKENS)[None]

    def step(data: object, part: Any) -> tuple[object, Callable[..., object]]:
        del data
        return part(TOKENS, positions, None), lambda output, **_: output

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=step, data_iterator=None, model=model, num_microbatches=1,
            seq_length=NUM_TOKENS, micro_batch_size=1, forward_only=True,
            collect_non_loss_data=True,
        )  # fmt: skip
    return outputs[0] if outputs else None


def shares() -> TensorShares:
    """Which tensor-parallel rank this is."""
    from megatron.core import parallel_state

    return TensorShares(
        rank=parallel_state.get_tensor_model_parallel_rank(),
        size=parallel_state.get_tensor_model_parallel_world_size(),
    )


def see(model: Any, places: Sequence[str] | None = None) -> dict[tuple[str, int], Any]:
    """All tensors of one run, by place and layer: the tensor and what share of the whole it is."""
    seen: dict[tuple[str, int], Any] = {}

    def take(sight: Sight) -> None:
        key = (sight.spot.place.name, sight.spot.layer)
        assert key not in seen
        seen[key] = (sight.tensor.clone(), sight.share.value)

    with Capture(find_spots([model], places), take):
        run(model)
    return seen


def changed(model: Any, change: Intervention) -> torch.Tensor | None:
    """The logits with a change."""
    with Intervening([model], [change], shares=shares()):
        return run(model)


def main(out: Path, layouts: Sequence[str], folders: Sequence[Path]) -> None:
    """Look into every model in every layout."""
    launch = read_launch(os.environ)
    for layout in layouts:
        tensor, pipeline, *sequence = layout.split(",")
        options = {"sequence": bool(sequence)}
        join(int(tensor), int(pipeline), launch, **options)
        for folder in folders:
            model = load(folder, int(tensor), int(pipeline), **options)
            before = run(model)
            found = {"seen": see(model)}
            found["changed"] = {name: changed(model, one) for name, one in CHANGES.items()}
            after = run(model)
            found["same"] = before is None or torch.equal(before, after)
            torch.save(found, out / f"{layout}-{folder.name}-{launch.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    at = sys.argv.index("--")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:at], [Path(one) for one in sys.argv[at + 1 :]])
