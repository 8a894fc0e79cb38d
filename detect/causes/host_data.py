"""Say what else than a slow host may make the passes of all its ranks longer.

A host may hold whole replicas, whose documents are longer than those of others, or whole stages,
whose layers are heavier; a router may send its experts more tokens; and some of its ranks may only
wait for mates inside their passes. The same replicas are then as slow on other hosts, attention is
as quick as ever, or passes of one kind alone are longer.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from detect.causes.device import attention_residuals
from detect.observe.observations import Observations
from detect.observe.operations import BACKWARD, FORWARD
from detect.stats import robust
from detect.stats.host_tests import COMPUTE, HostTest, Sides
from detect.thresholds.devices import COMPUTE as LIMITS
from detect.thresholds.devices import DEVICE, PAIRS
from detect.thresholds.hosts import HOSTS
from megascan.arrays import Integers


def may_be_its_data(sides: Sides, compute: HostTest) -> bool:
    """Return whether a replica's data, a stage's layers, or tokens for experts may lengthen the
    host's passes.
    """
    return (
        sides.holds_whole_units()
        or share_their_data(sides, compute)
        or in_one_pass(sides)
        or may_be_its_experts(sides, compute)
    )


def may_be_its_experts(sides: Sides, compute: HostTest) -> bool:
    """Return whether experts on the host may get more tokens than those on others: attention, which
    no router lengthens, is not slow as well.
    """
    seen = sides.seen
    if seen.members.layout.ep < 2 or not seen.tells_passes:
        return False
    over = attention_residuals(seen, sides.own)
    level = np.nan if over is None else float(robust.median(robust.centre(over)[sides.own]))
    return not level >= HOSTS.shared_data_share * compute.effect


def in_one_pass(sides: Sides) -> bool:
    """Return whether a host that holds a whole stage is slow in one kind of pass only, by layers.

    A slow device lengthens both passes. Late launches lengthen the forward pass, whose kernels are
    shorter. Example: a layer takes 0.36 ms forward against 0.20 on the other stage, and backward
    0.41 against 0.41.
    """
    layers = sides.seen.layers
    if layers is None or not sides.lacks_peers(sides.own):
        return False
    small, large = sorted(
        float(np.nanmedian(part[sides.own]) - np.nanmedian(part[sides.control]))
        for part in (layers.log_ns[:, :, layers.phase == one] for one in (FORWARD, BACKWARD))
    )
    return small < LIMITS.one_sided_share * large


def stall_by_their_data(seen: Observations, rows: Integers) -> bool:
    """Return whether most of `rows` stand still inside passes in just those iterations, and for as
    long, in which other stages of their replicas compute for longer: no host knows how long the
    others' data are. So does what a last stage computes beside its modules. For several rows the
    other stages are those on other hosts.

    Example: a last stage stands still for 0 to 20 ms an iteration, correlated by 0.98 with passes
    of the stage before it.
    """
    members, found = seen.members, []
    hosts, length = np.array(members.hosts), len(seen.iterations)
    work_ns = np.nan_to_num(np.exp(seen.work.log_ns)).sum(axis=2)
    for row in rows.tolist():
        same = members.other_stages(row) & ((hosts != hosts[row]) | (len(rows) == 1))
        if length < HOSTS.min_correlated or not same.any():
            return False
        stalls, passes = seen.stalled_ns[row], robust.median(work_ns[same], axis=0)
        if not (np.ptp(stalls) > 0 and np.ptp(passes) > 0):
            return False
        alike = float(np.corrcoef(stalls, passes)[0, 1])
        if not alike >= HOSTS.least_correlation:
            continue
        t_value = alike * np.sqrt((length - 2) / max(1.0 - alike**2, 1e-12))
        found.append(special.stdtr(length - 2, -t_value) <= HOSTS.correlation_p)
    return float(np.sum(found)) > PAIRS.agrees_share * len(rows)


def share_their_data(sides: Sides, compute: HostTest) -> bool:
    """Return whether the host's replicas are as slow on other hosts: hardware chooses no replica.

    host 0: stage 0 of replicas 0, 1     host 1: stage 0 of replicas 2, 3   1.05x
    host 2: stage 1 of replicas 0, 1     host 3: stage 1 of replicas 2, 3   1.05x
    """
    replica = sides.seen.members.replica
    same = np.isin(replica, replica[sides.own])
    over = sides.channels.without(same, by_layers=sides.lacks_peers(same)).get(COMPUTE)
    level = np.empty(0) if over is None else over.level[same & ~sides.own]
    if not np.isfinite(level).any():
        return False
    return float(np.nanmedian(level)) >= HOSTS.shared_data_share * compute.effect


def wait_for_mates(sides: Sides) -> bool:
    """Return whether too many of the host's ranks only wait for TP mates: in one kind of pass they
    are as slow as a mate that is slow in both, and in the other by far less.

    So it looks where collectives inside the one kind were not recorded. Example: forward 1.46,
    1.00, 1.23 and 1.00 times the others' time, backward 1.46, 1.46, 1.23 and 1.23 times: two slow
    ranks, and not their host.
    """
    members, work = sides.seen.members, sides.seen.work
    over = np.full((len(members), 2), np.nan)
    for stage in np.unique(members.stage[sides.own]):
        of_stage = members.stage == stage
        rows, peers = sides.own & of_stage, sides.control & of_stage
        for column, phase in enumerate((FORWARD, BACKWARD)):
            passes = work.log_ns[:, :, work.phase == phase]
            beyond = passes[rows] - robust.median(passes[peers], axis=0)
            over[rows, column] = robust.median(beyond.reshape(len(beyond), -1), axis=1)
    over, group = over[sides.own], members.tensor_group[sides.own]
    slower = np.argmax(over, axis=1)
    in_slower, in_quicker = over[:, slower].T, over[:, 1 - slower].T  # (row, mate), row's passes
    own = np.diag(in_slower)[:, None]
    alike = np.abs(in_slower - own) <= DEVICE.alike_log_share * own
    quicker = np.diag(in_quicker)[:, None] < PAIRS.agrees_share * in_quicker
    in_both = over.min(axis=1) >= PAIRS.agrees_share * over.max(axis=1)
    waits = (alike & quicker & in_both & (group == group[:, None])).any(axis=1)
    return float(np.mean(waits)) > 1.0 - HOSTS.most_of_host_share
