"""Write the page as one HTML document that loads nothing, with everything from a trace escaped.

Host names, device names, group names and notes are somebody else's text. The template engine
escapes what it writes, numbers for the script travel as JSON without `<`, and the script only ever
sets text. The page's own policy (CSP) allows one style and one script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from detect.page.contents import PageInputs, page_view
from megascan.errors import MissingError
from megascan.header import Json

ROOM = Path(__file__).parent
TEMPLATE = "page.html.jinja"
SCRIPTS = ("elements.js", "chart.js", "topology.js", "strip.js", "table.js", "main.js")
"""In this order they are one script: later files use the functions of earlier ones."""


def render_page(inputs: PageInputs) -> str:
    """Return the page as one HTML document.

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
    script = "\n".join((ROOM / "script" / name).read_text(encoding="utf-8") for name in SCRIPTS)
    view = page_view(inputs)
    page = environment.get_template(TEMPLATE).render(
        page=view,
        style=style,
        style_hash=source_hash(style),
        script=script,
        script_hash=source_hash(script),
        figures=as_inline_json(view.figures),
    )
    return page + "\n"


def source_hash(text: str) -> str:
    """Return a CSP source expression that allows exactly this inline text."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def as_inline_json(value: Json) -> str:
    """Return JSON that cannot end the script element it stands in, whatever its texts are."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
