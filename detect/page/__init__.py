"""Write one self-contained page about a traced window: no network, nothing to install.

Fed by an examination (verdict and matrices), a what-if result and, where there is one, the
timeline. `contents` lays out the words, lists what was traced, and puts all of it with style
(`page.css`) and script (`script/`) into one HTML document; `figures` and `strip` collect the
numbers that the page's script draws. Start reading at `contents`.
"""

from detect.page.contents import Fact, PageInputs, facts_of_op_table, facts_of_timeline, render_page

__all__ = [
    "Fact",
    "PageInputs",
    "facts_of_op_table",
    "facts_of_timeline",
    "render_page",
]
