"""Write timelines as files that trace viewers open: Chrome JSON and Perfetto protobuf.

Owns what a viewer shows and the bytes of the file. The commands give it a
`megascan.timeline.Timeline`.

    writing.py    write_timeline: format by suffix, whole or not at all, and what every format is
                  made of: blocks, the record by which a reader restores the timeline; start here
    tracks.py     what is drawn: tracks, lanes, curves, marks; arrows.py: what waited for
                  what, and the chain of spans that determines each iteration's end
    chrome.py     a drawing as Chrome JSON
    perfetto.py   a drawing as packets, over protobuf.py: bytes of many equal messages at once;
                  first_packets.py: the few packets that are made one by one
"""

from megascan.export.arrows import Hop
from megascan.export.tracks import Drawing, Mark, Selection
from megascan.export.writing import format_of, leftovers, write_timeline

__all__ = [
    "Drawing",
    "Hop",
    "Mark",
    "Selection",
    "format_of",
    "leftovers",
    "write_timeline",
]
