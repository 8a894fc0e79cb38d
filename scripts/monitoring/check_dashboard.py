"""Check dashboard.json against the types that Grafana publishes, with the TypeScript compiler.

    python scripts/monitoring/check_dashboard.py          needs npm and a registry it can reach

Grafana itself is neither a Python package nor one of Debian's. Its schema is on npm
(`@grafana/schema`): what a dashboard, a variable, and the options of each kind of panel may hold,
and which words an option knows. A field that does not exist there, or a word that an option does
not know, is an error with its line. Says nothing when all is well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCHEMA, COMPILER = "@grafana/schema@11.6.0", "typescript@5.4"
_PANELS = {"stat": "StatPanelCfg", "table": "TablePanelCfg", "timeseries": "TimeSeriesPanelCfg"}
_TYPES = "@grafana/schema/dist/esm/raw"
_OPTIONS = "import {Options as %s} from '" + _TYPES + "/composable/%s/panelcfg/x/%s_types.gen';"
_HEAD = """
import {GraphFieldConfig} from '@grafana/schema';
import {AnnotationQuery, Dashboard} from '%(types)s/dashboard/x/dashboard_types.gen';
// JSON has words where the schema has members of an enumeration
type Plain<T> = T extends string ? `${T}` : T extends (infer U)[] ? Plain<U>[] :
  T extends object ? {[K in keyof T]: Plain<T[K]>} : T;
// annotations are typed without what their data source asks
type Asked = Plain<AnnotationQuery> & {expr: string, titleFormat: string};
"""


def program(board: dict[str, object]) -> str:
    """Return a TypeScript program that compiles if the dashboard fits the schema."""
    panels, annotations = board["panels"], board["annotations"]
    assert isinstance(panels, list)  # as our file has them
    assert isinstance(annotations, dict)
    lines = [_HEAD % {"types": _TYPES}]
    lines += [_OPTIONS % (kind, kind, name) for kind, name in _PANELS.items()]
    rest = {name: value for name, value in board.items() if name != "annotations"}
    lines.append(_declared("board", "Plain<Dashboard>", rest))
    lines.append(_declared("annotations", "Asked[]", annotations["list"]))
    for panel in panels:
        number, defaults = panel["id"], panel["fieldConfig"]["defaults"]
        kind = f"Partial<Plain<{panel['type']}>>"
        lines.append(_declared(f"options{number}", kind, panel["options"]))
        custom = defaults.get("custom", {})
        lines.append(_declared(f"custom{number}", "Partial<Plain<GraphFieldConfig>>", custom))
    return "\n".join(lines)


def _declared(name: str, kind: str, value: object) -> str:
    return f"export const {name}: {kind} = {json.dumps(value, indent=1)};"


def main() -> int:
    """Fetch schema and compiler into a temporary folder, and compile there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).with_name("dashboard.json")
    parser.add_argument("dashboard", type=Path, nargs="?", default=default)
    board = json.loads(parser.parse_args().dashboard.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "board.ts").write_text(program(board), encoding="utf-8")
        fetch = ["npm", "install", "--no-audit", "--no-fund", "--silent", SCHEMA, COMPILER]
        checks = ["npx", "tsc", "--noEmit", "--strict", "--skipLibCheck", "--target", "es2020"]
        for words in (fetch, [*checks, "--moduleResolution", "node", "board.ts"]):
            done = subprocess.run(words, cwd=folder, check=False)
            if done.returncode:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
