"""What a rank's thread and its GPU do, one after the other, and which spans a tracer makes of it.

All ranks of a stage do the same; how long each takes is the engine's to say. Marks are numbered:
a span lies between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.grounds.depot.schedule import Message


@dataclass(frozen=True, slots=True)
class Mark:
    """An event on the stream: the thread launches it, the GPU reaches it."""

    slot: int


@dataclass(frozen=True, slots=True)
class Work:
    """Kernels of one module: s on a nominal chip, of products (by tokens, and by their squares)
    and of memory; `number` finds their noise.
    """

    number: int
    linear_s: float
    square_s: float
    memory_s: float
    launches: float
    microbatch: int  # -1: its length does not depend on data
    is_of_experts: bool = False
    is_of_pass: bool = True


@dataclass(frozen=True, slots=True)
class Talk:
    """A collective within groups of the stage: on the stream, or beside it in a lane."""

    number: int
    op: str
    axis: str
    size_bytes: float
    microbatch: int
    begin: int
    end: int
    lane: str = ""
    is_of_experts: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """The stream waits for what a lane has been given."""

    lane: str


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The thread waits for the stream."""


@dataclass(frozen=True, slots=True)
class Think:
    """The thread alone is busy."""

    number: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Load:
    """The thread takes a batch from its loader."""

    microbatch: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Collect:
    """A place where Python's collector may begin."""

    number: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Messages to and from other stages; the thread waits for their end."""

    number: int
    messages: tuple[Message, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Meet:
    """A collective across stages; `number` is the same in all of them."""

    number: int
    axis: str
    size_bytes: float
    begin: int
    end: int


Operation = Mark | Work | Talk | Join | Synchronize | Think | Load | Collect | Swap | Meet


@dataclass(frozen=True, slots=True)
class Traced:
    """One span of every rank of a stage. `axis` becomes the id of the rank's own group, `peer` the
    rank of that stage; bytes follow the microbatch's tokens or the experts' where it says so.
    """

    kind: str
    name: str
    track: int
    begin: int
    end: int
    arguments: Mapping[str, int | str] = field(default_factory=dict)
    axis: str = ""
    peer: int = -1
    size_bytes: float = 0.0
    microbatch: int = -1
    is_of_experts: bool = False
    is_on_host: bool = False
    lane: str = ""


@dataclass(frozen=True, slots=True)
class Program:
    """What the ranks of one stage do in an iteration."""

    stage: int
    operations: tuple[Operation, ...]
    spans: tuple[Traced, ...]
    num_marks: int
    works: tuple[Work, ...]
    talks: tuple[Talk, ...]
    num_thoughts: int
    num_collects: int
    num_swaps: int
    bounds: tuple[int, int]  # marks of the iteration's begin and end
