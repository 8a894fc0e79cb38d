"""What a policy would drain, and what a policy must look like."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascan.errors import InputError
from megascan.watch.accounts import Account, LifePhase
from megascan.watch.policy import decisions, read_policy

SLOW = Account(
    id="compute-rank5-abc", run_id="run", cause="compute", owner="node", ranks=(5,),
    hosts=("n02",), devices=("GPU-5",), since_iteration=15, since_unix_s=1000.0,
    phase=LifePhase.HOLDING, slowdown=1.3, cost_ratio=1.1, q_value=1e-9, headline="",
    confidence="high", cost_gpu_hours=2.0,
)  # fmt: skip
POLICY = """
[[drain]]
name = "slow device"
causes = ["compute", "link"]
confidence = "high"
min_slowdown = 1.2
min_cost_ratio = 1.05
min_gpu_hours = 1
min_minutes = 10

[[drain]]
name = "lost hours"
confidence = "moderate"
min_gpu_hours = 50
"""


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    return read_policy(path)


@pytest.mark.parametrize(
    ("changes", "after_s", "rule"),
    [
        ({}, 600, "slow device"),
        ({}, 599, None),
        ({"owner": "job"}, 600, None),
        ({"owner": "undecided"}, 600, None),
        ({"cause": "host"}, 600, None),
        ({"confidence": "good"}, 600, None),
        ({"slowdown": 1.19}, 600, None),
        ({"cost_ratio": 1.04}, 600, None),
        ({"cost_gpu_hours": 0.9}, 600, None),
        ({"cause": "host", "cost_gpu_hours": 51, "confidence": "moderate"}, 0, "lost hours"),
        ({"cause": "host", "cost_gpu_hours": 51, "confidence": "low"}, 0, None),
    ],
)
def test_a_rule_holds_when_all_of_it_is_met(rules, changes, after_s, rule):
    found = list(decisions(rules, [replace(SLOW, **changes)], 1000.0 + after_s))
    assert [one.rule for one in found] == ([] if rule is None else [rule])


def test_a_decision_names_host_rank_rule_and_price(rules):
    (decision,) = decisions(rules, [SLOW], 2000.0)
    assert decision.text == (
        "WOULD DRAIN n02 (rank 5): rule 'slow device', finding compute-rank5-abc, 1.300x compute, "
        "2 GPU-hours"
    )
    assert decision.to_json()["hosts"] == ["n02"]


def test_the_watch_says_each_decision_once_and_ends_with_3(faulty, grow, watched, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text('[[drain]]\nname = "any"\nmin_slowdown = 1.1\n')
    feed = grow(faulty)
    watch = watched(feed.target, rules=read_policy(path))
    feed.step(6)
    watch.watcher.look()
    assert watch.watcher.exit_code == 0
    for count in (4, 1):
        feed.step(count)
        watch.watcher.look()
    assert watch.names == ["raised", "would-drain"]
    assert watch.events[-1]["hosts"] == ["n02"]
    assert watch.watcher.exit_code == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected \\[\\[drain\\]\\] tables"),
        ("drain = 3", "expected \\[\\[drain\\]\\] tables"),
        ("[[drain", "is no TOML"),
        ("[[drain]]\nmin_slowdown = 1.2", "rule 1 has no name"),
        (
            '[[drain]]\nname = "x"\nmin_slow = 1',
            "rule 1 has min_slow, expected some of name, causes",
        ),
        ('[[drain]]\nname = "x"\nmin_minutes = "long"', "min_minutes is 'long', expected a number"),
        ('[[drain]]\nname = "x"\nmin_minutes = true', "min_minutes is True, expected a number"),
        ('[[drain]]\nname = "x"\nmin_minutes = nan', "min_minutes is nan, expected a number"),
        ('[[drain]]\nname = "x"\nconfidence = "sure"', "confidence is 'sure', expected high"),
        ('[[drain]]\nname = "x"\ncauses = ["stage_imbalance"]', "expected some of compute, link"),
        ('[[drain]]\nname = "x"\nconfidence = ["high"]', r"confidence is \['high'\], expected"),
        ('[[drain]]\nname = ""', "rule 1 has no name"),
        ('[[drain]]\nname = "x"\ncauses = []', "causes is \\[\\], expected some of"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(tmp_path, text, says):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_policy(path)


def test_a_policy_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*No such file"):
        read_policy(tmp_path / "none.toml")
