"""The real commands, from a Hugging Face folder to a checkpoint and back."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megascan.errors import InputError
from training.checkpoint import CheckpointTensors
from training.checkpoint_folder import SavedSettings, write_saved
from training.convert import main as convert
from training.distributed import Launch
from training.generation.job import open_job
from training.hf.families import read_family
from training.hf.rules import Form, rules_of
from training.hf.weights import (
    check_names,
    open_weights,
    plan,
    publish_model,
    read_sources,
    writing,
)
from training.origin import hugging_face_defaults

HERE = Path(__file__).parent
WITH_TOKENIZER, TOKENIZER_FILES = "llama2", ("tokenizer.json", "tokenizer_config.json")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.timeout(900)
def test_every_family_goes_in_computes_the_same_and_comes_back_bit_for_bit(
    run: Run, models: Path, tmp_path: Path
) -> None:
    done = run(HERE / "round_trips.py", models, tmp_path)
    assert done.returncode == 0, done.stderr
    results = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("result")]
    names = sorted(path.name for path in models.iterdir() if path.is_dir())
    assert results == [[name, "True", "True", "True"] for name in names]
    assert done.stdout.count("check passed") == 2 * len(names)
    # One of them has a tokenizer, whose files go along.
    for name in TOKENIZER_FILES:
        came, went = models / WITH_TOKENIZER / name, tmp_path / WITH_TOKENIZER / "back" / name
        assert went.read_bytes() == came.read_bytes()


@pytest.mark.timeout(900)
@pytest.mark.distributed
def test_every_family_computes_the_same_in_combined_layouts(run: Run, models: Path) -> None:
    done = run(HERE / "layouts.py", models, num_ranks=4)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("tp")]
    left_out = [line for line in done.stdout.splitlines() if line.startswith("left out")]
    configs = [(path / "config.json").read_text() for path in models.iterdir() if path.is_dir()]
    num_mixtures = sum("num_local_experts" in config for config in configs)
    assert len(rows) + len(left_out) == 2 * len(configs) + 2 * num_mixtures
    assert all("random-" in line and "divi" in line for line in left_out)  # sizes drawn at random
    assert {row[0] for row in rows} == {
        "tp4-pp1-vpp1-ep1", "tp2-pp2-vpp2-ep1", "tp1-pp1-vpp1-ep4", "tp1-pp2-vpp1-ep2",
    }  # fmt: skip
    assert max(float(row[2]) for row in rows) < 1e-5, rows


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ((), 2, "give --from-hf and --save, or --load and --to-hf"),
        (("--from-hf", "x", "--to-hf", "y"), 2, "give --from-hf and --save"),
        (("--load", "x", "--to-hf", "y", "--max-shard-size-gb", "nan"), 2, "is nan, but must be"),
        (("--load", "x", "--to-hf", "y", "--max-shard-size-gb", "inf"), 2, "is inf, but must be"),
        (("--from-hf", "nowhere", "--save", "x"), 1, "cannot read nowhere/config.json"),
        (("--load", "nowhere", "--to-hf", "x"), 1, "nowhere has no latest_checkpointed"),
    ],
)
def test_wrong_words_end_in_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, sentence: str
) -> None:
    assert convert(words) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_a_converted_model_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("0\n")
    assert convert(["--from-hf", str(models / "gpt2"), "--save", str(tmp_path)]) == 1
    assert "give another folder or --force" in capsys.readouterr().err


def test_the_folder_that_is_read_is_not_replaced_by_force(
    capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path
) -> None:
    """The checkpoint of iteration 0 is replaced as a whole, with all that lies in it."""
    source = tmp_path / "iter_0000000" / "gpt2"
    shutil.copytree(models / "gpt2", source)
    assert convert(["--from-hf", str(source), "--save", str(tmp_path), "--force"]) == 1
    assert "lies in the checkpoint that would be replaced" in capsys.readouterr().err
    assert set(weights_of(source)) == set(weights_of(models / "gpt2"))


@pytest.mark.parametrize("taken", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_weights_that_lie_in_the_way_are_not_replaced(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path, taken: str
) -> None:
    (tmp_path / taken).write_text("mine")
    assert convert(["--load", str(checkpoint), "--to-hf", str(tmp_path)]) == 1
    assert f"already has {taken}; give another folder or --force" in capsys.readouterr().err
    assert (tmp_path / taken).read_text() == "mine"


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as far as it says of itself."""
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "latest_checkpointed_iteration.txt").write_text("0\n")
    (folder / "iter_0000000").mkdir()
    model: dict[str, object] = dict.fromkeys(
        (
            "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
            "max_position_embeddings", "model_vocab_size",
        ),
        4,
    )  # fmt: skip
    model |= {"num_experts": None, "untie_embeddings_and_output_weights": True}
    write_saved(
        SavedSettings(folder=folder / "iter_0000000", model=model, dtype="float32", tokenizer=None)
    )
    return folder


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"dtype": "float32"', '"dtype": "int99"'),
        ('"num_layers": 4', '"layers": 4'),
        ('"num_layers": 4', '"num_layers": "four"'),
        ('"num_experts": null', '"experts": null'),
        ('"untie_embeddings_and_output_weights": true', '"untied": true'),
        ('"hf_config": null', '"hf_config": 3'),
        ('"num_layers": 4', '"num_layers": 4, "moe_aux_loss_coeff": [1]'),
    ],
)
def test_settings_that_no_model_has_are_said_in_one_sentence(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path, before: str, after: str
) -> None:
    file = checkpoint / "iter_0000000" / "settings.json"
    file.write_text(file.read_text().replace(before, after))
    assert convert(["--load", str(checkpoint), "--to-hf", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file} is not as it was written" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_layers", [3, 5, 10**9])
def test_tensors_of_another_number_of_layers_are_no_model(
    capsys: pytest.CaptureFixture[str], models: Path, tmp_path: Path, num_layers: int
) -> None:
    there, out = tmp_path / "checkpoints", tmp_path / "out"
    assert convert(["--from-hf", str(models / "gpt2"), "--save", str(there)]) == 0
    file = there / "iter_0000000" / "settings.json"
    saved = json.loads(file.read_text())
    for values, name in ((saved["model"], "num_layers"), (saved["hf_config"], "n_layer")):
        assert values[name] == 4
        values[name] = num_layers
    file.write_text(json.dumps(saved))
    capsys.readouterr()
    assert convert(["--load", str(there), "--to-hf", str(out)]) == 1
    assert f"(4,) and its settings.json says ({num_layers},)" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("kind", "key", "value", "sentence"),
    [
        ("gpt2", "n_layer", 5, "has no tensor transformer.h.4.ln_1.weight, which its config.json"),
        ("gpt2", "n_layer", 10**9, "has no tensor transformer.h.4.ln_1.weight"),
        ("mixtral", "num_local_experts", 10**9, r"has no tensor model.layers.0.+experts.\d+.w1"),
        ("llama2", "hidden_size", 48 * 10**6, r"embed_tokens.weight of \(203, 48\), and its conf"),
    ],
)
def test_a_configuration_of_more_than_the_files_hold_is_refused_before_a_model_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, models: Path,
    tmp_path: Path, kind: str, key: str, value: int, sentence: str,
) -> None:  # fmt: skip
    """However many layers it claims: building them would end with the machine's memory."""
    monkeypatch.setattr("training.model.build_bare_model", lambda *_: pytest.fail("it was built"))
    folder = tmp_path / kind
    shutil.copytree(models / kind, folder)
    config = json.loads((folder / "config.json").read_text())
    assert config[key] < value
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    assert convert(["--from-hf", str(folder), "--save", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(sentence, line), line
    with pytest.raises(InputError, match=sentence):  # what the trainer reads at its start
        hugging_face_defaults(folder)
    words = ["--load-hf", str(folder), "--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]
    alone = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)
    with pytest.raises(InputError, match=sentence):
        open_job([*words, "--distributed-backend", "gloo"], alone)


def test_tensors_that_are_something_else_are_said_in_one_sentence(checkpoint: Path) -> None:
    (checkpoint / "iter_0000000" / ".metadata").write_bytes(pickle.dumps(1))
    with pytest.raises(InputError, match="cannot read the checkpoint"):
        CheckpointTensors(checkpoint / "iter_0000000")


def test_a_place_that_cannot_be_written_is_said_before_the_work(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert convert(["--load", str(checkpoint), "--to-hf", str(tmp_path / "file" / "x")]) == 1
    assert f"{tmp_path / 'file'} is no folder; give another" in capsys.readouterr().err


def test_a_model_that_is_replaced_leaves_nothing_of_its_own(models: Path, tmp_path: Path) -> None:
    """The index of an earlier model in several files would be read before the new one's file."""
    there, made = tmp_path / "there", tmp_path / "made"
    shutil.copytree(models / "gpt2", made)
    there.mkdir()
    (there / "notes.txt").write_text("mine")
    earlier = {"old": torch.ones(2)}
    save_file(earlier, there / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"old": "model-00001-of-00001.safetensors"}}
    (there / "model.safetensors.index.json").write_text(json.dumps(index))
    publish_model(made, there)
    assert set(weights_of(there)) == set(weights_of(models / "gpt2"))
    assert (there / "notes.txt").read_text() == "mine"
    assert list(made.iterdir()) == []


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    there = open_weights(folder)
    return {name: there.read([name])[0].clone() for name in there.file_of}


def copy_config(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())


def test_torchs_own_format_is_read_in_one_file_and_in_several(models: Path, tmp_path: Path) -> None:
    tensors = load_file(models / "llama2" / "model.safetensors")
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    whole.mkdir()
    sharded.mkdir()
    torch.save(tensors, whole / "pytorch_model.bin")
    names = {name: f"part{index % 2}.bin" for index, name in enumerate(tensors)}
    for file in set(names.values()):
        torch.save({n: t for n, t in tensors.items() if names[n] == file}, sharded / file)
    index = {"weight_map": names}
    (sharded / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for folder in (whole, sharded):
        found = weights_of(folder)
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert open_weights(folder).dtype() == "float32"


@pytest.mark.parametrize(
    "table", [{"a": "text"}, {1: torch.ones(2)}, {"model": {"a": torch.ones(2)}}]
)
def test_torchs_own_format_with_other_things_than_tensors_is_refused(
    tmp_path: Path, table: dict[object, object]
) -> None:
    torch.save(table, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="it holds no table of tensors"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("transformer.wte.weight", torch.tensor(1.0), r"of \(\), and its config.json says"),
        ("transformer.h.1.mlp.c_fc.weight", torch.tensor(1.0), r"of \(\), which its config"),
        ("transformer.h.1.ln_1.weight", torch.ones(48, dtype=torch.int64), "in int64, expected a"),
        ("transformer.h.1.ln_1.weight", torch.ones(48) > 0, "in bool, expected a floating-point"),
    ],
)
def test_a_tensor_that_is_no_weight_is_refused_and_nothing_is_left(
    capsys: pytest.CaptureFixture[str],
    models: Path,
    tmp_path: Path,
    name: str,
    tensor: torch.Tensor,
    sentence: str,
) -> None:
    shutil.copytree(models / "gpt2", tmp_path / "gpt2")
    file = tmp_path / "gpt2" / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})
    assert convert(["--from-hf", str(tmp_path / "gpt2"), "--save", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(sentence, line)
    assert list((tmp_path / "out").glob("*")) == []


def test_files_are_divided_at_the_size_that_is_asked_for(models: Path, tmp_path: Path) -> None:
    tensors = weights_of(models / "qwen2")
    files = plan({name: tensor.to("meta") for name, tensor in tensors.items()}, 50_000)
    with writing(tmp_path, files) as writer:
        for file in files:
            for name in file.tensors:
                writer.write(name, tensors[name])
    assert len(files) > 2
    for file in files:
        read = load_file(tmp_path / file.name)
        assert all(torch.equal(read[name], tensors[name]) for name in file.tensors)
    assert set(weights_of(tmp_path)) == set(tensors)


def test_the_place_of_a_tensor_in_the_plan_is_heeded(tmp_path: Path) -> None:
    files = plan({"a": torch.empty(2, device="meta"), "b": torch.empty(3, device="meta")}, 100)
    with pytest.raises(ValueError, match="b of"), writing(tmp_path, files) as writer:
        writer.write("b", torch.zeros(3))


def refusal(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    values = read_family(folder)
    with pytest.raises(InputError) as caught:
        weights = open_weights(folder)
        check_names(weights, rules_of(config["model_type"], values), values)
        weights.read(weights.file_of)
    return str(caught.value)


def test_a_tensor_that_nothing_reads_is_refused(models: Path, tmp_path: Path) -> None:
    copy_config(models / "llama2", tmp_path)
    tensors = weights_of(models / "llama2")
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "does not ask for: model.layers.0.self_attn.q_proj.bias" in refusal(tmp_path)


def test_a_second_output_layer_beside_a_tied_one_must_be_the_same(
    models: Path, tmp_path: Path
) -> None:
    copy_config(models / "qwen2-tied", tmp_path)
    tensors = weights_of(models / "qwen2-tied")
    embedding = tensors["model.embed_tokens.weight"]
    values = read_family(tmp_path)
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    check_names(open_weights(tmp_path), rules_of("qwen2", values), values)
    save_file({**tensors, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    assert "another lm_head.weight" in refusal(tmp_path)


def test_an_embedding_for_another_vocabulary_is_refused(models: Path) -> None:
    weights, values = open_weights(models / "llama2"), read_family(models / "llama2")
    for rule in rules_of("llama", values):
        if rule.form is Form.VOCABULARY:
            assert read_sources(weights, rule, rule.sources, 203)[0].shape[0] == 203
            with pytest.raises(InputError, match="for 203 ids, and its"):
                read_sources(weights, rule, rule.sources, 210)


def test_old_names_and_constants_are_understood(models: Path, tmp_path: Path) -> None:
    copy_config(models / "gpt2", tmp_path)
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in weights_of(models / "gpt2").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    weights, values = open_weights(tmp_path), read_family(tmp_path)
    check_names(weights, rules_of("gpt2", values), values)
    assert weights.dtype() == "float32"
    assert torch.equal(weights.read(["transformer.wpe.weight"])[0], tensors["wpe.weight"])


def test_damaged_and_missing_files_are_errors_of_one_sentence(models: Path, tmp_path: Path) -> None:
    copy_config(models / "llama2", tmp_path)
    assert "has no weights" in refusal(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes((models / "llama2" / "model.safetensors").read_bytes()[:1000])
    assert "cannot read weights from" in refusal(tmp_path)
    file.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04 not a model")
    assert "cannot read weights from" in refusal(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    assert "outside of its folder" in refusal(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert "which is not there" in refusal(tmp_path)
