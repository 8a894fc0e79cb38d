"""A what-if result for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import numpy as np

from detect.whatif.metrics import Share, WhatIf
from detect.whatif.saving import Saving
from megascan.header import Json

WHATIF_SCHEMA = 1
_NUM_RANKS_SHOWN = 5
_NUM_TYPES_SHOWN = 6
_WORTH_SAYING = 1.005
_HIGH_MODEL_ERROR = 0.05


def render_text(result: WhatIf, savings: Sequence[Saving] = ()) -> str:
    """The answer first, then where the time is lost, then how far the replay can be trusted."""
    lines = [_headline(result), ""]
    lines += _where(result)
    if savings:
        lines += ["", "If it ran like its peers"]
        lines += [f"  {_saving_line(result, saving)}" for saving in savings]
    lines += ["", "Step time were all ideal but …", *_ranks(result), *_types(result)]
    if len(result.stage_ratio) > 1:
        stages = "  ".join(f"PP{n} {ratio:.3f}" for n, ratio in enumerate(result.stage_ratio))
        lines.append(f"  stage   {stages}")
    lines += ["", *_explained(result), "", *_trust(result)]
    return "\n".join(lines) + "\n"


def _headline(result: WhatIf) -> str:
    return (
        f"A step takes {_seconds(result.traced_s)} and would take {_seconds(result.ideal_s)} were "
        f"all ranks, stages and microbatches alike: {100 * max(result.waste_ratio, 0.0):.1f} % of "
        f"the GPU time is lost (S = {result.slowdown:.3f}, {result.replay.layout_text}, "
        f"{result.replay.num_gpus} GPUs)."
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.2f} ms"


def _where(result: WhatIf) -> list[str]:
    factors = result.factors
    parts = {
        "single ranks": factors.worker,
        "uneven stages": factors.stage,
        "scatter from step to step and microbatch to microbatch": factors.random,
    }
    product = (
        f"S = random {factors.random:.3f} x worker {factors.worker:.3f} x stage {factors.stage:.3f}"
    )
    name, value = max(parts.items(), key=lambda part: part[1])
    if value < _WORTH_SAYING:
        return [f"Nothing stands out: {product}."]
    return [f"Most of it lies with {name}: {product}."]


def _saving_line(result: WhatIf, saving: Saving) -> str:
    names = ", ".join(_name(result, rank) for rank in saving.ranks[:4])
    why = f" [{', '.join(saving.causes)}]" if saving.causes else ""
    more = (f" and {len(saving.ranks) - 4} more" if len(saving.ranks) > 4 else "") + why
    if saving.compared_with == "nobody":
        return f"{names}: there is no other rank to compare with"
    against = "" if saving.compared_with == "peers" else " (judged by the other stages)"
    if saving.speedup < _WORTH_SAYING:
        why_not = (
            "it hides in time that others spend anyway"
            if saving.causes
            else "it runs like its peers"
        )
        return f"{names}{more}: nothing gained, {why_not}{against}"
    return (
        f"{names}{more}: step {_seconds(saving.fixed_step_s)}, the job {saving.speedup:.3f}x as "
        f"fast; saves {_hours(saving.gpu_hours_per_hour)} GPU-hours an hour of training, "
        f"{_hours(saving.gpu_hours_per_day)} a day{against}"
    )


def _hours(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _name(result: WhatIf, rank: int) -> str:
    return f"rank {rank} ({result.replay.labels.get(rank, '')})"


def _ranks(result: WhatIf) -> list[str]:
    """Those that cost most beyond their peers; a heavy stage's ranks all cost much."""
    ratios, peers = result.rank_ratio.ravel(), result.peer_ratio.ravel()
    ranks = result.replay.ranks.ravel()
    order = np.lexsort((ranks, -ratios / peers))[:_NUM_RANKS_SHOWN]
    return [
        f"  rank    {ratios[n]:.3f}  {_name(result, int(ranks[n]))}, its peers {peers[n]:.3f}"
        for n in order
    ]


def _types(result: WhatIf) -> list[str]:
    worst = islice(result.type_ratio.items(), _NUM_TYPES_SHOWN)
    return [f"  type    {ratio:.3f}  {name}" for name, ratio in worst]


def _explained(result: WhatIf) -> list[str]:
    if not math.isfinite(result.top_ranks.removal):
        return ["There is no slowness to explain."]
    names = ", ".join(str(rank) for rank in result.top_ranks.ranks[:8])
    return [
        f"Making rank {names} ideal removes {round(100 * result.top_ranks.removal)} % of the "
        f"slowness, making the last stage ideal {round(100 * result.last_stage.removal)} % "
        "(above 100 % and below 0 % can happen: the ideal is a mean that includes the slow)."
    ]


def _trust(result: WhatIf) -> list[str]:
    error = result.error_ratio
    lines = [
        f"Replayed and measured step times differ by {100 * error:.2f} % (median of "
        f"{len(result.replay.steps)} steps; measured {_seconds(result.measured_s)})."
    ]
    if error > _HIGH_MODEL_ERROR:
        lines.append(
            f"More than {100 * _HIGH_MODEL_ERROR:.0f} % is much: dependencies are missing from "
            "the trace, so take the figures above as rough."
        )
    return lines + [f"Note: {note}." for note in result.replay.notes]


def to_json(result: WhatIf, savings: Sequence[Saving] = ()) -> dict[str, Json]:
    """Everything, with the names that the definitions have; times in seconds."""
    replay = result.replay
    places = list(np.ndindex(replay.ranks.shape))
    return {
        "schema": WHATIF_SCHEMA,
        "layout": replay.layout_text,
        "num_gpus": replay.num_gpus,
        "iterations": replay.steps.tolist(),
        "T_base": result.measured_s,
        "T_ori": result.traced_s,
        "T_ideal": result.ideal_s,
        "S": result.slowdown,
        "waste": result.waste_ratio,
        "S_step": result.step_slowdown.tolist(),
        "S_t": dict(result.type_ratio),
        "S_stage": list(result.stage_ratio),
        "S_dp": _replicas(result),
        "S_w": {str(replay.ranks[place]): float(result.rank_ratio[place]) for place in places},
        "S_w_approximate": {
            str(replay.ranks[place]): float(result.approximate_rank_ratio[place])
            for place in places
        },
        "M_W": _share_json(result.top_ranks),
        "M_S": _share_json(result.last_stage),
        "factors": {
            "random": result.factors.random,
            "worker": result.factors.worker,
            "stage": result.factors.stage,
        },
        "launch_slowdown": result.launch_slowdown,
        "model_error_median_ratio": result.error_ratio,
        "savings": [saving.to_json() for saving in savings],
        "notes": list(replay.notes),
    }


def _replicas(result: WhatIf) -> list[Json] | None:
    """S of each DP rank; null where a DP rank has several ranks a stage (TP or CP above 1)."""
    columns = result.replay.columns
    return list(result.lane_ratio) if len(np.unique(columns)) == len(columns) else None


def _share_json(share: Share) -> dict[str, Json]:
    return {
        "removal": share.removal if math.isfinite(share.removal) else None,
        "addition": share.addition if math.isfinite(share.addition) else None,
        "removal_step_time_s": share.removed_s,
        "addition_step_time_s": share.added_s,
        "ranks": list(share.ranks),
    }
