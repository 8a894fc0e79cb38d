"""What the step would cost without each rank's, operation's and stage's slowness, by replay."""

from detect.whatif.dense import replay_of_op_table
from detect.whatif.heatmap import heat_map_png, heat_map_svg
from detect.whatif.ideal_timeline import ideal_timeline
from detect.whatif.metrics import WhatIf, analyze
from detect.whatif.of_findings import savings_of
from detect.whatif.optable import OpTable, is_op_table, read_op_table
from detect.whatif.render import render_text, to_json
from detect.whatif.replay import Replay
from detect.whatif.saving import Saving, saved_by_fixing, savings_of_standouts, worst_ranks
from detect.whatif.traced import replay_of_timeline

__all__ = [
    "OpTable",
    "Replay",
    "Saving",
    "WhatIf",
    "analyze",
    "heat_map_png",
    "heat_map_svg",
    "ideal_timeline",
    "is_op_table",
    "read_op_table",
    "render_text",
    "replay_of_op_table",
    "replay_of_timeline",
    "saved_by_fixing",
    "savings_of",
    "savings_of_standouts",
    "to_json",
    "worst_ranks",
]
