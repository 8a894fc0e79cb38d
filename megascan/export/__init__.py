"""Timelines as files that trace viewers open: Chrome JSON and Perfetto protobuf."""

from megascan.export.destination import check_free, check_output
from megascan.export.selection import Mark, Selection
from megascan.export.writing import write_timeline

__all__ = ["Mark", "Selection", "check_free", "check_output", "write_timeline"]
