"""Draw dashboard.json from what a running Prometheus has, with Grafana's own components.

    python scripts/monitoring/draw_dashboard.py --prometheus http://localhost:9090 -o dashboard.png

needs npm with a registry it can reach (some 600 MB for the time it runs), and Chromium. Grafana is
no package that can be had everywhere; its components are (`@grafana/ui`, `@grafana/data`), and this
is how the dashboard can be looked at without a server: each panel's queries are asked, `panels.jsx`
turns the answers into frames and draws them, Chromium takes the picture.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
GRAFANA = "11.6.0"
PACKAGES = (
    *(f"@grafana/{name}@{GRAFANA}" for name in ("ui", "data", "schema")),
    "react@18", "react-dom@18", "esbuild@0.25",
)  # fmt: skip
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PAGE = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="panels.css">
<style>body{margin:0;background:#111217}</style>
<div id="root" style="position:relative;width:1440px;height:1030px"></div>
<script src="data.js"></script><script src="panels.js"></script>"""
_SIZE = "1440,1040"
_STEPS = 240
"""Points of a graph."""


def answers(board: dict[str, object], prometheus: str, begin: float, end: float) -> object:
    """Return by panel id the server's answers to each of the panel's targets."""
    panels = board["panels"]
    assert isinstance(panels, list)  # as our file has them
    return {
        panel["id"]: [answer(target, prometheus, begin, end) for target in panel["targets"]]
        for panel in panels
    }


def answer(target: dict[str, object], prometheus: str, begin: float, end: float) -> object:
    """Ask one target's query, for all jobs and instances."""
    query = str(target["expr"]).replace("$job", ".*").replace("$instance", ".*")
    asked = {"query": query}
    if target.get("instant"):
        kind, asked["time"] = "query", f"{end}"
    else:
        step = max(1.0, (end - begin) / _STEPS)
        kind = "query_range"
        asked |= {"start": f"{begin}", "end": f"{end}", "step": f"{step}"}
    url = f"{prometheus}/api/v1/{kind}?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)["data"]["result"]


def bundle(folder: Path) -> None:
    """Fetch Grafana's components and bundle them with `panels.jsx`."""
    shutil.copy(HERE / "panels.jsx", folder)
    _run(["npm", "init", "--yes"], folder)
    fetch = ["npm", "install", "--no-audit", "--no-fund", "--legacy-peer-deps", "--ignore-scripts"]
    _run([*fetch, *PACKAGES], folder)
    modules = [
        f"--alias:@grafana/{one}=./node_modules/@grafana/{one}/dist/cjs/index.cjs"
        for one in ("ui", "data")
    ]
    loaders = [f"--loader:.{one}=dataurl" for one in ("svg", "woff", "woff2", "ttf")]
    words = ["--bundle", "--define:global=window", "--outfile=panels.js", *modules, *loaders]
    _run(["npx", "esbuild", "panels.jsx", *words], folder)


def picture(folder: Path, browser: str, path: Path) -> None:
    """Let the browser take a picture of the page."""
    (folder / "index.html").write_text(_PAGE, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    flags += ["--hide-scrollbars", "--virtual-time-budget=15000", f"--window-size={_SIZE}"]
    shot = f"--screenshot={path.resolve()}"
    _run([browser, *flags, shot, (folder / "index.html").as_uri()], folder)


def _run(words: Sequence[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {words[0]} ended with {done.returncode}: {done.stderr.strip()[-500:]}")


def main() -> None:
    """Ask, bundle, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", default="http://localhost:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=180.0, help="until now (default: 180)")
    parser.add_argument("-o", "--output", type=Path, default=Path("dashboard.png"))
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or shutil.which("npm") is None:
        sys.exit(f"error: npm and one of {', '.join(BROWSERS)} are needed; install them")
    board = json.loads((HERE / "dashboard.json").read_text(encoding="utf-8"))
    end = time.time()
    begin = end - 60.0 * arguments.minutes
    try:
        found = answers(board, arguments.prometheus, begin, end)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {arguments.prometheus} did not answer ({error}); is Prometheus there?")
    data = json.dumps({"board": board, "answers": found, "from": begin, "to": end})
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "data.js").write_text(f"window.DATA = {data};", encoding="utf-8")
        bundle(Path(name))
        picture(Path(name), browser, arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
