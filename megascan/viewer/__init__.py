"""Look at a timeline: in the Perfetto UI, and with SQL.

Owns what `megascan view` and `megascan query` do with a file that `megascan.export` wrote; knows of
its spans only what the file says.

    serving.py    hand a file to the UI in a browser, at a rank and an iteration; start here
    query.py      rows of PerfettoSQL, with ready queries and the view `megascan_span`
"""

from megascan.viewer.query import PRESETS, Rows, check_is_file, run_query
from megascan.viewer.serving import Spot, serve

__all__ = ["PRESETS", "Rows", "Spot", "check_is_file", "run_query", "serve"]
