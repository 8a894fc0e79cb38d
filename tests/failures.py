"""Failures by name as they happen: a letter F in a line of dots is explained only at the end."""

from __future__ import annotations

import pytest

MAX_CHARACTERS = 200


class NamedFailures:
    """Prints each test that fails or is run once more, with what was wrong, at once."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Name a test whose set-up, call or tear-down did not succeed."""
        if report.outcome in ("failed", "rerun"):
            named = f"{report.outcome.upper()} {report.nodeid} ({report.when}): {error_of(report)}"
            self._terminal.write(f"\n{named}\n", flush=True)  # a line of dots is under way


def error_of(report: pytest.TestReport) -> str:
    """Return the first and the last line of an error, shortened.

    The first has the exception's type, the last what a comparison found or a program said last.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    said = crash.message if crash else report.longreprtext
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no error was given"]
    ends = lines if len(lines) == 1 else (lines[0], lines[-1])
    return " … ".join(line[:MAX_CHARACTERS] for line in ends)
