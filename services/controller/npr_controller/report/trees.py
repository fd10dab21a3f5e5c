"""A shown trajectory as the tree that the page nests: prose and blocks, a block's branches side by side."""

from dataclasses import dataclass

from npr_common.dialects import Dialect, load_dialect
from npr_common.schema import Block, parse_text
from npr_controller.stages.records import ShownTrajectory


@dataclass(frozen=True)
class BranchView:
    """One branch: what was planned, what was done, and what it used of its budget (None where it never forked)."""

    label: int
    plan: str
    step: str
    used_tokens: int | None
    budget_tokens: int | None
    stop: str


@dataclass(frozen=True)
class PartView:
    """Prose, or a block when it has branches."""

    prose: str = ""
    branches: tuple[BranchView, ...] = ()
    takeaway: str = ""


@dataclass(frozen=True)
class TrajectoryView:
    """A trajectory and its tree."""

    shown: ShownTrajectory
    parts: tuple[PartView, ...]
    violations: tuple[str, ...]


def view(shown: ShownTrajectory, dialect_name: str) -> TrajectoryView:
    """Parses a response for the page; a malformed one shows what could be recovered and what is wrong."""
    dialect: Dialect = load_dialect(dialect_name)
    result = parse_text(shown.response, dialect)
    ledgers = iter(shown.blocks)
    parts = []
    for part in result.tree.parts:
        if isinstance(part, Block):
            parts.append(_block(part, next(ledgers, [])))
        elif part.text.strip():
            parts.append(PartView(prose=part.text.strip()))
    return TrajectoryView(shown, tuple(parts), tuple(violation.message for violation in result.violations))


def _block(block: Block, ledger: list[dict[str, str | int]]) -> PartView:
    count = max(len(block.plans), len(block.steps))
    branches = tuple(_branch(block, ledger, place) for place in range(count))
    return PartView(branches=branches, takeaway=block.takeaway.text if block.takeaway else "")


def _branch(block: Block, ledger: list[dict[str, str | int]], place: int) -> BranchView:
    account = ledger[place] if place < len(ledger) else {}
    return BranchView(
        label=place + 1,
        plan=block.plans[place].text if place < len(block.plans) else "",
        step=block.steps[place].text if place < len(block.steps) else "",
        used_tokens=int(account["used_tokens"]) if account else None,
        budget_tokens=int(account["budget_tokens"]) if account else None,
        stop=str(account.get("stop", "")),
    )
