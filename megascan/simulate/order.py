"""Which instruction needs which, across stages, and an order that satisfies them all.

The order does not depend on durations: it is found once a job and used for every iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascan.simulate.program import Code, Instruction, StageProgram

PostKey = tuple[int, int]
"""(stage, slot)."""


@dataclass(frozen=True)
class Partner:
    """One transfer of an exchange: the other side's post, and where its duration stands."""

    post: PostKey
    row_stage: int
    row: int


@dataclass(frozen=True)
class Join:
    """A collective across stages: everybody's posts, and the row that all its members share."""

    posts: list[PostKey]
    first_stage: int
    row: int


def partners(programs: list[StageProgram]) -> dict[PostKey, tuple[Partner, ...]]:
    """The other ends of every exchange, by (stage, slot)."""
    where = {
        (program.stage, end.peer_stage, end.op, end.direction, end.sequence): (slot, end)
        for program in programs
        for slot, ends in program.exchanges.items()
        for end in ends
    }
    found: dict[PostKey, tuple[Partner, ...]] = {}
    for program in programs:
        for slot, ends in program.exchanges.items():
            others = []
            for end in ends:
                other_op = "recv" if end.op == "send" else "send"
                key = (end.peer_stage, program.stage, other_op, end.direction, end.sequence)
                other_slot, other = where[key]
                receiver = end.peer_stage if end.op == "send" else program.stage
                row = other.row if end.op == "send" else end.row
                others.append(Partner((end.peer_stage, other_slot), receiver, row))
            found[program.stage, slot] = tuple(others)
    return found


def joins(programs: list[StageProgram]) -> dict[str, Join]:
    """Collectives across stages, one of each axis an iteration."""
    found: dict[str, Join] = {}
    for program in programs:
        for instruction in program.instructions:
            if instruction.code == Code.JOIN:
                first = Join([], program.stage, instruction.row)
                join = found.setdefault(instruction.axis, first)
                join.posts.append((program.stage, instruction.slot))
    return found


@dataclass(frozen=True)
class Dependencies:
    """What exchanges and collectives across stages wait for."""

    partners: dict[PostKey, tuple[Partner, ...]]
    joins: dict[str, Join]

    @classmethod
    def of(cls, programs: list[StageProgram]) -> Dependencies:
        """Read from the programs."""
        return cls(partners(programs), joins(programs))

    def needs(self, stage: int, instruction: Instruction) -> list[PostKey]:
        """Posts that must be there before an instruction can be taken."""
        if instruction.code == Code.WAIT:
            return [partner.post for partner in self.partners[stage, instruction.slot]]
        if instruction.code == Code.JOIN:
            return self.joins[instruction.axis].posts
        return []


def feasible_order(
    programs: list[StageProgram], dependencies: Dependencies
) -> list[tuple[int, Instruction]]:
    """An order in which every instruction finds what it needs: each stage as far as it can."""
    order: list[tuple[int, Instruction]] = []
    posted: set[PostKey] = set()
    position = [0] * len(programs)
    progress = True
    while progress:
        progress = False
        for stage, program in enumerate(programs):
            while position[stage] < len(program.instructions):
                instruction = program.instructions[position[stage]]
                if not posted.issuperset(dependencies.needs(stage, instruction)):
                    break
                if instruction.code == Code.POST:
                    posted.add((stage, instruction.slot))
                order.append((stage, instruction))
                position[stage] += 1
                progress = True
    if len(order) < sum(len(program.instructions) for program in programs):
        raise RuntimeError("the pipeline schedule deadlocks: a fault of the simulator")
    return order
