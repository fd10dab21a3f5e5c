"""Between the contract's messages and the engine's types."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from npr.buffer.v1 import buffer_pb2
from npr.types.v1 import policy_pb2, prompt_pb2, sampling_pb2, trajectory_pb2
from npr_common.errors import InvalidArgumentError
from npr_rollout.record.outcomes import BranchShare, Exhaustion, ForkRefusal, Visibility
from npr_rollout.record.request import (
    BlockReport,
    BudgetPolicy,
    EarlyStop,
    LedgerReport,
    Limits,
    Request,
    Result,
    SamplingParams,
)

Choice = TypeVar("Choice", bound=IntEnum)


@dataclass(frozen=True)
class Decoding:
    """A `DecodingSpec` in the engine's terms."""

    sampling: SamplingParams
    limits: Limits
    visibility: Visibility
    fork_refusal: ForkRefusal
    budget: BudgetPolicy

    @classmethod
    def parse(cls, spec: sampling_pb2.DecodingSpec, *, default_refusal: ForkRefusal, seed_offset: int = 0) -> Decoding:
        """Read a spec; zeros mean defaults, as the contract says.

        Raises:
            InvalidArgumentError: the visibility is not set, or a choice is none that this service knows.
        """
        if spec.visibility == sampling_pb2.VISIBILITY_UNSPECIFIED:
            message = "Set decoding.visibility to SEQUENTIAL or PARALLEL."
            raise InvalidArgumentError(message, field_violations={"decoding.visibility": message})
        return cls(
            _sampling(spec.sampling, seed_offset),
            _limits(spec.limits),
            _choice(Visibility, spec.visibility, "visibility"),
            _choice(ForkRefusal, spec.fork_refusal or default_refusal.value, "fork_refusal"),
            _budget(spec.budget),
        )

    def request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        *,
        job: str = "",
        priority: int = 0,
        deadline: float | None = None,
        stream: bool = False,
    ) -> Request:
        """The engine's request."""
        return Request(
            request_id,
            tuple(prompt_ids),
            self.sampling,
            self.limits,
            self.visibility,
            self.fork_refusal,
            priority,
            deadline,
            stream,
            job,
            self.budget,
        )


@dataclass(frozen=True)
class Origin:
    """Where a trajectory belongs."""

    group_id: str
    sample_index: int
    prompt: prompt_pb2.Prompt

    @property
    def trajectory_id(self) -> str:
        """`<group_id>/<sample_index>`."""
        return f"{self.group_id}/{self.sample_index}"

    @classmethod
    def of(cls, group: buffer_pb2.Group, sample_index: int) -> Origin:
        """A sample of a group."""
        return cls(group.group_id, sample_index, group.prompt)


def trajectory_message(
    result: Result, origin: Origin, policy: policy_pb2.PolicyRef, tokenizer: Any, traceparent: str = ""
) -> trajectory_pb2.Trajectory:
    """The contract's trajectory: ids, log-probs, flags, version and accounts in one message.

    `tokenizer` may be None where there are no tokens: a request that was refused before its policy was loaded.
    """
    prompt, response = result.token_ids[: result.prompt_length], result.token_ids[result.prompt_length :]
    return trajectory_pb2.Trajectory(
        trajectory_id=origin.trajectory_id,
        group_id=origin.group_id,
        sample_index=origin.sample_index,
        prompt_id=origin.prompt.prompt_id,
        token_ids=result.token_ids,
        prompt_length=result.prompt_length,
        behavior_log_probs=result.log_probs,
        forced=result.forced,
        policy=policy,
        visibility=result.visibility.value,
        outcome=result.outcome.value,
        malformed_reason=result.malformed_reason.value,
        limit=result.limit.value,
        branch_truncated=result.branch_truncated,
        serialized_blocks=result.serialized_blocks,
        ledger=_ledger(result.ledger),
        response_text=_text(tokenizer, response, skip_special_tokens=True),
        started_at=timestamp(result.started_at),
        finished_at=timestamp(result.finished_at),
        message=result.message,
        traceparent=traceparent,
        metadata=dict(origin.prompt.metadata),
        prompt_text=_text(tokenizer, prompt, skip_special_tokens=False),
        raw_log_probs=result.raw_log_probs,
        textual_joins=result.textual_joins,
    )


def check_policy_ref(ref: policy_pb2.PolicyRef) -> None:
    """Raises InvalidArgumentError when a reference can't be one that a policy store has given."""
    if not (ref.line and ref.digest and ref.manifest_url):
        message = "Name the policy with its line, digest and manifest_url, as it was published."
        raise InvalidArgumentError(message, field_violations={"policy": message})


def _text(tokenizer: Any, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
    if not tokens:
        return ""
    text: str = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text


def timestamp(seconds: float) -> Timestamp:
    """Seconds since the epoch as a message."""
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp


def deadline_after(seconds: float | None) -> float | None:
    """A call's remaining time as the engine's deadline."""
    return None if seconds is None else time.monotonic() + seconds


def _sampling(message: sampling_pb2.Sampling, seed_offset: int) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        repetition_penalty=message.repetition_penalty or 1.0,
        seed=message.seed + seed_offset,
        min_p=message.min_p,
        raw_log_probs=message.raw_log_probs,
    )


def _limits(message: sampling_pb2.Limits) -> Limits:
    return Limits(
        max_tokens=message.max_tokens or None,
        max_critical_tokens=message.max_critical_tokens or None,
        max_branch_tokens=message.max_branch_tokens or None,
        max_branches=message.max_branches or None,
        max_blocks=message.max_blocks or None,
    )


def _budget(message: sampling_pb2.BudgetPolicy) -> BudgetPolicy:
    early = message.early_stop
    return BudgetPolicy(
        _choice(BranchShare, message.share or BranchShare.FIRST_COME, "budget.share"),
        _choice(Exhaustion, message.on_exhausted or Exhaustion.CLOSE, "budget.on_exhausted"),
        message.takeaway_reserve_tokens,
        EarlyStop(early.quorum, early.straggler_factor, early.min_mean_log_prob),
    )


def _choice(choices: type[Choice], number: int, name: str) -> Choice:
    """The choice with this number. Enums of the wire are open: a newer client may send one that is not known here."""
    try:
        return choices(number)
    except ValueError:
        known = ", ".join(choice.name for choice in choices)
        message = f"decoding.{name} is {number}; this service knows {known}."
        raise InvalidArgumentError(message, field_violations={f"decoding.{name}": message}) from None


def _limits_message(limits: Limits) -> sampling_pb2.Limits:
    return sampling_pb2.Limits(
        max_tokens=limits.max_tokens or 0,
        max_critical_tokens=limits.max_critical_tokens or 0,
        max_branch_tokens=limits.max_branch_tokens or 0,
        max_branches=limits.max_branches or 0,
        max_blocks=limits.max_blocks or 0,
    )


def _budget_message(budget: BudgetPolicy) -> sampling_pb2.BudgetPolicy:
    early = budget.early_stop
    return sampling_pb2.BudgetPolicy(
        share=budget.share.value,
        on_exhausted=budget.on_exhausted.value,
        takeaway_reserve_tokens=budget.takeaway_reserve_tokens,
        early_stop=sampling_pb2.EarlyStop(
            quorum=early.quorum,
            straggler_factor=early.straggler_factor,
            min_mean_log_prob=early.min_mean_log_prob,
        ),
    )


def _ledger(report: LedgerReport) -> trajectory_pb2.Ledger:
    return trajectory_pb2.Ledger(
        total_tokens=report.total_tokens,
        critical_path_tokens=report.critical_path_tokens,
        forced_tokens=report.forced_tokens,
        engine_steps=report.engine_steps,
        peak_pages=report.peak_pages,
        preemptions=report.preemptions,
        blocks=[_block(block) for block in report.blocks],
        limits=_limits_message(report.limits) if report.limits else None,
        budget=_budget_message(report.budget) if report.budget else None,
    )


def _block(report: BlockReport) -> trajectory_pb2.BlockLedger:
    branches = [
        trajectory_pb2.BranchLedger(
            budget_tokens=branch.budget_tokens,
            used_tokens=branch.used_tokens,
            forced_tokens=branch.forced_tokens,
            stop=branch.stop.value,
        )
        for branch in report.branches
    ]
    return trajectory_pb2.BlockLedger(branches=branches, critical_path_tokens=report.critical_path_tokens)
