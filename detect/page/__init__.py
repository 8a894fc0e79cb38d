"""Write one self-contained page about a traced window: no network, nothing to install.

Fed by an examination (verdict and matrices), a what-if result and, where there is one, the
timeline. `view` lays out the words, `figures`, `series` and `strip` collect the numbers that the
page's script draws, `facts` lists what was traced, and `render` puts words, numbers, style
(`page.css`) and script (`script/`) into one HTML document. Start reading at `view`.
"""

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
