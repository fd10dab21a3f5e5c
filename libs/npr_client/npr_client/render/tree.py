"""A trajectory drawn in the terminal: plans, steps with budgets, stop reasons, forced marks, takeaways, verdict."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text
from rich.tree import Tree

from npr.types.v1 import trajectory_pb2
from npr_client.render import words
from npr_client.render.view import BlockView, BranchView, ProseView, view_trajectory
from npr_common.dialects import Dialect

BAR_CELLS = 20
VERDICT_STYLES = {"correct": "bold green", "incorrect": "bold red", "unscorable": "bold yellow"}


def trajectory_tree(scored: trajectory_pb2.ScoredTrajectory, dialect: Dialect) -> Tree:
    """The tree of one trajectory and its score."""
    trajectory = scored.trajectory
    view = view_trajectory(trajectory, dialect)
    tree = Tree(_headline(trajectory), guide_style="dim")
    if trajectory.prompt_text:
        tree.add(Text.assemble(("prompt ", "bold"), trajectory.prompt_text.strip()))
    for part in view.parts:
        if isinstance(part, ProseView):
            tree.add(Text(part.text))
        else:
            _add_block(tree, part)
    _add_notes(tree, trajectory, view.violations)
    if scored.HasField("score"):
        tree.add(_verdict(scored.score))
    return tree


def budget_bar(used: int, budget: int) -> Text:
    """Used tokens against the budget, as a bar and as numbers; a budget of 0 has no bar."""
    numbers = f" {used:,}/{budget:,} tokens" if budget else f"{used:,} tokens"
    if not budget:
        return Text(numbers, style="dim")
    share = min(1.0, used / budget)
    filled = max(1 if used else 0, round(share * BAR_CELLS))
    style = "red" if share >= 1 else "yellow" if share > 0.8 else "green"
    return Text.assemble(("█" * filled, style), ("░" * (BAR_CELLS - filled), "dim"), (numbers, "dim"))


def _headline(trajectory: trajectory_pb2.Trajectory) -> Text:
    ledger = trajectory.ledger
    facts = [
        words.ending(trajectory),
        words.visibility(trajectory.visibility),
        f"policy {trajectory.policy.line or '?'}@{trajectory.policy.version}",
        f"{ledger.total_tokens:,} tokens, critical path {ledger.critical_path_tokens:,}",
        f"{ledger.forced_tokens:,} forced",
        f"{ledger.engine_steps:,} engine steps",
    ]
    if ledger.preemptions:
        facts.append(f"preempted {ledger.preemptions}x")
    return Text.assemble((trajectory.trajectory_id, "bold cyan"), "  ", " · ".join(facts))


def _add_block(tree: Tree, block: BlockView) -> None:
    facts = f"{len(block.branches)} branches"
    if block.critical_path_tokens is not None:
        facts += f", critical path {block.critical_path_tokens:,} tokens"
    if not block.forked:
        facts += ", not forked"
    node = tree.add(Text.assemble((f"block {block.index + 1}", "bold magenta"), f"  {facts}"))
    guideline = node.add(Text("guideline", style="bold"))
    for branch in block.branches:
        guideline.add(Text.assemble((f"plan {branch.index + 1}  ", "blue"), branch.plan))
    for branch in block.branches:
        _add_branch(node, branch)
    node.add(Text.assemble(("takeaway  ", "bold"), block.takeaway or "none"))


def _add_branch(node: Tree, branch: BranchView) -> None:
    line = Text.assemble((f"step {branch.index + 1}  ", "bold blue"))
    if branch.used_tokens is not None and branch.budget_tokens is not None:
        line.append_text(budget_bar(branch.used_tokens, branch.budget_tokens))
        line.append(f"  {branch.forced_tokens} forced", style="dim")
    if branch.stop is not None:
        line.append(f"  {branch.stop}", style="red" if branch.closed_by_force else "green")
    if branch.closed_by_force:
        line.append("  ▲ closing tag forced", style="red")
    node.add(line).add(Text(branch.step))


def _add_notes(tree: Tree, trajectory: trajectory_pb2.Trajectory, violations: Iterable[str]) -> None:
    if policy := words.budget(trajectory.ledger.budget):
        tree.add(Text(f"budget policy  {policy}", style="dim"))
    if trajectory.serialized_blocks:
        why = words.malformed_reason(trajectory.malformed_reason)
        tree.add(Text(f"{trajectory.serialized_blocks} blocks serialized: {why}", style="yellow"))
    if trajectory.textual_joins:
        note = f"{trajectory.textual_joins} joins were made by feeding the branches again as text: not native"
        tree.add(Text(note, style="yellow"))
    for violation in violations:
        tree.add(Text(f"violation  {violation}", style="yellow"))
    if trajectory.message:
        tree.add(Text(trajectory.message, style="yellow"))


def _verdict(score: trajectory_pb2.Score) -> Text:
    word = words.verdict(score.verdict)
    if score.verdict == trajectory_pb2.VERDICT_KIND_UNSPECIFIED:
        return Text(f"{word}  format penalty {score.format_penalty:g}", style="dim")
    line = Text.assemble((word, VERDICT_STYLES[word]), f"  {score.reason}")
    if score.answer:
        line.append(f"  answer {score.answer}")
    if score.verdict != trajectory_pb2.VERDICT_KIND_UNSCORABLE:
        line.append(f"  reward {score.reward:g}")
    line.append(f"  format penalty {score.format_penalty:g}", style="dim")
    return line
