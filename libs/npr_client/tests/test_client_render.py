"""Trees, bars and tables of hand-made messages."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from npr.controller.v1 import controller_pb2
from npr.rollout.v1 import rollout_pb2
from npr.types.v1 import policy_pb2, sampling_pb2, trajectory_pb2
from npr_client.cli.jobs import trajectory_line
from npr_client.render import words
from npr_client.render.live import LiveTrajectory
from npr_client.render.progress import HEADLINE_METRICS, LINE_COLUMNS, RunProgress, milestone
from npr_client.render.tables import counts, duration, runs_table, stack_table
from npr_client.render.tree import BAR_CELLS, budget_bar, trajectory_tree
from npr_client.render.view import BlockView, ProseView, view_trajectory
from npr_client.stack.report import PolicyStatus, StackStatus
from npr_common.dialects import load_dialect

NPR = load_dialect("npr")


def drawn(renderable: RenderableType, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def block(*plans: str) -> str:
    guideline = "".join(f"<plan>{i}: {plan}</plan>" for i, plan in enumerate(plans, 1))
    steps = "".join(f"\n<step>{i}: work on {plan}</step>" for i, plan in enumerate(plans, 1))
    return f"<guideline>{guideline}</guideline>{steps}\n<takeaway>joined {plans[0]}</takeaway>"


def branch(used: int, stop: trajectory_pb2.BranchStop.ValueType) -> trajectory_pb2.BranchLedger:
    return trajectory_pb2.BranchLedger(budget_tokens=40, used_tokens=used, forced_tokens=3, stop=stop)


def scored() -> trajectory_pb2.ScoredTrajectory:
    ledger = trajectory_pb2.Ledger(
        total_tokens=95,
        critical_path_tokens=58,
        forced_tokens=9,
        engine_steps=58,
        blocks=[
            trajectory_pb2.BlockLedger(
                critical_path_tokens=40,
                branches=[
                    branch(12, trajectory_pb2.BRANCH_STOP_CLOSED),
                    branch(40, trajectory_pb2.BRANCH_STOP_BUDGET),
                ],
            )
        ],
    )
    trajectory = trajectory_pb2.Trajectory(
        trajectory_id="g-7/2",
        prompt_text="max of a=4*7+8 [b]",
        response_text=f"Let me split. {block('first part', '[red]second')} So \\boxed{{36}}",
        policy=policy_pb2.PolicyRef(line="tiny", version=3),
        visibility=sampling_pb2.VISIBILITY_PARALLEL,
        outcome=trajectory_pb2.OUTCOME_COMPLETED,
        branch_truncated=True,
        ledger=ledger,
    )
    score = trajectory_pb2.Score(
        verdict=trajectory_pb2.VERDICT_KIND_CORRECT, reason="36 equals 36", answer="36", reward=1.0
    )
    return trajectory_pb2.ScoredTrajectory(trajectory=trajectory, score=score)


def test_the_tree_shows_plans_budgets_stops_forced_marks_and_verdict() -> None:
    text = drawn(trajectory_tree(scored(), NPR))

    for told in (
        "g-7/2",
        "completed",
        "policy tiny@3",
        "95 tokens, critical path 58",
        "max of a=4*7+8 [b]",
        "block 1  2 branches, critical path 40 tokens",
        "plan 2  [red]second",
        "12/40 tokens  3 forced  closed",
        "40/40 tokens  3 forced  budget  ▲ closing tag forced",
        "work on first part",
        "takeaway  joined first part",
        "So \\boxed{36}",
        "correct  36 equals 36  answer 36  reward 1",
    ):
        assert told in text


def test_only_branches_closed_by_the_engine_bear_the_forced_mark() -> None:
    steps = [line for line in drawn(trajectory_tree(scored(), NPR)).splitlines() if "forced  " in line]
    assert ["▲" in line for line in steps] == [False, True]


def test_a_branch_that_was_stopped_early_bears_it_too_and_the_policy_is_told() -> None:
    item = scored()
    item.trajectory.ledger.blocks[0].branches[1].stop = trajectory_pb2.BRANCH_STOP_EARLY
    assert "budget policy" not in drawn(trajectory_tree(item, NPR))
    policy = item.trajectory.ledger.budget
    policy.share, policy.takeaway_reserve_tokens = sampling_pb2.BRANCH_SHARE_FAIR, 16
    policy.early_stop.quorum, policy.early_stop.straggler_factor = 1, 1.5
    text = drawn(trajectory_tree(item, NPR))
    assert "40/40 tokens  3 forced  early  ▲ closing tag forced" in text
    told = "fair shares · 16 tokens kept for the takeaway · stragglers closed at 1.5x once 1 have closed"
    assert f"budget policy  {told}" in text


def test_serialized_blocks_are_told_from_forked_ones() -> None:
    trajectory = trajectory_pb2.Trajectory(
        response_text=block("a", "b", "c") + block("d", "e"),
        serialized_blocks=1,
        malformed_reason=trajectory_pb2.MALFORMED_REASON_TOO_MANY_BRANCHES,
    )
    account = trajectory.ledger.blocks.add(critical_path_tokens=7)
    account.branches.extend([branch(5, trajectory_pb2.BRANCH_STOP_CLOSED)] * 2)

    blocks = [part for part in view_trajectory(trajectory, NPR).parts if isinstance(part, BlockView)]
    assert [(each.index, each.forked, len(each.branches)) for each in blocks] == [(0, False, 3), (1, True, 2)]
    assert blocks[0].branches[0].used_tokens is None
    text = drawn(trajectory_tree(trajectory_pb2.ScoredTrajectory(trajectory=trajectory), NPR))
    assert "1 blocks serialized: too many branches" in text
    assert "3 branches, not forked" in text


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (trajectory_pb2.OUTCOME_MALFORMED, "malformed (tag in step)"),
        (trajectory_pb2.OUTCOME_TRUNCATED, "truncated (limit: critical tokens)"),
        (trajectory_pb2.OUTCOME_REFUSED, "refused"),
    ],
)
def test_outcomes_say_why(outcome: trajectory_pb2.Outcome.ValueType, told: str) -> None:
    trajectory = trajectory_pb2.Trajectory(
        outcome=outcome,
        malformed_reason=trajectory_pb2.MALFORMED_REASON_TAG_IN_STEP,
        limit=trajectory_pb2.LIMIT_KIND_CRITICAL_TOKENS,
    )
    assert told in drawn(trajectory_tree(trajectory_pb2.ScoredTrajectory(trajectory=trajectory), NPR))


def test_violations_are_listed() -> None:
    trajectory = trajectory_pb2.Trajectory(response_text="<guideline><plan>1: a</plan></guideline> and then nothing")
    text = drawn(trajectory_tree(trajectory_pb2.ScoredTrajectory(trajectory=trajectory), NPR))
    assert "violation  missing_takeaway" in text


@given(st.lists(st.sampled_from([*(str(tag) for tag in NPR.tags), "1: x", "[bold]", "\\boxed{1}", " "]), max_size=30))
def test_any_tag_soup_has_a_view_and_a_tree(parts: list[str]) -> None:
    soup = "".join(parts)
    trajectory = trajectory_pb2.Trajectory(response_text=soup)
    trajectory.ledger.blocks.add().branches.add(budget_tokens=3, used_tokens=9)
    view = view_trajectory(trajectory, NPR)
    assert all(isinstance(part, BlockView | ProseView) for part in view.parts)
    drawn(trajectory_tree(trajectory_pb2.ScoredTrajectory(trajectory=trajectory), NPR))


@given(st.integers(0, 100_000), st.integers(0, 50_000))
def test_a_bar_is_as_full_as_the_budget_is_used(used: int, budget: int) -> None:
    bar = budget_bar(used, budget).plain
    filled = bar.count("█")
    assert filled + bar.count("░") == (BAR_CELLS if budget else 0)
    if budget and used >= budget:
        assert filled == BAR_CELLS
    if not used:
        assert filled == 0


def test_branches_grow_side_by_side() -> None:
    live = LiveTrajectory()
    for block_index, branch_index, text in [
        (-1, -1, "plan it "),
        (0, 0, "left"),
        (0, 1, "right"),
        (0, 0, " more"),
        (-1, -1, "joined"),
    ]:
        live.add(rollout_pb2.TokenChunk(block_index=block_index, branch_index=branch_index, text=text))
    lines = drawn(live.render(), width=80).splitlines()

    assert lines[0].startswith("plan it")
    assert any("left more" in line and "right" in line for line in lines)
    assert lines[-1].startswith("joined")


def test_progress_keeps_milestones_and_shows_the_newest_numbers() -> None:
    progress = RunProgress("tiny-1")
    run = controller_pb2.Run(run_id="tiny-1", stage="zero", phase="train", step=3, steps=13)
    step = controller_pb2.RunEvent(run=run, kind="step_finished", metrics={"reward_mean": 0.25, "entropy": 0.5})
    evaluated = controller_pb2.RunEvent(run=run, kind="evaluated", metrics={"accuracy": 0.75})

    assert progress.add(step) is None
    text = drawn(progress.render())
    assert "zero · train" in text
    assert "step 3/13" in text
    assert "reward 0.25  entropy 0.5" in text
    line = progress.add(evaluated)
    assert line is not None
    assert line.endswith("[zero] evaluated  accuracy 0.75")
    assert progress.add(controller_pb2.RunEvent(run=run, kind="failed")) is None
    told = RunProgress("tiny-1", tell_steps=True).add(step)
    assert told is not None
    assert told.endswith("[zero] step 3/13  reward 0.25  entropy 0.5")


def test_stages_without_steps_are_told_in_a_log_and_shown_on_a_display() -> None:
    run = controller_pb2.Run(run_id="tiny-1", stage="beta", phase="train", steps=1)
    message = "fine-tuning, update 3 of 90, loss 0.5"
    tuning = controller_pb2.RunEvent(run=run, kind="fine_tuning", message=message, metrics={"loss": 0.5})
    line = RunProgress("tiny-1", tell_steps=True).add(tuning)
    assert line is not None
    assert line.endswith(f"[beta] {message}")
    display = RunProgress("tiny-1")
    assert display.add(tuning) is None
    assert message in drawn(display.render())


def test_a_line_holds_as_many_numbers_as_fit() -> None:
    run = controller_pb2.Run(run_id="tiny-1", stage="zero", step=3, steps=13)
    metrics = dict.fromkeys(HEADLINE_METRICS, -0.123)
    line = milestone(controller_pb2.RunEvent(run=run, kind="step_finished", metrics=metrics))
    assert len(line) <= LINE_COLUMNS
    assert "loss -0.123" in line


def test_tables_and_words() -> None:
    run = controller_pb2.Run(run_id="r", state=controller_pb2.RUN_STATE_FAILED, error="nothing kept")
    assert "failed" in drawn(runs_table([run]))
    assert counts({"CORRECT": 3, "INCORRECT": 1, "UNSCORABLE": 0}) == "3 correct, 1 incorrect"
    assert counts({"not_judged": 2}) == "2 not judged"
    assert words.verdict(trajectory_pb2.VERDICT_KIND_UNSPECIFIED) == "not judged"
    assert [duration(s) for s in (3.9, 65, 7200)] == ["3 s", "1 min 5 s", "2 h 0 min"]


def test_a_stack_that_serves_no_policy_says_so_and_one_that_can_not_tell_does_not() -> None:
    def policy_line(policy: PolicyStatus | None) -> list[str]:
        lines = drawn(stack_table(StackStatus(True, (), None, policy))).splitlines()
        return [line.rstrip() for line in lines if line.startswith(("policy", "    "))]

    assert policy_line(PolicyStatus("", 0, "", "torch", "")) == ["policy  none, decoded by torch"]
    assert policy_line(PolicyStatus("tiny", 3, "ab" * 32, "sglang", "tiny@4 is being loaded")) == [
        "policy  tiny@3  abababababab, decoded by sglang",
        "        tiny@4 is being loaded",
    ]
    assert policy_line(None) == []


def test_a_line_about_an_unscorable_trajectory_says_why() -> None:
    item = scored()
    assert "too many" not in trajectory_line(item).plain
    item.score.MergeFrom(trajectory_pb2.Score(verdict=trajectory_pb2.VERDICT_KIND_UNSCORABLE, reason="too many digits"))
    assert trajectory_line(item).plain.endswith("too many digits")
