"""From the view to HTML, with everything that comes from a trace escaped.

Host names, device names, group names and notes are somebody else's text. The template engine
escapes every value; the page besides forbids itself scripts and connections by its own policy.
"""

from __future__ import annotations

from pathlib import Path

from detect.page.view import PageInputs, page_view
from megascan.errors import MissingError

ROOM = Path(__file__).parent
TEMPLATE = "page.html.jinja"


def render_page(inputs: PageInputs) -> str:
    """The page as one HTML document.

    Raises MissingError when the template engine (jinja2) is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise MissingError(
            "a page needs the package 'jinja2', which is not installed; pip install jinja2"
        ) from error
    environment = Environment(
        loader=FileSystemLoader(ROOM),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (ROOM / "page.css").read_text(encoding="utf-8")
    return environment.get_template(TEMPLATE).render(page=page_view(inputs), style=style) + "\n"
