"""Held-out evaluation of a policy (SPEC section 6): all benchmarks in one batch, then the numbers.

Every stage is measured on the same problems with the same sampling seeds, so that differences between stages are
paired. What was read is acknowledged by the consumer `eval/<stage>`: an audit finds every group consumed once.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from npr.buffer.v1 import buffer_pb2
from npr.reward.v1 import reward_pb2
from npr.types.v1 import sampling_pb2, trajectory_pb2
from npr_controller.datasets import Problem
from npr_controller.measures import is_correct, measure, numbers
from npr_controller.recipe import PublishedPolicy
from npr_controller.stages.context import RunContext, named_groups
from npr_controller.stages.records import BenchmarkRecord, EvaluationRecord, ShownTrajectory, StartRecord
from npr_controller.stages.rollouts import Batch, roll_out
from npr_controller.state import EventKind
from npr_controller.statistics import best_at_k, bootstrap_interval, pass_at_k


async def evaluate(
    ctx: RunContext, stage: str, policy: PublishedPolicy, visibility: "sampling_pb2.Visibility.ValueType"
) -> EvaluationRecord:
    """Measures a stage's policy, once."""
    known = ctx.journal.fact(f"{stage}/evaluation", EvaluationRecord)
    if known is not None:
        return known
    started_at = await _started_at(ctx, stage, policy)
    batch, members = _batch(ctx, stage, policy, visibility)
    rolled = await roll_out(ctx, batch)
    await ctx.buffer.acknowledge(f"eval/{stage}", policy.version, [group.group_id for group in rolled.groups])
    benchmarks = {name: _benchmark(ctx, [rolled.groups[place] for place in places]) for name, places in members.items()}
    record = EvaluationRecord(
        stage=stage,
        policy=policy,
        overall=_benchmark(ctx, rolled.groups),
        benchmarks=benchmarks,
        shown=await _shown(ctx, rolled.groups, members),
        started_at=started_at,
        finished_at=time.time(),
    )
    await _tell(ctx, record)
    return record


async def _started_at(ctx: RunContext, stage: str, policy: PublishedPolicy) -> float:
    """When the evaluation was first begun, whatever was killed since."""
    known = ctx.journal.fact(f"{stage}/evaluation/start", StartRecord)
    if known is not None:
        return known.at
    started = StartRecord(policy=policy, at=time.time())
    await ctx.journal.record(
        EventKind.STAGE_STARTED,
        f"evaluating {stage}",
        facts={f"{stage}/evaluation/start": started},
        stage=stage,
        phase="evaluate",
    )
    return started.at


def _batch(
    ctx: RunContext, stage: str, policy: PublishedPolicy, visibility: "sampling_pb2.Visibility.ValueType"
) -> tuple[Batch, dict[str, list[int]]]:
    """All benchmarks' problems, and which places of the batch are whose."""
    groups: list[tuple[str, Problem]] = []
    members: dict[str, list[int]] = {}
    for name, problems in ctx.problems.test.items():
        named = named_groups(f"eval-{stage}-{name}", [problems[index] for index in range(len(problems))])
        members[name] = list(range(len(groups), len(groups) + len(named)))
        groups.extend(named)
    batch = Batch(
        channel=f"eval/{stage}",
        seed_scope="eval",
        groups=groups,
        policy=policy,
        sample_count=ctx.recipe.evaluation.samples_per_problem,
        decoding=ctx.recipe.evaluation.decoding or ctx.recipe.decoding,
        visibility=visibility,
        reward_rule=reward_pb2.REWARD_RULE_ACCURACY,
    )
    return batch, members


def _benchmark(ctx: RunContext, groups: Sequence[buffer_pb2.GroupSummary]) -> BenchmarkRecord:
    settings = ctx.recipe.evaluation
    correct = np.array([[is_correct(sample) for sample in group.samples] for group in groups])
    per_problem = correct.mean(axis=1)
    interval = bootstrap_interval(
        per_problem,
        resamples=settings.bootstrap_resamples,
        confidence=settings.confidence,
        seed=ctx.recipe.seed,
    )
    return BenchmarkRecord(
        prompts=len(groups),
        samples_per_problem=settings.samples_per_problem,
        measures=measure([sample for group in groups for sample in group.samples]),
        accuracy_low=interval.low,
        accuracy_high=interval.high,
        best_at_k=best_at_k(correct),
        pass_at={k: pass_at_k(correct, k) for k in settings.pass_at},
        per_problem=per_problem.tolist(),
    )


async def _shown(
    ctx: RunContext, groups: Sequence[buffer_pb2.GroupSummary], members: Mapping[str, Sequence[int]]
) -> list[ShownTrajectory]:
    """The first sample of a few groups, right and wrong ones in turn."""
    owner = {groups[place].group_id: name for name, places in members.items() for place in places}
    chosen = _in_turn(groups)[: ctx.recipe.evaluation.shown_trajectories]
    if not chosen:
        return []
    read = await ctx.buffer.read([group.group_id for group in chosen])
    return [_shown_trajectory(owner[answer.group.group_id], answer) for answer in read]


def _in_turn(groups: Sequence[buffer_pb2.GroupSummary]) -> list[buffer_pb2.GroupSummary]:
    right = [group for group in groups if is_correct(group.samples[0])]
    wrong = [group for group in groups if not is_correct(group.samples[0])]
    paired = [group for pair in zip(right, wrong, strict=False) for group in pair]
    shortest = min(len(right), len(wrong))
    return paired + right[shortest:] + wrong[shortest:]


def _shown_trajectory(benchmark: str, read: buffer_pb2.ReadGroupsResponse) -> ShownTrajectory:
    scored = read.trajectories[0]
    trajectory, score = scored.trajectory, scored.score
    return ShownTrajectory(
        trajectory_id=trajectory.trajectory_id,
        benchmark=benchmark,
        prompt=read.group.prompt.messages[-1].content if read.group.prompt.messages else trajectory.prompt_text,
        response=trajectory.response_text,
        gold=read.group.prompt.gold,
        answer=score.answer,
        verdict=trajectory_pb2.VerdictKind.Name(score.verdict).removeprefix("VERDICT_KIND_").lower(),
        reason=score.reason,
        outcome=trajectory_pb2.Outcome.Name(trajectory.outcome).removeprefix("OUTCOME_").lower(),
        format_penalty=score.format_penalty,
        total_tokens=trajectory.ledger.total_tokens,
        critical_path_tokens=trajectory.ledger.critical_path_tokens,
        blocks=[[_branch(branch) for branch in block.branches] for block in trajectory.ledger.blocks],
    )


def _branch(branch: trajectory_pb2.BranchLedger) -> dict[str, str | int]:
    return {
        "budget_tokens": branch.budget_tokens,
        "used_tokens": branch.used_tokens,
        "forced_tokens": branch.forced_tokens,
        "stop": trajectory_pb2.BranchStop.Name(branch.stop).removeprefix("BRANCH_STOP_").lower(),
    }


async def _tell(ctx: RunContext, record: EvaluationRecord) -> None:
    overall = record.overall
    told = numbers(overall.measures) | {
        "prompts": float(overall.prompts),
        "accuracy_low": overall.accuracy_low,
        "accuracy_high": overall.accuracy_high,
        "best_at_k": overall.best_at_k,
        "seconds": record.finished_at - record.started_at,
    }
    message = (
        f"{record.stage}: accuracy {overall.measures.accuracy:.3f} "
        f"[{overall.accuracy_low:.3f}, {overall.accuracy_high:.3f}] on {overall.prompts} problems, "
        f"format {overall.measures.format_pass_rate:.3f}, parallel {overall.measures.parallel_rate:.3f}"
    )
    facts = {f"{record.stage}/evaluation": record}
    await ctx.journal.record(EventKind.EVALUATED, message, metrics=told, facts=facts)
