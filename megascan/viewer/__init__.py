"""Looking at a timeline: in the Perfetto UI, and with SQL."""

from megascan.viewer.engine import run_query
from megascan.viewer.presets import PRESETS
from megascan.viewer.rows import Rows
from megascan.viewer.serving import serve
from megascan.viewer.spot import Spot

__all__ = ["PRESETS", "Rows", "Spot", "run_query", "serve"]
