"""Each tokenizer: round trip, sizes, end of document; each wrong setting: one sentence."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from megascan.errors import InputError, UsageError
from training.data.tokenizers import (
    TokenizerSettings,
    TokenizerType,
    add_tokenizer_arguments,
    build_tokenizer,
)

TEXT = "The naïve café costs 10 €.\n\tdef f(x): return x  # 例 🎉"


@pytest.fixture(scope="module")
def library() -> Library:
    """A small byte-level BPE that has seen a little English."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    library.train_from_iterator(["the theory of the thing is the thing"] * 9, trainer)
    return library


@pytest.fixture
def gpt2_settings(library: Library, tmp_path: Path) -> TokenizerSettings:
    library.model.save(str(tmp_path))
    return TokenizerSettings(
        tokenizer_type=TokenizerType.GPT2_BPE,
        vocab_file=str(tmp_path / "vocab.json"),
        merge_file=str(tmp_path / "merges.txt"),
    )


def test_gpt2_gives_the_text_back_and_merges(gpt2_settings: TokenizerSettings) -> None:
    tokenizer = build_tokenizer(gpt2_settings)
    ids = tokenizer.tokenize(TEXT)
    assert tokenizer.detokenize(ids) == TEXT
    assert len(tokenizer.tokenize("the thing")) < len("the thing")
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.detokenize([tokenizer.eod]) == "<|endoftext|>"


def test_gpt2_does_not_read_an_end_of_document_out_of_a_text(
    gpt2_settings: TokenizerSettings,
) -> None:
    tokenizer = build_tokenizer(gpt2_settings)
    assert tokenizer.eod not in tokenizer.tokenize("a<|endoftext|>b")


@pytest.mark.parametrize("as_folder", [True, False])
def test_hugging_face_reads_a_file_or_its_folder(
    library: Library, tmp_path: Path, as_folder: bool
) -> None:
    file = tmp_path / "tokenizer.json"
    library.save(str(file))
    tokenizer = build_tokenizer(_hugging_face(tmp_path if as_folder else file))
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    assert (tokenizer.eod, tokenizer.vocab_size) == (
        library.token_to_id("<|endoftext|>"),
        library.get_vocab_size(),
    )


@pytest.mark.parametrize("declared", ["<stop>", {"content": "<stop>", "lstrip": False}])
def test_hugging_face_takes_the_declared_end_before_a_known_one(
    library: Library, tmp_path: Path, declared: object
) -> None:
    copy = Library.from_str(library.to_str())
    copy.add_special_tokens(["<stop>"])
    copy.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": declared}))
    tokenizer = build_tokenizer(_hugging_face(tmp_path))
    assert tokenizer.eod == copy.token_to_id("<stop>")
    assert tokenizer.vocab_size == tokenizer.eod + 1


def test_hugging_face_ignores_saved_truncation_and_keeps_the_template(
    library: Library, tmp_path: Path
) -> None:
    copy = Library.from_str(library.to_str())
    copy.enable_truncation(4)
    end = copy.token_to_id("<|endoftext|>")
    copy.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
    )
    copy.save(str(tmp_path / "tokenizer.json"))
    ids = build_tokenizer(_hugging_face(tmp_path)).tokenize("x" * 50)
    assert ids[0] == end
    assert len(ids) == 51


def test_null_takes_integers_and_ends_with_the_size() -> None:
    tokenizer = build_tokenizer(_null(100))
    assert tokenizer.tokenize("5  0 99\n") == [5, 0, 99]
    assert tokenizer.detokenize([5, 0, 99]) == "5 0 99"
    assert (tokenizer.eod, tokenizer.vocab_size) == (100, 101)


@pytest.mark.parametrize(
    ("text", "message"), [("1 two", "integers"), ("100", "0 to 99"), ("-1", "0 to 99")]
)
def test_null_refuses_what_is_no_id(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_tokenizer(_null(100)).tokenize(text)


def test_bytes_give_the_text_back() -> None:
    tokenizer = build_tokenizer(TokenizerSettings(tokenizer_type=TokenizerType.BYTE))
    ids = tokenizer.tokenize(TEXT)
    assert ids == list(TEXT.encode())
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == TEXT
    assert (tokenizer.eod, tokenizer.vocab_size) == (256, 257)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pass --tokenizer-type, one of GPT2BPETokenizer"),
        (["--tokenizer-type", "GPT2BPETokenizer"], "needs --vocab-file and --merge-file"),
        (["--tokenizer-type", "HuggingFaceTokenizer"], "needs --tokenizer-model"),
        (["--tokenizer-type", "NullTokenizer"], "needs --vocab-size"),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "0"], "--vocab-size is 0"),
        (["--tokenizer-type", "ByteTokenizer", "--vocab-size", "9"], "does not belong"),
    ],
)
def test_flags_that_do_not_fit_the_type(arguments: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    add_tokenizer_arguments(parser)
    with pytest.raises(UsageError, match=message):
        build_tokenizer(TokenizerSettings.from_arguments(parser.parse_args(arguments)))


def test_flags_give_the_settings_back(gpt2_settings: TokenizerSettings) -> None:
    parser = argparse.ArgumentParser()
    add_tokenizer_arguments(parser)
    again = TokenizerSettings.from_arguments(parser.parse_args(gpt2_settings.flags()))
    assert again == gpt2_settings


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        (None, "is not a file"),
        ("{", "is not JSON"),
        ('["a"]', "not a table"),
        ('{"a": 0}', "lacks 255 of the 256 byte symbols"),
    ],
)
def test_gpt2_with_a_wrong_vocabulary(
    gpt2_settings: TokenizerSettings, vocab: str | None, message: str
) -> None:
    file = Path(str(gpt2_settings.vocab_file))
    file.unlink() if vocab is None else file.write_text(vocab)
    with pytest.raises(InputError, match=message):
        build_tokenizer(gpt2_settings)


def test_gpt2_without_an_end_of_document(gpt2_settings: TokenizerSettings) -> None:
    file = Path(str(gpt2_settings.vocab_file))
    vocab = json.loads(file.read_text())
    del vocab["<|endoftext|>"]
    file.write_text(json.dumps(vocab))
    with pytest.raises(InputError, match=r"has no <\|endoftext\|>"):
        build_tokenizer(gpt2_settings)


def test_gpt2_with_the_merges_of_another(gpt2_settings: TokenizerSettings) -> None:
    Path(str(gpt2_settings.merge_file)).write_text("#version: 0.2\nfoo bar\n")
    with pytest.raises(InputError, match="does not fit"):
        build_tokenizer(gpt2_settings)


def test_hugging_face_with_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(InputError, match="is not a tokenizer"):
        build_tokenizer(_hugging_face(tmp_path))


def test_hugging_face_without_an_end_token(tmp_path: Path) -> None:
    Library(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="no end-of-document token"):
        build_tokenizer(_hugging_face(tmp_path))


def _hugging_face(path: Path) -> TokenizerSettings:
    return TokenizerSettings(tokenizer_type=TokenizerType.HUGGING_FACE, tokenizer_model=str(path))


def _null(vocab_size: int) -> TokenizerSettings:
    return TokenizerSettings(tokenizer_type=TokenizerType.NULL, vocab_size=vocab_size)
