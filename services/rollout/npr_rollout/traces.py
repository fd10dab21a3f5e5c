"""Spans of trajectories, written when they end: trajectory, its blocks, their branches.

Invariant: no prompt or response text is ever an attribute.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from npr_common.telemetry import context_from, current_traceparent, names, tracer
from npr_rollout.record.outcomes import LimitKind
from npr_rollout.record.request import BlockReport, Result


def record_trajectory(result: Result, trajectory_id: str, group_id: str, traceparent: str) -> str:
    """Write the spans of a finished trajectory under the trace of whoever asked; the `traceparent` of its span."""
    span = tracer().start_span(
        names.SPAN_TRAJECTORY, context=context_from(traceparent), start_time=_nanoseconds(result.started_at)
    )
    span.set_attributes(
        {
            names.TRAJECTORY_ID: trajectory_id,
            names.GROUP_ID: group_id,
            names.TRAJECTORY_OUTCOME: result.outcome.name.lower(),
            names.POLICY_VERSION: result.policy_version,
            names.GEN_AI_OPERATION_NAME: "text_completion",
            names.GEN_AI_USAGE_INPUT_TOKENS: result.prompt_length,
            names.GEN_AI_USAGE_OUTPUT_TOKENS: result.ledger.total_tokens,
            **_held_to(result),
        }
    )
    with trace.use_span(span, end_on_exit=False):
        for index, block in enumerate(result.ledger.blocks):
            _record_block(index, block)
        own = current_traceparent()
    span.end(_nanoseconds(result.finished_at))
    return own or traceparent


def _held_to(result: Result) -> dict[str, AttributeValue]:
    """The limits and the budget policy of a trajectory; the limit that ended it, if one did."""
    attributes: dict[str, AttributeValue] = {}
    if result.limit is not LimitKind.NONE:
        attributes[names.TRAJECTORY_LIMIT] = result.limit.name.lower()
    if (limits := result.ledger.limits) is not None:
        held = {
            names.LIMITS_MAX_TOKENS: limits.max_tokens,
            names.LIMITS_MAX_CRITICAL_TOKENS: limits.max_critical_tokens,
            names.LIMITS_MAX_BRANCH_TOKENS: limits.max_branch_tokens,
            names.LIMITS_MAX_BRANCHES: limits.max_branches,
            names.LIMITS_MAX_BLOCKS: limits.max_blocks,
        }
        attributes |= {name: value for name, value in held.items() if value is not None}
    if (budget := result.ledger.budget) is not None:
        attributes |= {
            names.BUDGET_SHARE: budget.share.name.lower(),
            names.BUDGET_ON_EXHAUSTED: budget.on_exhausted.name.lower(),
            names.BUDGET_TAKEAWAY_RESERVE_TOKENS: budget.takeaway_reserve_tokens,
            names.BUDGET_EARLY_STOP_QUORUM: budget.early_stop.quorum,
            names.BUDGET_EARLY_STOP_STRAGGLER_FACTOR: budget.early_stop.straggler_factor,
            names.BUDGET_EARLY_STOP_MIN_MEAN_LOG_PROB: budget.early_stop.min_mean_log_prob,
        }
    return attributes


def _record_block(index: int, block: BlockReport) -> None:
    span = tracer().start_span(names.SPAN_BLOCK, start_time=_nanoseconds(block.started_at))
    span.set_attributes(
        {
            names.BLOCK_INDEX: index,
            names.BRANCH_COUNT: len(block.branches),
            names.BLOCK_CRITICAL_PATH_TOKENS: block.critical_path_tokens,
        }
    )
    with trace.use_span(span, end_on_exit=False):
        for number, branch in enumerate(block.branches):
            attributes: dict[str, AttributeValue] = {
                names.BRANCH_INDEX: number,
                names.BRANCH_COUNT: len(block.branches),
                names.BRANCH_BUDGET_TOKENS: branch.budget_tokens,
                names.BRANCH_USED_TOKENS: branch.used_tokens,
                names.BRANCH_STOP_REASON: branch.stop.name.lower(),
            }
            child = tracer().start_span(
                names.SPAN_BRANCH, attributes=attributes, start_time=_nanoseconds(branch.started_at)
            )
            child.end(_nanoseconds(branch.finished_at))
    span.end(_nanoseconds(block.finished_at))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
