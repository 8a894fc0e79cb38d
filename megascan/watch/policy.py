"""Say what an operator's rules would drain. Nothing is drained here.

A policy is a TOML file of rules; a finding falls under the first rule that it meets in full:

    [[drain]]
    name = "slow device"
    causes = ["compute"]           # any cause when left out
    confidence = "high"            # or good, moderate: how often such names were right
    min_slowdown = 1.05            # observed over expected
    min_cost_ratio = 1.02          # iteration time over iteration time without the finding
    min_gpu_hours = 0.5            # wasted so far
    min_minutes = 10               # since the finding's onset

Only findings whose owner is the node can meet a rule: no drain cures what the job does to itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from detect.report import NO_NODES_DOING, Cause, Confidence
from megascan.errors import InputError
from megascan.header import Json
from megascan.watch.accounts import Account

CONFIDENCES = tuple(word.value for word in Confidence if word is not Confidence.LOW)
"""Those that a rule may ask for, the surest first."""
CAUSES = tuple(cause.value for cause in Cause if cause not in NO_NODES_DOING)
"""Causes for which a node can be to blame."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Conditions under which a finding would have its hosts drained.

    Names with high confidence were right in 996 of 1,000 cases, others less often: docs/verdict.md.
    """

    name: str
    causes: tuple[str, ...] = CAUSES
    confidence: str = "high"
    min_slowdown: float = 1.0
    min_cost_ratio: float = 1.0
    min_gpu_hours: float = 0.0
    min_minutes: float = 0.0

    def holds_for(self, account: Account, unix_s: float) -> bool:
        """Return whether a holding finding meets all conditions of the rule."""
        return (
            account.owner == "node"
            and account.cause in self.causes
            and account.confidence in CONFIDENCES[: CONFIDENCES.index(self.confidence) + 1]
            and account.slowdown >= self.min_slowdown
            and account.cost_ratio >= self.min_cost_ratio
            and account.cost_gpu_hours >= self.min_gpu_hours
            and unix_s - account.since_unix_s >= 60.0 * self.min_minutes
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A finding whose hosts would be drained, and the rule that says so."""

    rule: str
    account: Account

    @property
    def text(self) -> str:
        """Return the decision in one line."""
        hosts = ", ".join(sorted({host for host in self.account.hosts if host})) or "unknown host"
        ranks = ", ".join(map(str, self.account.ranks))
        return (
            f"WOULD DRAIN {hosts} (rank {ranks}): rule {self.rule!r}, finding {self.account.id}, "
            f"{self.account.slowdown:.3f}x {self.account.cause}, "
            f"{self.account.cost_gpu_hours:.3g} GPU-hours"
        )

    def to_json(self) -> dict[str, Json]:
        """Return the decision for machine-readable output."""
        return {
            "event": "would-drain",
            "rule": self.rule,
            "id": self.account.id,
            "hosts": [*sorted({host for host in self.account.hosts if host})],
            "ranks": list(self.account.ranks),
            "text": self.text,
        }


def decisions(
    rules: Sequence[Rule], holding: Sequence[Account], unix_s: float
) -> Iterator[Decision]:
    """Yield a decision for each finding that meets a rule, by the first rule that it meets."""
    for account in holding:
        rule = next((rule for rule in rules if rule.holds_for(account, unix_s)), None)
        if rule is not None:
            yield Decision(rule=rule.name, account=account)


def read_policy(path: Path) -> tuple[Rule, ...]:
    """Read a policy. Raises InputError for an invalid file, naming the rule."""
    try:
        record = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no TOML ({error}); see docs/watch.md") from error
    rules = record.get("drain")
    if set(record) != {"drain"} or not isinstance(rules, list) or not rules:
        raise InputError(
            f"{path} holds {', '.join(sorted(record)) or 'nothing'}, expected [[drain]] tables"
        )
    return tuple(_rule(rule, f"{path}, rule {number}") for number, rule in enumerate(rules, 1))


def _rule(record: object, where: str) -> Rule:
    if not isinstance(record, dict):
        raise InputError(f"{where} is {record!r}, expected a [[drain]] table")
    known = {each.name: each for each in fields(Rule)}
    for name, value in record.items():
        if name not in known:
            raise InputError(f"{where} has {name}, expected some of {', '.join(known)}")
        if name.startswith("min_") and not _is_amount(value):
            raise InputError(f"{where}: {name} is {value!r}, expected a number of 0 or more")
    values: dict[str, Any] = dict(record)
    if not isinstance(values.get("name"), str) or not values["name"]:
        raise InputError(f"{where} has no name; give it one, it is told with what it decides")
    if str(values.get("confidence", "high")) not in CONFIDENCES:
        raise InputError(
            f"{where}: confidence is {values['confidence']!r}, expected {', '.join(CONFIDENCES)}"
        )
    causes = values.get("causes", list(CAUSES))
    if not isinstance(causes, list) or not causes or not set(map(str, causes)) <= set(CAUSES):
        raise InputError(f"{where}: causes is {causes!r}, expected some of {', '.join(CAUSES)}")
    return Rule(**{**values, "causes": tuple(causes)})


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
