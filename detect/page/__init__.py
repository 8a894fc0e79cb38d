"""One self-contained page about a traced window: no scripts, no network, nothing to install."""

from detect.page.facts import Fact, facts_of_op_table, facts_of_timeline
from detect.page.render import render_page
from detect.page.view import PageInputs

__all__ = [
    "Fact",
    "PageInputs",
    "facts_of_op_table",
    "facts_of_timeline",
    "render_page",
]
