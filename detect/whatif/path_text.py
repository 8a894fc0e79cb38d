"""Say what steps are made of on their critical path: as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from detect.text import milliseconds, ranks_text
from detect.whatif.graph import Replay
from detect.whatif.path import CriticalPath, Link, Makeup, Share, StepPath, pieces
from megascan.errors import listed
from megascan.header import Json

PATH_SCHEMA = 1
_MOST_WHO = 5
_MOST_STEPS = 20
_LEAST_SHOWN = 0.001
_HIGH_MODEL_ERROR = 0.05


def render_path(path: CriticalPath) -> str:
    """Return what the mean step is made of, then each step, then how far to trust it."""
    mean, first, last = path.mean, path.steps[0].iteration, path.steps[-1].iteration
    lines = [
        f"An iteration takes {milliseconds(mean.length_ns)} along its critical path (mean of "
        f"{len(path.steps)}, {first} to {last}; {path.replay.layout_text}).",
        "",
        *_mean(path),
        "",
        *_steps(path),
        "",
        *_trust(path),
    ]
    return "\n".join(lines) + "\n"


def _mean(path: CriticalPath) -> Iterator[str]:
    mean, replay = path.mean, path.replay
    for share, ratio in mean.shares.items():
        yield f"  {share:<9} {_percent(ratio)}  {milliseconds(ratio * mean.length_ns)}"
        by_who = {
            Share.COMPUTE: {_rank(replay, rank): value for rank, value in mean.compute.items()},
            Share.TRANSFER: {link_text(link): value for link, value in mean.transfer.items()},
            Share.HOST: {_rank(replay, rank): value for rank, value in mean.host.items()},
        }.get(share, {})
        yield from _who(by_who)
    if mean.main_stage >= 0:
        yield (
            f"  bubble    {_percent(mean.bubble)}  of this, passes and messages of other stages "
            f"than PP{mean.main_stage}, which has most of the path and waits meanwhile"
        )


def _who(by_who: Mapping[str, float]) -> Iterator[str]:
    worth = [(who, value) for who, value in by_who.items() if value >= _LEAST_SHOWN]
    for who, value in worth[:_MOST_WHO]:
        yield f"    {_percent(value)}  {who}"
    rest = sum(by_who.values()) - sum(value for _, value in worth[:_MOST_WHO])
    if rest >= _LEAST_SHOWN:
        yield f"    {_percent(rest)}  others"


def _steps(path: CriticalPath) -> Iterator[str]:
    yield "  iteration    length  compute  transfer    host    idle  most of it"
    for step, one in list(zip(path.steps, path.makeups, strict=True))[:_MOST_STEPS]:
        shares = [_percent(one.shares[share]) for share in Share]
        yield (
            f"  {step.iteration:>9}  {milliseconds(one.length_ns):>8}  {shares[0]:>7}  "
            f"{shares[1]:>8}  {shares[2]:>6}  {shares[3]:>6}  {_most(path, one)}"
        )
    if len(path.steps) > _MOST_STEPS:
        yield f"  … and {len(path.steps) - _MOST_STEPS} more (--json has all of them)"


def _most(path: CriticalPath, one: Makeup) -> str:
    candidates = [(value, _rank(path.replay, rank)) for rank, value in one.compute.items()]
    candidates += [(value, link_text(link)) for link, value in one.transfer.items()]
    candidates += [(value, f"{_rank(path.replay, r)}, host") for r, value in one.host.items()]
    return max(candidates, default=(0.0, "idle"))[1]


def made_of(path: CriticalPath, step: StepPath) -> str:
    """Return what one step is made of, in a sentence."""
    one = path.makeups[path.steps.index(step)]
    parts = [f"{_percent(ratio)} {share}" for share, ratio in one.shares.items()]
    bubble = f"; {_percent(one.bubble)} is pipeline bubble" if one.main_stage >= 0 else ""
    return f"Critical path: {listed(parts)}, most of it {_most(path, one)}{bubble}."


def _trust(path: CriticalPath) -> Iterator[str]:
    error = float(path.replay.traced_s.sum() * 1e9 / max(sum(s.length_ns for s in path.steps), 1))
    yield f"The replayed steps (megascan whatif) take {abs(error - 1):.1%} " + (
        "longer." if error >= 1 else "less."
    )
    if abs(error - 1) > _HIGH_MODEL_ERROR:
        yield "That is much: idle time on the path is time that the trace does not explain."
    yield from (f"note: {note}" for note in path.replay.notes)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _rank(replay: Replay, rank: int) -> str:
    label = replay.labels.get(rank, "")
    return f"rank {rank} ({label})" if label else f"rank {rank}"


def link_text(link: Link) -> str:
    """Return `forward, rank 0 to rank 4` or `dp-all_reduce of ranks 0, 4 and 8`."""
    if link.is_message and len(link.ranks) == 2:
        return f"{link.op}, rank {link.ranks[0]} to rank {link.ranks[1]}"
    return f"{link.op} of {ranks_text(link.ranks)}"


def path_to_json(path: CriticalPath) -> dict[str, Json]:
    """Return everything about the paths; shares are ratios of a path's length."""
    steps = zip(path.steps, path.makeups, path.replay.traced_s.tolist(), strict=True)
    return {
        "schema": PATH_SCHEMA,
        "mean": _makeup_to_json(path.mean),
        "iterations": [
            {
                "iteration": step.iteration,
                "replayed_ns": round(replayed_s * 1e9),
                **_makeup_to_json(one),
                "chain": _chain(path, step),
            }
            for step, one, replayed_s in steps
        ],
        "notes": list(path.replay.notes),
    }


def _makeup_to_json(one: Makeup) -> dict[str, Json]:
    return {
        "length_ns": round(one.length_ns),
        "shares": {str(share): value for share, value in one.shares.items()},
        "compute": {str(rank): value for rank, value in one.compute.items()},
        "transfer": [
            {
                "op": link.op,
                "ranks": list(link.ranks),
                "is_message": link.is_message,
                "ratio": ratio,
            }
            for link, ratio in one.transfer.items()
        ],
        "host": {str(rank): value for rank, value in one.host.items()},
        "bubble": one.bubble,
        "main_stage": one.main_stage,
    }


def _chain(path: CriticalPath, step: StepPath) -> Json:
    """Return the path in the order of time; times from its begin."""
    return [
        {
            "rank": piece.rank,
            "share": str(piece.share),
            "name": piece.name,
            "start_ns": piece.start_ns - step.begin_ns,
            "duration_ns": piece.end_ns - piece.start_ns,
        }
        for piece in pieces(path, step)
    ]
