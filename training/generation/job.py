"""One generating job, from a command line to an engine on every rank."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.errors import ConfigError, UsageError
from training.arguments import Settings, Sizes, TrainerParser, resolve_sizes
from training.checkpoint_folder import TOKENIZER_FOLDER, saved_settings, settings_to_use
from training.data.tokenizers import (
    Tokenizer,
    TokenizerSettings,
    add_tokenizer_arguments,
    build_tokenizer,
)
from training.distributed import Launch, choose_device, finalize, initialize, silence
from training.generation.request import Limits
from training.hf.families import end_ids, read_config, read_family, sliding_window
from training.origin import hugging_face_tokenizer

if TYPE_CHECKING:
    import torch

    from training.generation.engine import Engine, GenerationCallback, StepRecorder

_MOST_ROWS = 32
_PROMPT_TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the model comes from: either a checkpoint or a Hugging Face folder is given."""

    checkpoint: Path | None
    hugging_face: Path | None
    values: dict[str, object]
    """Values for the trainer's settings, by field name."""
    dtype: str
    """Torch's name of the number format."""
    window: int | None
    """Size of the sliding window of Hugging Face's model, in positions; None: no window."""
    end_ids: tuple[int, ...]
    """Tokens that the model's files declare as ends, in addition to the tokenizer's own."""

    @property
    def name(self) -> str:
        """Return the model's name unless somebody gives another."""
        folder = self.hugging_face or self.checkpoint
        assert folder is not None  # one of the two is given
        return (folder.parent if folder.name.startswith("iter_") else folder).resolve().name

    def check(self) -> None:
        """Raise InputError for a Hugging Face folder whose files do not fit its description."""
        if self.hugging_face is not None:
            from training.hf.weights import check_folder

            check_folder(self.hugging_face)

    def load(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Fill this rank's part of the model."""
        if self.hugging_face is not None:
            from training.hf.weights import load_hf

            load_hf(self.hugging_face, chunks)
        elif self.checkpoint is not None:
            from training.checkpoint import load_weights

            load_weights(self.checkpoint, chunks)


@dataclass(frozen=True, kw_only=True)
class GenerationJob:
    """A job whose flags are known to fit together."""

    launch: Launch
    source: Source
    settings: Settings
    sizes: Sizes
    tokenizer_settings: TokenizerSettings
    tokenizer: Tokenizer
    vocab_size: int
    stop_ids: tuple[int, ...]
    """Tokens that end an answer."""
    limits: Limits
    device: str
    has_graphs: bool
    """Whether steps of one token a row are recorded as CUDA graphs."""

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Join the job as one of its ranks, and leave it at the end of the context."""
        try:
            self.join()
            yield
        finally:
            finalize()

    def join(self) -> None:
        """Join the job as one of its ranks, for as long as the process lives."""
        silence(self.device)
        initialize(self.settings, self.sizes, self.launch, self.device)

    def build_engine(
        self,
        callback: GenerationCallback | None = None,
        *,
        num_extra_slots: int = 0,
        recorder: StepRecorder | None = None,
    ) -> Engine:
        """Build the engine and fill its model; call this inside `joined`, on every rank.

        Without a recorder, steps are replayed by CUDA graphs where `has_graphs` is set.
        """
        from training.generation.engine import CudaGraphs, Engine
        from training.generation.stage import Stage

        stage = Stage(
            self.settings, self.sizes, self.vocab_size, self.device, self.limits,
            num_extra_slots=num_extra_slots,
        )  # fmt: skip
        self.source.load([stage.model])
        if recorder is None and self.has_graphs:
            recorder = CudaGraphs()
        return Engine(stage, self.limits, callback, recorder)


def add_job_arguments(parser: TrainerParser) -> None:
    """Declare the flags of model, layout and batch, with Megatron-LM's names where they exist."""
    group = parser.add_argument_group("model")
    group.add_argument("--load", type=Path, metavar="DIR", help="folder of a checkpoint")
    group.add_argument("--load-hf", type=Path, metavar="DIR", help="Hugging Face folder instead")
    group.add_argument(
        "--bf16", action="store_true", help="weights in bfloat16, whatever they are on the disk"
    )
    group.add_argument("--fp32", action="store_true", help="weights in float32, likewise")
    group = parser.add_argument_group("layout")
    for name, text in (
        ("tensor", "ranks that share each layer"), ("pipeline", "pipeline stages"),
    ):  # fmt: skip
        group.add_argument(
            f"--{name}-model-parallel-size", type=int, default=1, metavar="N",
            help=f"{text} (default: 1); both sizes together make the number of ranks",
        )  # fmt: skip
    group.add_argument(
        "--distributed-backend", choices=("nccl", "gloo"),
        help="nccl runs on GPUs, gloo on the CPU; left out: nccl where there are GPUs",
    )  # fmt: skip
    group = parser.add_argument_group("batch")
    group.add_argument(
        "--inference-max-requests", type=int, default=_MOST_ROWS, metavar="N",
        help=f"rows that generate side by side (default: {_MOST_ROWS})",
    )  # fmt: skip
    group.add_argument(
        "--inference-max-seq-length", type=int, metavar="N",
        help="longest row, prompt and answer together; left out: the model's longest sequence",
    )  # fmt: skip
    group.add_argument(
        "--inference-dynamic-batching-max-tokens", type=int, metavar="N",
        help="prompt tokens that are read in one step, beside the rows that generate "
        f"(default: {_PROMPT_TOKENS['cuda']} on GPUs, {_PROMPT_TOKENS['cpu']} on the CPU)",
    )  # fmt: skip
    group.add_argument(
        "--cuda-graph-impl", choices=("local", "none"), default="local",
        help="local: steps that only generate are recorded as CUDA graphs, on GPUs, for dense "
        "models in one pipeline stage; none: nothing is recorded (default: local)",
    )  # fmt: skip
    add_tokenizer_arguments(parser)


def open_job(arguments: Sequence[str], launch: Launch) -> GenerationJob:
    """Read the job of a command line that has no other flags than `add_job_arguments` declares."""
    parser = TrainerParser(prog="generation", allow_abbrev=False)
    add_job_arguments(parser)
    return read_job(parser.parse_args(arguments), launch)


def read_job(given: argparse.Namespace, launch: Launch) -> GenerationJob:
    """Check a parsed command line and return its job.

    Raises UsageError, ConfigError or InputError, the same on all ranks.
    """
    source, tokens = _source(given)
    choices: dict[str, object] = {
        "tensor_model_parallel_size": given.tensor_model_parallel_size,
        "pipeline_model_parallel_size": given.pipeline_model_parallel_size,
        "distributed_backend": given.distributed_backend,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_token_dispatcher_type": "allgather",
    }
    settings = settings_to_use(source.values, source.dtype, **choices)
    sizes = resolve_sizes(settings, launch.world_size, is_trained=False)
    if sizes.data_size > 1:
        raise ConfigError(
            f"{launch.world_size} ranks are started for tensor size {sizes.tensor_size} x pipeline "
            f"size {sizes.pipeline_size}; start {sizes.tensor_size * sizes.pipeline_size}"
        )
    if given.tokenizer_type is not None or tokens is None:
        tokens = TokenizerSettings.from_arguments(given)
    tokenizer = build_tokenizer(tokens)
    device = choose_device(settings, launch)
    vocab_size = int(str(source.values["model_vocab_size"]))
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model knows {vocab_size}; "
            "choose the model's own tokenizer"
        )
    limits = _limits(given, settings, sizes, device, source.window)
    source.check()
    return GenerationJob(
        launch=launch,
        source=source,
        settings=settings,
        sizes=sizes,
        tokenizer_settings=tokens,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        stop_ids=tuple(dict.fromkeys((tokenizer.eod, *source.end_ids))),
        limits=limits,
        device=device,
        # No graphs with experts or several stages: the host chooses experts and waits for stages.
        has_graphs=given.cuda_graph_impl == "local"
        and device.startswith("cuda")
        and sizes.pipeline_size == 1
        and settings.moe.num_experts is None,
    )


def _source(given: argparse.Namespace) -> tuple[Source, TokenizerSettings | None]:
    """Return where the model comes from, and the tokenizer that comes with it, if any."""
    if (given.load is None) == (given.load_hf is None):
        raise UsageError("give either --load, a checkpoint, or --load-hf, a Hugging Face folder")
    if given.bf16 and given.fp32:
        raise UsageError("--bf16 and --fp32 exclude each other; keep one")
    config: Mapping[str, object] | None
    if given.load is not None:
        saved = saved_settings(given.load)
        folder, values, dtype, tokens = saved.folder, saved.model, saved.dtype, saved.tokenizer
        config, declaring = saved.hf_config, saved.folder / TOKENIZER_FOLDER
    else:
        folder, values = None, read_family(given.load_hf)
        config, tokens = read_config(given.load_hf), hugging_face_tokenizer(given.load_hf)
        dtype, declaring = _dtype_of(config), given.load_hf
    if given.bf16 or given.fp32:
        dtype = "bfloat16" if given.bf16 else "float32"
    source = Source(
        checkpoint=folder,
        hugging_face=given.load_hf,
        values=dict(values),
        dtype=dtype,
        window=None if config is None else sliding_window(Path("config.json"), config),
        end_ids=end_ids(declaring, config or {}),
    )
    return source, tokens


def _dtype_of(config: Mapping[str, object]) -> str:
    """Return the number format of the weights that a Hugging Face folder names."""
    named = config.get("dtype") or config.get("torch_dtype")
    return named if named in ("bfloat16", "float16") else "float32"


def _limits(
    given: argparse.Namespace, settings: Settings, sizes: Sizes, device: str, window: int | None
) -> Limits:
    longest = sizes.max_position_embeddings
    wanted = longest
    if given.inference_max_seq_length is not None:
        wanted = given.inference_max_seq_length
    num_prompt_tokens = given.inference_dynamic_batching_max_tokens
    if num_prompt_tokens is None:
        num_prompt_tokens = _PROMPT_TOKENS[device.partition(":")[0]]
    for option, value in (
        ("--inference-max-requests", given.inference_max_requests),
        ("--inference-max-seq-length", wanted),
        ("--inference-dynamic-batching-max-tokens", num_prompt_tokens),
    ):
        if value < 1:
            raise ConfigError(f"{option} is {value}, but must be at least 1")
    if wanted > longest and settings.model.position_embedding_type == "learned_absolute":
        raise ConfigError(
            f"--inference-max-seq-length is {wanted}, but the model has learnt only {longest} "
            "positions; lower it"
        )
    if window is not None and wanted > window:
        raise ConfigError(
            f"--inference-max-seq-length is {wanted}, but the model has a sliding window of "
            f"{window} positions, and attention here does not slide; lower it"
        )
    return Limits(
        num_rows=given.inference_max_requests,
        max_length=wanted,
        max_prompt_tokens=num_prompt_tokens,
    )
