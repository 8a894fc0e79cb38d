"""Turns the rank files of a traced job into one aligned timeline."""

from aggregate.merge import build_timeline
from aggregate.render import render_text
from aggregate.summary import Summary, summarise

__all__ = ["Summary", "build_timeline", "render_text", "summarise"]
__megascan__ = True
