"""Names of ranks in a timeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascan.export.tracks import rank_title
from megascan.rankfile import encode_header


@pytest.mark.parametrize(("host", "ending"), [("n01", " · n01"), ("", "rank 00")])
def test_an_unknown_host_leaves_no_empty_part(make_timeline, host: str, ending: str) -> None:
    timeline = make_timeline()
    header = replace(timeline.headers[0], host=host)
    assert rank_title(timeline.layout, 0, header).endswith(ending)
    assert not any(line.endswith(b' "}') for line in encode_header(header))
