"""The terminal view: one screen with verdict, ranks by slowness, findings, last windows.

The view is drawn with rich on the terminal's alternate screen, again after each look. Its content
is fitted to the terminal's height, so that it works in a tmux pane of 80 × 24.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rich.console import Console, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megascan.errors import UsageError
from megascan.watch.ring import Judgement
from megascan.watch.watcher import Watcher

_COLOURS = {"healthy": "green", "job": "yellow", "undecided": "yellow", "degraded": "bold red"}
_BAR = 24
_FULL_BAR_RATIO = 0.5
"""A rank that takes 50 % longer than its peers fills its bar."""
_KEPT_LINES = 50
_FRAME, _FRAME_LINES = 4, 2
"""Columns and lines that a panel's frame takes."""
_FINDINGS_DIVISOR, _EVENTS_DIVISOR = 3, 4
"""Findings take at most a third of the height, events at most a quarter of the rest."""


@dataclass
class Screen:
    """What the view shows in addition to the watcher's state."""

    console: Console
    events: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    verdicts: deque[Judgement] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    def note(self, text: str) -> None:
        """Keep a line about an event or a problem."""
        now = datetime.now(UTC).strftime("%H:%M:%S")
        self.events.append(f"{now}  {text}")

    def draw(self, watcher: Watcher) -> RenderableType:
        """Return the whole screen."""
        judgement = watcher.judgement
        if judgement is not None and (not self.verdicts or self.verdicts[-1] is not judgement):
            self.verdicts.append(judgement)
        width, height = self.console.size
        found = self._findings(watcher)
        num_lines = len(found.wrap(self.console, width - _FRAME))
        findings = _FRAME_LINES + min(num_lines, height // _FINDINGS_DIVISOR)
        num_events = min(max(1, len(self.events)), max(2, (height - findings) // _EVENTS_DIVISOR))
        layout = Layout()
        layout.split_column(
            Layout(self._head(watcher), size=_FRAME_LINES + 1),
            Layout(name="middle"),
            Layout(_framed(found, "findings"), size=findings),
            Layout(self._last_events(num_events), size=_FRAME_LINES + num_events),
        )
        rows = height - 2 * _FRAME_LINES - 1 - findings - _FRAME_LINES - num_events
        layout["middle"].split_row(
            Layout(self._ranks(judgement, rows), ratio=3), Layout(self._verdicts(), ratio=2)
        )
        return layout

    def _head(self, watcher: Watcher) -> RenderableType:
        text = Text()
        judgement, hang = watcher.judgement, watcher.hangs.hang
        if judgement is None:
            text.append("waiting for the first whole window", "dim")
        else:
            word = judgement.report.verdict.value
            text.append(word.upper(), _COLOURS[word])
            first, last = judgement.report.iterations
            text.append(
                f"  iterations {first}-{last}  {judgement.report.iteration_ns / 1e6:.4g} ms"
                f"  {watcher.files.world_size} ranks"
            )
        age = max(0.0, time.time() - watcher.files.changed_unix_s)
        text.append(
            f"  last write {age:.0f} s ago" if watcher.files.changed_unix_s else "",
            "bold red" if hang else "dim",
        )
        text.append("  HANG" if hang else "", "bold red")
        text.no_wrap = True
        return _framed(text, escape(f"megascan watch: {watcher.job}"))

    def _ranks(self, judgement: Judgement | None, num_rows: int) -> RenderableType:
        table = Table(box=None, expand=True, padding=(0, 1), show_header=False)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, ratio=1)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, style="dim")
        slowness = judgement.slowness if judgement else {}
        shown = sorted(slowness, key=lambda one: -slowness[one])[: max(1, num_rows)]
        for rank in shown:
            excess = max(0.0, slowness[rank] - 1.0)
            bar = "█" * min(_BAR, round(_BAR * excess / _FULL_BAR_RATIO))
            segment = judgement.window.segments.get(rank) if judgement else None
            table.add_row(
                f"rank {rank}", bar or "▏", f"{slowness[rank]:.3f}x",
                escape(segment.header.host) if segment else "",
            )  # fmt: skip
        is_part = len(shown) < len(slowness)
        note = f", {len(shown)} of {len(slowness)}" if is_part else " (1 = like its peers)"
        return _framed(table, f"ranks by slowness{note}")

    def _verdicts(self) -> RenderableType:
        table = Table(box=None, padding=(0, 1), show_header=False)
        for justify in ("right", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        for judgement in reversed(self.verdicts):
            word, window = judgement.report.verdict.value, judgement.window
            missing = f"{len(window.missing)} missing" if window.missing else ""
            table.add_row(
                f"{window.last_iteration}", f"[{_COLOURS[word]}]{word}[/]",
                f"[dim]{judgement.report.iteration_ns / 1e6:.4g} ms[/]", missing,
            )  # fmt: skip
        return _framed(table, "verdicts up to iteration")

    def _findings(self, watcher: Watcher) -> Text:
        """Return the hang, if there is one, and all holding findings, with texts in full length."""
        text = Text()
        if watcher.hangs.hang is not None:
            text.append(f"HANG: {watcher.hangs.hang.headline}\n", "bold red")
        for account in watcher.state.accounts.holding:
            text.append(f"{account.id} ", "bold red" if account.owner == "node" else "yellow")
            text.append(
                f"(owner {account.owner}), since iteration {account.since_iteration}, "
                f"{account.cost_gpu_hours:.3g} GPU-hours\n"
            )
            text.append(f"{account.headline}\n", "dim")
        text.rstrip()
        return text if text else Text("none", "dim")

    def _last_events(self, num_lines: int) -> RenderableType:
        lines = list(self.events)[-num_lines:]
        text = Text("\n".join(lines) or "none", "" if lines else "dim")
        text.no_wrap, text.overflow = True, "ellipsis"
        return _framed(text, "events")


def _framed(content: RenderableType, title: str) -> RenderableType:
    return Panel(content, title=title, title_align="left")


@contextmanager
def open_screen() -> Iterator[tuple[Screen, Live]]:
    """Take over the terminal. Raises UsageError if there is none."""
    console = Console()
    if not console.is_terminal:
        raise UsageError("--tui needs a terminal; leave it out to get log lines")
    screen = Screen(console)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield screen, live
