"""Simulate what ranks tell each other: collectives and messages, beside compute or waited for.

A collective starts when its last member comes, and all leave it within about a microsecond. One
that runs beside compute has a stream of its own, in which those of a group follow one another, and
slows the kernels beside it. A message starts when both ends are ready; those of one call end
together, and a thread waits for them, as Megatron-Core synchronizes behind its batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.grounds.quarry.conditions import Conditions, Drawer
from benchmarks.grounds.quarry.devices import (
    COMMUNICATION,
    OVERLAPPED,
    Devices,
    Rank,
    arguments_of,
)  # fmt: skip
from benchmarks.grounds.quarry.groups import Groups
from benchmarks.grounds.quarry.programs import (
    AWAIT,
    EXCHANGE,
    FINISH,
    POST,
    START,
    TALK,
    Message,
    Operation,
    Program,
)  # fmt: skip

LEAVING_S = 1e-6  # members of a collective leave it about so much apart


class Coming(NamedTuple):
    """A rank that comes to a collective at a time, launched at another, and the collective."""

    rank: Rank
    at: float
    launch: float
    number: int
    operation: Operation


class Post(NamedTuple):
    """One end of a message, and with which others it is waited for; none beside compute."""

    rank: Rank
    message: Message
    at: float
    launch: float
    batch: tuple[Message, ...]


class Engine(Devices):
    """One simulation of one job."""

    def __init__(
        self,
        drawer: Drawer,
        programs: Sequence[Program],
        groups: Groups,
        conditions: Conditions,
        *,
        recording: bool,
    ) -> None:
        super().__init__(drawer, programs, conditions, recording=recording)
        self.groups, self.network = groups, conditions.network
        self.meetings: dict[tuple[int, int], list[Coming]] = {}
        self.posts: dict[object, Post] = {}
        self.channel_ends: dict[object, float] = {}
        """When the last message from one rank to another in one direction was through."""
        names = [name.partition("@")[0] for name in groups.names]
        self.follows_tokens = [name in {"tp", "cp", "ep"} for name in names]
        ratio = self.machines.transfer_noise_ratio
        drawn = drawer.rng("transfers").normal(size=4099)
        self.noise, self.leaving_s = np.exp(ratio * drawn).tolist(), LEAVING_S * abs(drawn)
        self.handlers |= {
            TALK: self._talk, START: self._start, FINISH: self._finish,
            EXCHANGE: self._exchange, POST: self._post, AWAIT: self._await,
        }  # fmt: skip

    def _place(self, *key: int) -> int:
        """Return where the noise of something stands, the same in each simulation."""
        return hash(key) % len(self.noise)

    # --- collectives ---------------------------------------------------------------------------

    def _coming(self, rank: Rank, operation: Any) -> Coming:
        launch, group = rank.thread, operation[2]
        at = max(rank.ready, self.launch(rank, 1, 1.0))
        number = rank.counts.get(group, 0)
        rank.counts[group] = number + 1
        return Coming(rank, at, launch, number, operation)

    def _talk(self, rank: Rank, operation: Any) -> None:
        coming = self._coming(rank, operation)
        rank.queue.append((rank.issued, coming.at))
        rank.blocked = True
        self._meet(coming)

    def _start(self, rank: Rank, operation: Any) -> None:
        stream = rank.streams.setdefault(operation[2], deque())
        stream.append(self._coming(rank, operation))
        rank.beside += 1
        if len(stream) == 1:
            self._begin_first(stream)

    def _begin_first(self, stream: deque[Coming]) -> None:
        first = stream[0]
        at = max(first.at, first.rank.stream_ends.get(first.operation[2], 0.0))
        self._meet(first._replace(at=at))

    def _meet(self, coming: Coming) -> None:
        """Come to a collective; the last member to come ends it for all."""
        rank, (_, _, group, op, size, at) = coming.rank, coming.operation
        there = self.meetings.setdefault((group, coming.number), [])
        there.append(coming)
        members = self.groups.members[group]
        if len(there) < len(members):
            return
        del self.meetings[group, coming.number]
        start = max(each.at for each in there)
        size = self._size(rank, group, size, at[1])
        taken = self.network.timed_s(members, op, size, rank.turn, start)
        end = start + taken * self.noise[self._place(group, coming.number)]
        for each in there:
            left = self.leaving_s[self._place(each.rank.number, group, coming.number)]
            self._leave(each, end + float(left))

    def _size(self, rank: Rank, group: int, size: int, microbatch: int) -> int:
        """Return the bytes of a collective for what tokens a microbatch has."""
        if microbatch < 0 or not self.follows_tokens[group]:
            return size
        return int(size * rank.lengths[rank.turn][microbatch][0])

    def _leave(self, coming: Coming, end: float) -> None:
        rank, (_, label, group, op, size, at) = coming.rank, coming.operation
        if self.recording:
            arguments = arguments_of(at) | {
                "op": op,
                "group": self.groups.names[group],
                "sequence": rank.sequence(group, op),
                "size_bytes": self._size(rank, group, size, at[1]),
            }
            where = (OVERLAPPED if label else COMMUNICATION, coming.at, end, coming.launch)
            rank.spans.append(("collective", op, *where, rank.turn, arguments))
        if not label:
            rank.not_own += end - coming.at
            self.resume(rank, end)
            return
        rank.stream_ends[group] = end
        rank.beside -= 1
        rank.beside_until = max(rank.beside_until, end)
        self._done(rank, label, end)
        stream = rank.streams[group]
        stream.popleft()
        if stream:
            self._begin_first(stream)

    # --- what the device waits for -------------------------------------------------------------

    def _finish(self, rank: Rank, operation: Any) -> None:
        self._wait_for(rank, operation[1])

    def _await(self, rank: Rank, operation: Any) -> None:
        self._wait_for(rank, (operation[1], rank.turn))

    def _wait_for(self, rank: Rank, key: object) -> None:
        """Let the device wait for something that runs beside it."""
        end = rank.done.get(key)
        if end is None:
            rank.awaited, rank.blocked = key, True
        else:
            rank.not_own += max(0.0, end - rank.ready)
            rank.ready = max(rank.ready, end)

    def _done(self, rank: Rank, key: object, end: float) -> None:
        rank.done[key] = end
        if rank.awaited == key:
            rank.awaited = None
            rank.not_own += max(0.0, end - rank.ready)
            self.resume(rank, end)

    # --- messages ------------------------------------------------------------------------------

    def _exchange(self, rank: Rank, operation: Any) -> None:
        launch, batch = rank.thread, operation[1]
        at = max(rank.ready, self.launch(rank, len(batch), 1.0))
        rank.left, rank.exchange_end = len(batch), 0.0
        rank.blocked = True
        for message in batch:
            self._offer(Post(rank, message, at, launch, batch))

    def _post(self, rank: Rank, operation: Any) -> None:
        launch = rank.thread
        at = max(rank.ready, self.launch(rank, 1, 1.0))
        self._offer(Post(rank, operation[1], at, launch, ()))

    def _offer(self, post: Post) -> None:
        """Offer one end of a message; the second end to be offered carries it."""
        rank, message = post.rank, post.message
        other = self.posts.pop((message[0], rank.turn), None)
        if other is None:
            self.posts[message[0], rank.turn] = post
            return
        sender, receiver = (post, other) if message[1] else (other, post)
        ends = (sender.rank.number, receiver.rank.number)
        channel = (*ends, message[3])
        free = self.channel_ends.get(channel, 0.0)
        start = max(post.at, other.at, free)
        size = _message_size(rank, message)
        taken = self.network.timed_s(ends, "send", size, rank.turn, start)
        end = start + taken * self.noise[self._place(*ends, rank.turn, message[4])]
        self.channel_ends[channel] = end
        for each in (sender, receiver):
            self._end_message(each._replace(at=max(each.at, free)), end)

    def _end_message(self, post: Post, end: float) -> None:
        rank = post.rank
        if not post.batch:
            self._record(post, post.message, OVERLAPPED, end)
            self._done(rank, (post.message[0], rank.turn), end)
            return
        rank.left -= 1
        rank.exchange_end = max(rank.exchange_end, end)
        if rank.left:
            return
        rank.thread = max(rank.thread, rank.exchange_end)
        for message in post.batch:
            self._record(post, message, COMMUNICATION, rank.exchange_end)
        self.resume(rank, rank.exchange_end)

    def _record(self, post: Post, message: Message, track: int, end: float) -> None:
        if not self.recording:
            return
        rank, (_, is_send, peer, direction, microbatch, chunk, _) = post.rank, message
        op = "send" if is_send else "recv"
        arguments = {
            "microbatch": microbatch,
            "chunk": chunk,
            "op": op,
            "group": f"pp@{min(self.job.layout.group(rank.number, 'pp'))}",
            "sequence": rank.sequence(rank.number if is_send else peer, direction, is_send, peer),
            "size_bytes": _message_size(rank, message),
            "peer": peer,
            "direction": direction,
        }
        where = (track, post.at, end, post.launch, rank.turn)
        rank.spans.append(("p2p", f"{op}_{direction}", *where, arguments))


def _message_size(rank: Rank, message: Message) -> int:
    """Return the bytes of a message for what tokens its microbatch has."""
    return int(message[6] * rank.lengths[rank.turn][message[4]][0])
