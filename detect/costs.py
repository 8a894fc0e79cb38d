"""What a finding costs the step, by replay of the job with its ranks brought to their peers' times.

The replay (`detect.whatif`) needs the dependency graph of the job. Wherever it can be built its
answer is better than the estimate of `detect.causes.finding`: time that a host loses behind its
device, and delays that spread over a pipeline, come out as they are. It is imported and run only
when there is a finding to ask about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from detect.thresholds import COSTS, NETWORKS
from megascan.errors import MegaScanError
from megascan.timeline import Timeline

if TYPE_CHECKING:
    from detect.whatif import OpTable, Replay


class ReplayedCosts:
    """Costs of findings on one timeline or op table; replayed at the first question."""

    def __init__(self, source: Timeline | OpTable) -> None:
        self._source = source
        self._replay: Replay | None = None
        self._fails = False

    def ratio(self, ranks: tuple[int, ...], *, links: bool) -> float | None:
        """Return iteration time now over that without the finding, at least 1; None if unknown.

        `links`: the ranks' communication is slow, not what they compute. Example: 1.22 where the
        step takes 110 ms and would take 90 ms if these ranks ran like their peers.
        """
        replay = self._get_replay() if ranks else None
        if replay is None or _hidden_wait(replay, ranks) > COSTS.max_hidden_share:
            return None
        from detect.whatif import saved_by_fixing

        try:
            saving = saved_by_fixing(replay, ranks, links=links)
        except MegaScanError:
            return None
        return max(1.0, saving.speedup) if saving.compared_with == "peers" else None

    def ratio_of_border(self, ranks: tuple[int, ...], slowdown: float) -> float | None:
        """Return iteration time now over that with a quicker network of these ranks' host, at least
        1: all that crosses its border is `slowdown` times slower. None if unknown.
        """
        replay = self._get_replay() if ranks else None
        if replay is None or _hidden_wait(replay, ranks) > COSTS.max_hidden_share:
            return None
        from detect.whatif import saved_by_quicker_border

        saving = saved_by_quicker_border(replay, ranks, slowdown, NETWORKS.min_bytes)
        return None if saving is None else max(1.0, saving.speedup)

    def _get_replay(self) -> Replay | None:
        if self._replay is None and not self._fails:
            from detect.whatif import replay_of_op_table, replay_of_timeline

            source = self._source
            try:
                self._replay = (
                    replay_of_timeline(source)
                    if isinstance(source, Timeline)
                    else replay_of_op_table(source)
                )
            except MegaScanError:
                self._fails = True  # no graph can be built from this trace: estimates remain
        return self._replay


def _hidden_wait(replay: Replay, ranks: tuple[int, ...]) -> float:
    """Return the largest share of a step that a rank other than `ranks` spends between spans."""
    stage = replay.graph.stage
    gaps = np.array([node.optype == "host" for node in replay.graph.nodes])
    others = ~np.isin(replay.ranks, ranks)  # (stage, lane)
    step_s = float(replay.traced_s.mean())
    shares = [
        replay.weights[gaps & (stage == number)].sum(axis=0).mean(axis=-1)[others[number]] / step_s
        for number in range(replay.graph.num_stages)
    ]
    return float(max((share.max() for share in shares if len(share)), default=0.0))
