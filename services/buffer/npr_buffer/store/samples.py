"""The few numbers of a scored trajectory by which groups are chosen, kept beside it: a listing reads no tokens."""

from npr.buffer.v1 import buffer_pb2
from npr.types.v1 import trajectory_pb2


def summary_of(scored: trajectory_pb2.ScoredTrajectory) -> buffer_pb2.SampleSummary:
    """The summary, a pure function of the trajectory and its score."""
    trajectory, score = scored.trajectory, scored.score
    ledger = trajectory.ledger
    return buffer_pb2.SampleSummary(
        sample_index=trajectory.sample_index,
        verdict=score.verdict,
        reward=score.reward,
        format_penalty=score.format_penalty,
        outcome=trajectory.outcome,
        total_tokens=ledger.total_tokens,
        critical_path_tokens=ledger.critical_path_tokens,
        forked_blocks=len(ledger.blocks),
        branches=sum(len(block.branches) for block in ledger.blocks),
        serialized_blocks=trajectory.serialized_blocks,
        branch_truncated=trajectory.branch_truncated,
    )
