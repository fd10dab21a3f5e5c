"""A trajectory as the tree that people think of, put together from its text, its ledger and its score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from npr.types.v1 import trajectory_pb2
from npr_client.render import words
from npr_common.dialects import Dialect
from npr_common.schema import Block, Step, parse_text


@dataclass(frozen=True)
class BranchView:
    """One plan and the step that carried it out. Token counts are None where the block was not forked."""

    index: int
    plan: str
    step: str
    used_tokens: int | None
    budget_tokens: int | None
    forced_tokens: int | None
    stop: str | None

    @property
    def closed_by_force(self) -> bool:
        """Whether the engine, not the model, ended the step."""
        return self.stop in {"budget", "eos", "early"}


@dataclass(frozen=True)
class BlockView:
    """One block; `forked` is False for one that was decoded as plain text."""

    index: int
    forked: bool
    critical_path_tokens: int | None
    branches: tuple[BranchView, ...]
    takeaway: str


@dataclass(frozen=True)
class ProseView:
    """Text outside of all blocks."""

    text: str


@dataclass(frozen=True)
class TrajectoryView:
    """The whole, in the order of the response."""

    parts: tuple[ProseView | BlockView, ...]
    violations: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def view_trajectory(trajectory: trajectory_pb2.Trajectory, dialect: Dialect) -> TrajectoryView:
    """The tree of a trajectory. Never fails on a malformed response: it shows what could be recovered."""
    parsed = parse_text(trajectory.response_text, dialect)
    ledgers = _ledgers(trajectory, parsed.tree.blocks)
    parts = tuple(
        _block(index, part, ledger) if isinstance(part, Block) else ProseView(part.text.strip())
        for index, part, ledger in _numbered(parsed.tree.parts, ledgers)
    )
    violations = tuple(f"{violation.code.value}: {violation.message}" for violation in parsed.violations)
    return TrajectoryView(tuple(part for part in parts if not _is_empty(part)), violations)


def _ledgers(
    trajectory: trajectory_pb2.Trajectory, blocks: Sequence[Block]
) -> Iterator[trajectory_pb2.BlockLedger | None]:
    """The ledger of each block in order; None for blocks that were not forked.

    The ledger lists forked blocks only. Where some were serialized, a block is taken for the next forked one when it
    has as many plans as that has branches.
    """
    forked = list(trajectory.ledger.blocks)
    to_skip = max(0, len(blocks) - len(forked))
    for block in blocks:
        if forked and (to_skip == 0 or len(block.plans) == len(forked[0].branches)):
            yield forked.pop(0)
        else:
            to_skip = max(0, to_skip - 1)
            yield None


def _numbered(
    parts: Sequence[Any], ledgers: Iterator[trajectory_pb2.BlockLedger | None]
) -> Iterator[tuple[int, Any, trajectory_pb2.BlockLedger | None]]:
    index = 0
    for part in parts:
        if isinstance(part, Block):
            yield index, part, next(ledgers)
            index += 1
        else:
            yield -1, part, None


def _block(index: int, block: Block, ledger: trajectory_pb2.BlockLedger | None) -> BlockView:
    accounts = list(ledger.branches) if ledger is not None else []
    count = max(len(block.plans), len(block.steps), len(accounts))
    return BlockView(
        index=index,
        forked=ledger is not None,
        critical_path_tokens=ledger.critical_path_tokens if ledger is not None else None,
        branches=tuple(_branch(i, block, accounts[i] if i < len(accounts) else None) for i in range(count)),
        takeaway=block.takeaway.text if block.takeaway is not None else "",
    )


def _branch(index: int, block: Block, account: trajectory_pb2.BranchLedger | None) -> BranchView:
    step: Step | None = block.steps[index] if index < len(block.steps) else None
    return BranchView(
        index=index,
        plan=block.plans[index].text if index < len(block.plans) else "",
        step=step.text if step is not None else "",
        used_tokens=account.used_tokens if account is not None else None,
        budget_tokens=account.budget_tokens if account is not None else None,
        forced_tokens=account.forced_tokens if account is not None else None,
        stop=words.branch_stop(account.stop) if account is not None else None,
    )


def _is_empty(part: ProseView | BlockView) -> bool:
    return isinstance(part, ProseView) and not part.text
