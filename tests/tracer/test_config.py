"""The trace flags: sizes and shares as people write them, and settings that cannot be."""

from __future__ import annotations

import argparse

import pytest

from megascan.config import TraceConfig, add_trace_arguments, parse_share, parse_size
from megascan.errors import ConfigError


def config(*words):
    parser = argparse.ArgumentParser()
    add_trace_arguments(parser)
    return TraceConfig.from_arguments(parser.parse_args(words))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("500MB", 500_000_000),
        ("2GiB", 2 * 1024**3),
        ("2 GB", 2_000_000_000),
        ("1.5g", 1_500_000_000),
        ("64KiB", 65_536),
        ("1000000", 1_000_000),
        ("10B", 10),
        ("1TiB", 1024**4),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MB", "-5MB", "5 apples", "1e9", "5MBB", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="--trace-max-bytes"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "ratio"), [("1%", 0.01), ("0.5 %", 0.005), ("0.01", 0.01), ("99%", 0.99)]
)
def test_shares(text, ratio):
    assert parse_share(text) == pytest.approx(ratio)


@pytest.mark.parametrize("text", ["0", "0%", "1", "100%", "-1%", "much", "1%%"])
def test_what_is_no_share(text):
    with pytest.raises(ConfigError, match="--trace-budget"):
        parse_share(text)


def test_the_flags_arrive():
    made = config("--trace", "--trace-compress", "--trace-max-bytes", "5MB", "--trace-budget", "1%")
    assert (made.compress, made.max_bytes, made.budget_ratio) == (True, 5_000_000, 0.01)
    plain = config("--trace")
    assert (plain.compress, plain.max_bytes, plain.budget_ratio) == (False, 0, 0.0)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--trace-max-bytes", "10kB"), "expected 1000000 or more"),
        (("--trace-max-bytes", "0"), "expected a size"),
        (
            ("--trace-budget", "1%", "--trace-interval", "2"),
            "compares traced with untraced iterations",
        ),
        (("--trace-interval", "1"), "is longer than --trace-interval 1"),
    ],
)
def test_settings_that_cannot_be(words, reason):
    with pytest.raises(ConfigError, match=reason):
        config(*words)
