"""What a set of responses amounts to, from the buffer's summaries alone.

Definitions (SPEC sections 4 and 6), each a share of all responses or a mean over them:
- format pass: the reward service found nothing to penalise;
- malformed: what the structural filter of stage 3 would take out - a format failure, a response that didn't complete,
  a branch closed by force, a block that asked for a fork and didn't get one;
- parallel: at least one forked block; genuinely parallel: forked and not malformed;
- accurate: judged correct. An unscorable response counts as not correct, and is counted on its own.
"""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from npr.buffer.v1 import buffer_pb2
from npr.types.v1 import trajectory_pb2

Sample = buffer_pb2.SampleSummary


class Measures(BaseModel):
    """Rates in [0, 1]; tokens and branches are means over responses."""

    model_config = ConfigDict(frozen=True)

    responses: int
    unscorable: int
    accuracy: float
    format_pass_rate: float
    malformed_rate: float
    parallel_rate: float
    genuine_parallel_rate: float
    unfinished_rate: float
    mean_branches: float
    total_tokens: float
    critical_path_tokens: float
    reward_mean: float | None


def measure(samples: Sequence[Sample]) -> Measures:
    """The measures of some responses. Raises `ValueError` for none."""
    if not samples:
        raise ValueError("no response to measure")
    count = len(samples)
    scorable = [sample.reward for sample in samples if sample.verdict != trajectory_pb2.VERDICT_KIND_UNSCORABLE]
    return Measures(
        responses=count,
        unscorable=count - len(scorable),
        accuracy=sum(map(is_correct, samples)) / count,
        format_pass_rate=sum(sample.format_penalty == 0 for sample in samples) / count,
        malformed_rate=sum(map(is_malformed, samples)) / count,
        parallel_rate=sum(sample.forked_blocks > 0 for sample in samples) / count,
        genuine_parallel_rate=sum(sample.forked_blocks > 0 and not is_malformed(sample) for sample in samples) / count,
        unfinished_rate=sum(sample.outcome != trajectory_pb2.OUTCOME_COMPLETED for sample in samples) / count,
        mean_branches=sum(sample.branches for sample in samples) / count,
        total_tokens=sum(sample.total_tokens for sample in samples) / count,
        critical_path_tokens=sum(sample.critical_path_tokens for sample in samples) / count,
        reward_mean=sum(scorable) / len(scorable) if scorable else None,
    )


def is_correct(sample: Sample) -> bool:
    """Judged equal to the gold."""
    return sample.verdict == trajectory_pb2.VERDICT_KIND_CORRECT


def is_malformed(sample: Sample) -> bool:
    """Whether the structural filter would take the response out."""
    return (
        sample.format_penalty < 0
        or sample.outcome != trajectory_pb2.OUTCOME_COMPLETED
        or sample.branch_truncated
        or sample.serialized_blocks > 0
    )


def has_spread(group: buffer_pb2.GroupSummary) -> bool:
    """Whether a group's scorable rewards differ: without that no response of it has an advantage."""
    rewards = {sample.reward for sample in group.samples if sample.verdict != trajectory_pb2.VERDICT_KIND_UNSCORABLE}
    return len(rewards) > 1


def numbers(measures: Measures) -> dict[str, float]:
    """The measures as an event's metrics."""
    return {name: float(value) for name, value in measures.model_dump().items() if value is not None}
