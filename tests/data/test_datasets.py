"""Indexed data to samples: contents, splits, blends, caches, and what does not fit."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset

from megascan.errors import ConfigError, InputError, MegaScanError, UsageError
from tests import ranks
from training.data.blend import (
    DataSettings,
    add_data_arguments,
    data_settings,
    parse_blend,
    split_bounds,
)
from training.data.datasets import build_datasets
from training.data.tokenizers import ByteTokenizer, NullTokenizer
from training.preprocess_data import main as preprocess

ROOT = Path(__file__).resolve().parents[2]
EOD = 256


def write_data(folder: Path, name: str, texts: Sequence[str]) -> str:
    """Preprocess texts with bytes as ids; returns the prefix."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    output = ["--output-prefix", str(folder / name), "--append-eod", "--force"]
    preprocess(["--input", str(source), "--tokenizer-type", "ByteTokenizer", *output])
    return str(folder / f"{name}_text_document")


def settings_for(*data_path: str, **changes: object) -> DataSettings:
    values = {"data_path": data_path, "split": "8,1,1", "seq_length": 16, "num_samples": (20, 4, 4)}
    return DataSettings(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def letters(tmp_path: Path) -> str:
    """Ten documents: aaaa…, bbbb…, to jjjj…, 50 letters each."""
    return write_data(tmp_path, "letters", [letter * 50 for letter in "abcdefghij"])


def letters_in(dataset: Sequence[dict[str, torch.Tensor]]) -> set[str]:
    tokens = torch.cat([dataset[index]["tokens"] for index in range(len(dataset))])
    return {chr(token) for token in tokens.unique().tolist() if token != EOD}


def test_samples_are_windows_of_the_documents(letters: str) -> None:
    train = build_datasets(settings_for(letters), ByteTokenizer()).train
    assert isinstance(train, GPTDataset)
    assert len(train) >= 20
    for index in range(len(train)):
        sample = train[index]
        assert sample["tokens"].shape == sample["labels"].shape == (16,)
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        assert sample["attention_mask"].shape == (1, 16, 16)
        text = sample["tokens"].tolist()
        runs = {(a, b) for a, b in itertools.pairwise(text) if a != b}
        assert all(EOD in run for run in runs)  # letters change only at the end of a document


def test_split_parts_the_documents(letters: str) -> None:
    datasets = build_datasets(settings_for(letters), ByteTokenizer())
    assert letters_in(datasets.train) == set("abcdefgh")
    assert letters_in(datasets.valid) == {"i"}
    assert letters_in(datasets.test) == {"j"}


def test_more_samples_than_an_epoch_read_it_again(letters: str) -> None:
    one_epoch = 10 * 51 // 16
    settings = settings_for(letters, split="1", num_samples=(5 * one_epoch, 0, 0))
    datasets = build_datasets(settings, ByteTokenizer())
    assert len(datasets.train) >= 5 * one_epoch
    assert (datasets.valid, datasets.test) == (None, None)


def test_seed_decides_the_order(letters: str) -> None:
    def order(seed: int) -> list[list[int]]:
        train = build_datasets(settings_for(letters, seed=seed), ByteTokenizer()).train
        return [train[index]["tokens"].tolist() for index in range(20)]

    assert order(1) == order(1) != order(2)


def test_blend_mixes_by_weight(tmp_path: Path) -> None:
    paths = [write_data(tmp_path, name, [name * 50] * 40) for name in "xy"]
    settings = settings_for("30", paths[0], "10", paths[1], num_samples=(80, 0, 0))
    train = build_datasets(settings, ByteTokenizer()).train
    sources = [int(train[index]["dataset_id"]) for index in range(80)]
    assert (sources.count(0), sources.count(1)) == (60, 20)


def test_blend_without_weights_is_one_epoch(tmp_path: Path) -> None:
    paths = [write_data(tmp_path, name, [name * 50] * 40) for name in "xy"]
    settings = settings_for(*paths, num_samples=(100, 0, 0))
    assert len(build_datasets(settings, ByteTokenizer()).train) == 100
    with pytest.raises(ConfigError, match=r"202 samples and 500 are asked.*give weights"):
        build_datasets(settings_for(*paths, num_samples=(500, 0, 0)), ByteTokenizer())


def test_other_data_under_the_same_name_is_not_read_by_the_old_index(
    tmp_path: Path, letters: str
) -> None:
    settings = settings_for(letters, split="1", num_samples=(20, 0, 0))
    build_datasets(settings, ByteTokenizer())
    write_data(tmp_path, "letters", ["z" * 7] * 30)
    assert letters_in(build_datasets(settings, ByteTokenizer()).train) == {"z"}


def test_indices_are_kept_where_it_is_said(letters: str, tmp_path: Path) -> None:
    cache = tmp_path / "elsewhere"
    build_datasets(settings_for(letters, data_cache_path=str(cache)), ByteTokenizer())
    assert len(list(cache.glob("*-train-sample_index.npy"))) == 1
    written = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    build_datasets(settings_for(letters, data_cache_path=str(cache)), ByteTokenizer())
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == written


def test_a_cache_that_cannot_be_written_is_one_sentence(letters: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = settings_for(letters, data_cache_path=str(tmp_path / "file" / "cache"))
    with pytest.raises(MegaScanError, match="cannot write or read the sample indices"):
        build_datasets(settings, ByteTokenizer())


def test_masks_follow_the_flags(letters: str) -> None:
    settings = settings_for(
        letters, seq_length=120, reset_position_ids=True, reset_attention_mask=True,
        eod_mask_loss=True, split="1", num_samples=(4, 0, 0),
    )  # fmt: skip
    sample = build_datasets(settings, ByteTokenizer()).train[0]
    end = sample["tokens"].tolist().index(EOD)
    assert sample["loss_mask"][end] == 0
    assert sample["position_ids"][end : end + 3].tolist() == [end, 0, 1]
    assert bool(sample["attention_mask"][0, end + 1, end])  # True is masked
    plain = build_datasets(settings_for(letters, create_attention_mask=False), ByteTokenizer())
    assert "attention_mask" not in plain.train[0]
    assert plain.train[0]["loss_mask"].min() == 1


def test_mock_data_needs_no_files() -> None:
    settings = DataSettings(mock_data=True, seq_length=64, num_samples=(10, 2, 0))
    datasets = build_datasets(settings, NullTokenizer(100))
    tokens = torch.stack([datasets.train[index]["tokens"] for index in range(10)])
    assert tokens.shape == (10, 64)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) <= 100
    assert len(datasets.valid) >= 2
    assert datasets.test is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_samples", [(20, 4, 0), (20, 0, 4)])
def test_a_split_without_documents_is_refused(letters: str, num_samples: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="none of the 10 documents of"):
        build_datasets(
            settings_for(letters, split="1000,1,1", num_samples=num_samples), ByteTokenizer()
        )


@pytest.mark.timeout(60)
def test_a_split_without_documents_is_no_matter_when_nothing_is_asked(letters: str) -> None:
    settings = settings_for(letters, split="949,50,1", num_samples=(20, 0, 0))
    assert build_datasets(settings, ByteTokenizer()).valid is None


def test_data_of_a_larger_vocabulary_is_refused(letters: str) -> None:
    with pytest.raises(ConfigError, match="has the id 256, but the tokenizer has 101"):
        build_datasets(settings_for(letters), NullTokenizer(100))


def test_damaged_files_are_named(letters: str) -> None:
    data, index = Path(f"{letters}.bin"), Path(f"{letters}.idx")
    whole = index.read_bytes()
    index.write_bytes(b"something else entirely, but long enough")
    _refused(letters, "is not an index of Megatron's")
    index.write_bytes(whole[:9] + b"\x09" + whole[10:])
    _refused(letters, "has version 9")
    index.write_bytes(whole[:40])
    _refused(letters, "idx is cut off: it has 40 of")
    index.write_bytes(whole[:-1])
    _refused(letters, "idx is cut off")
    index.write_bytes(whole)
    data.write_bytes(data.read_bytes()[:-2])
    _refused(letters, "has 1018 bytes and .* tells of 1020")
    data.unlink()
    _refused(letters, "bin is not there")
    _refused(f"{letters}.bin", "without its ending")


def _refused(prefix: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_datasets(settings_for(prefix), ByteTokenizer())


@pytest.mark.parametrize(
    ("data_path", "expected"),
    [
        (["a"], (None, ["a"])),
        (["7"], (None, ["7"])),
        (["a", "b", "c"], (None, ["a", "b", "c"])),
        (["0.5", "a", "2", "b"], ([0.5, 2.0], ["a", "b"])),
        (["1", "2"], ([1.0], ["2"])),
    ],
)
def test_blends(data_path: list[str], expected: tuple[list[float] | None, list[str]]) -> None:
    assert parse_blend(data_path) == expected


@pytest.mark.parametrize(
    "data_path", [["1", "a", "b"], ["1", "a", "b", "c"], ["0", "a"], ["-1", "a"], ["nan", "a", "1"]]
)
def test_blends_that_are_none(data_path: list[str]) -> None:
    with pytest.raises(UsageError, match="positive weights and prefixes in turn"):
        parse_blend(data_path)


def test_split_bounds_are_megatrons(letters: str) -> None:
    assert split_bounds("949,50,1", 200) == [(0, 190), (190, 200), (200, 200)]
    assert split_bounds("1", 7) == [(0, 7), (7, 7), (7, 7)]
    datasets = build_datasets(settings_for(letters, split="5,3,2"), ByteTokenizer())
    bounds = [(int(part.indices[0]), int(part.indices[-1]) + 1) for part in datasets]
    assert bounds == split_bounds("5,3,2", 10)


@pytest.mark.parametrize("split", ["", "a", "1,2,3,4", "-1,2", "0,0,0", "1,,1", "nan,1"])
def test_splits_that_are_none(split: str) -> None:
    with pytest.raises(UsageError, match="--split is"):
        settings_for("a", split=split)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mock_data": True}, "exclude each other"),
        ({"data_path": ()}, "pass --data-path PREFIX, or --mock-data"),
        ({"reset_attention_mask": True, "create_attention_mask": False}, "drop one of them"),
        ({"seq_length": 0}, "sequence length of at least 1"),
        ({"num_samples": (1, -1, 0)}, "sample counts of at least 0"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MegaScanError, match=message):
        settings_for("a", **changes)


def test_flags_reach_the_settings() -> None:
    parser = argparse.ArgumentParser()
    add_data_arguments(parser)
    sizes = {"seq_length": 8, "seed": 3, "num_samples": (1, 2, 3)}
    plain = data_settings(parser.parse_args(["--mock-data"]), **sizes)
    assert plain == DataSettings(mock_data=True, **sizes)
    given = parser.parse_args(
        [
            *("--data-path", "1", "a", "2", "b", "--split", "9,1", "--data-cache-path", "c"),
            *("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"),
            *("--num-workers", "5"),
        ]
    )
    assert given.num_workers == 5
    assert data_settings(given, **sizes) == DataSettings(
        data_path=("1", "a", "2", "b"), split="9,1", data_cache_path="c", reset_position_ids=True,
        reset_attention_mask=True, eod_mask_loss=True, **sizes,
    )  # fmt: skip


RANK_PROGRAM = """
import json, sys, torch.distributed
from training.data.datasets import build_data_iterator
from training.data.datasets import build_datasets
from training.data.blend import DataSettings
from training.data.tokenizers import ByteTokenizer

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
settings = DataSettings(
    data_path=tuple(sys.argv[1:]), split="8,1,1", seq_length=16, num_samples=(16, 4, 0)
)
train = build_datasets(settings, ByteTokenizer()).train
batches = build_data_iterator(train, micro_batch_size=2, dp_rank=rank, dp_size=2)
seen = [batch["tokens"].tolist() for batch in batches][:4]
everything = [None, None]
torch.distributed.all_gather_object(everything, seen)
if rank == 0:
    print(json.dumps(everything))
torch.distributed.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.parametrize("as_blend", [False, True])
def test_ranks_share_one_index_and_part_the_samples(tmp_path: Path, as_blend: bool) -> None:
    paths = [write_data(tmp_path, name, [f"{name}{i}" * 20 for i in range(40)]) for name in "xy"]
    data_path = ["3", paths[0], "1", paths[1]] if as_blend else paths[:1]
    program = tmp_path / "rank_program.py"
    program.write_text(RANK_PROGRAM)
    done = ranks.run(program, *data_path, num_ranks=2, check=True)
    seen = json.loads(done.stdout.splitlines()[-1])
    train = build_datasets(settings_for(*data_path, num_samples=(16, 4, 0)), ByteTokenizer()).train
    expected = [
        [
            [train[4 * batch + 2 * rank + row]["tokens"].tolist() for row in range(2)]
            for batch in range(4)
        ]
        for rank in range(2)
    ]
    assert seen == expected
