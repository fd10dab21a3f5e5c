"""From a trajectory's record to the immutable result, in canonical order."""

from __future__ import annotations

import time

from npr_rollout.record.outcomes import LimitKind, MalformedReason, Outcome
from npr_rollout.record.request import LedgerReport, Request, Result
from npr_rollout.record.trajectory import Trajectory


def make_result(
    trajectory: Trajectory,
    policy_version: int,
    *,
    outcome: Outcome,
    reason: MalformedReason,
    limit: LimitKind,
    message: str,
) -> Result:
    """The result of a trajectory that has ended."""
    spans = list(trajectory.spans())
    now = time.time()
    return Result(
        request_id=trajectory.request.request_id,
        token_ids=tuple(token for span in spans for token in span.tokens),
        prompt_length=trajectory.prompt_length,
        log_probs=tuple(value for span in spans for value in span.log_probs),
        forced=tuple(flag for span in spans for flag in span.forced),
        policy_version=policy_version,
        visibility=trajectory.request.visibility,
        outcome=outcome,
        malformed_reason=reason or trajectory.serialized_reason,
        limit=limit,
        branch_truncated=trajectory.branch_truncated,
        serialized_blocks=trajectory.serialized_blocks,
        ledger=_report(trajectory, now),
        started_at=trajectory.started_at or now,
        finished_at=now,
        message=message,
        raw_log_probs=tuple(value for span in spans for value in span.raw_log_probs),
        textual_joins=trajectory.textual_joins,
    )


def refused(request: Request, policy_version: int, message: str) -> Result:
    """The result of a request that can never fit: its prompt alone."""
    now = time.time()
    return Result(
        request_id=request.request_id,
        token_ids=request.prompt_ids,
        prompt_length=len(request.prompt_ids),
        log_probs=(),
        forced=(),
        policy_version=policy_version,
        visibility=request.visibility,
        outcome=Outcome.REFUSED,
        started_at=now,
        finished_at=now,
        message=message,
    )


def _report(trajectory: Trajectory, now: float) -> LedgerReport:
    block = trajectory.open_block
    if block is not None:
        block.finished_at = now
    return LedgerReport(
        total_tokens=trajectory.ledger.total,
        critical_path_tokens=trajectory.critical + (block.longest if block is not None else 0),
        forced_tokens=trajectory.ledger.forced,
        engine_steps=trajectory.engine_steps,
        peak_pages=trajectory.peak_pages,
        preemptions=trajectory.preemptions,
        blocks=tuple(block.report() for block in trajectory.blocks()),
        limits=trajectory.ledger.limits.report(),
        budget=trajectory.request.budget,
    )
