"""The terminal view: one screen with verdict, ranks by slowness, findings, last windows.

Drawn with rich on the terminal's alternate screen, redrawn once a look; it fits what there is to
the terminal's height, so that it works in a tmux pane of 80 × 24.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from megascan.errors import MissingError, UsageError
from megascan.watch.ring import Judgement
from megascan.watch.watcher import Watcher

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_COLOURS = {"healthy": "green", "job": "yellow", "undecided": "yellow", "degraded": "bold red"}
_BAR = 24
_FULL_BAR_RATIO = 0.5
"""A rank that is half as slow again fills its bar."""
_KEPT_LINES = 50


@dataclass
class Screen:
    """What the view shows beside the watcher's own state."""

    console: Console
    events: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    verdicts: deque[Judgement] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    def note(self, text: str) -> None:
        """Keep a line about an event or a problem."""
        now = datetime.now(UTC).strftime("%H:%M:%S")
        self.events.append(f"{now}  {text}")

    def draw(self, watcher: Watcher) -> RenderableType:
        """Return the whole screen."""
        from rich.layout import Layout

        judgement = watcher.judgement
        if judgement is not None and (not self.verdicts or self.verdicts[-1] is not judgement):
            self.verdicts.append(judgement)
        layout = Layout()
        num_holding = len(watcher.state.accounts.holding)
        layout.split_column(
            Layout(self._head(watcher), size=3),
            Layout(name="middle"),
            Layout(self._findings(watcher), size=min(9, 4 + 2 * max(1, num_holding))),
            Layout(self._events(), size=6),
        )
        layout["middle"].split_row(
            Layout(self._ranks(judgement), ratio=3), Layout(self._windows(), ratio=2)
        )
        return layout

    def _head(self, watcher: Watcher) -> RenderableType:
        from rich.panel import Panel
        from rich.text import Text

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
        return Panel(text, title=f"megascan watch: {watcher.job}", title_align="left")

    def _ranks(self, judgement: Judgement | None) -> RenderableType:
        from rich.panel import Panel
        from rich.table import Table

        table = Table(box=None, expand=True, padding=(0, 1), show_header=False)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True, style="dim")
        slowness = judgement.slowness if judgement else {}
        for rank in sorted(slowness, key=lambda one: -slowness[one])[: self.console.height]:
            excess = max(0.0, slowness[rank] - 1.0)
            bar = "█" * min(_BAR, round(_BAR * excess / _FULL_BAR_RATIO))
            header = judgement.window.segments.get(rank) if judgement else None
            table.add_row(
                f"rank {rank}", bar or "▏", f"{slowness[rank]:.3f}x",
                header.header.host if header else "",
            )  # fmt: skip
        return Panel(table, title="ranks by slowness (1 = like its peers)", title_align="left")

    def _windows(self) -> RenderableType:
        from rich.panel import Panel
        from rich.text import Text

        text = Text()
        for judgement in reversed(self.verdicts):
            word = judgement.report.verdict.value
            window = judgement.window
            text.append(f"{window.first_iteration:>7}-{window.last_iteration:<7}")
            text.append(f"{word:10}", _COLOURS[word])
            missing = f" {len(window.missing)} missing" if window.missing else ""
            text.append(f"{judgement.report.iteration_ns / 1e6:8.4g} ms{missing}\n", "dim")
        return Panel(text, title="last windows", title_align="left")

    def _findings(self, watcher: Watcher) -> RenderableType:
        from rich.panel import Panel
        from rich.text import Text

        text = Text()
        holding = watcher.state.accounts.holding
        for account in holding:
            text.append(f"{account.id} ", "bold red" if account.owner == "node" else "yellow")
            text.append(
                f"{account.slowdown:.3f}x, owner {account.owner}, since iteration "
                f"{account.since_iteration}, {account.cost_gpu_hours:.3g} GPU-hours\n"
            )
            text.append(f"  {account.headline}\n", "dim")
        if not holding:
            text.append("none", "dim")
        return Panel(text, title="findings", title_align="left")

    def _events(self) -> RenderableType:
        from rich.panel import Panel
        from rich.text import Text

        lines = list(self.events)[-4:]
        text = Text("\n".join(lines) or "none", "dim" if not lines else "", no_wrap=True)
        return Panel(text, title="events", title_align="left")


@contextmanager
def opened() -> Iterator[tuple[Screen, Live]]:
    """Take over the terminal. Raises MissingError without rich, UsageError without a terminal."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError as error:
        raise MissingError(
            "--tui needs rich, which is not installed; install MegaScan with its extra `watch` "
            "(pip install 'megascan[watch]')"
        ) from error
    console = Console()
    if not console.is_terminal:
        raise UsageError("--tui needs a terminal; leave it out to get log lines")
    screen = Screen(console)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield screen, live
