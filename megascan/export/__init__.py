"""Timelines as files that trace viewers open: Chrome JSON and Perfetto protobuf."""

from megascan.export.block import Block
from megascan.export.compression import gzip_member
from megascan.export.destination import check_free, check_output, leftovers
from megascan.export.drawing import Drawing
from megascan.export.selection import Mark, Selection
from megascan.export.writing import Encoder, encode_here, write_timeline

__all__ = [
    "Block",
    "Drawing",
    "Encoder",
    "Mark",
    "Selection",
    "check_free",
    "check_output",
    "encode_here",
    "gzip_member",
    "leftovers",
    "write_timeline",
]
