"""A trajectory as it is trained on.

Invariants:
- A row is a trajectory's own token ids; nothing is re-tokenised on the way.
- Trained tokens are those that the engine sampled: no prompt, no forced token, and no seam, whose predecessor in the
  list is not the one that the engine drew it after.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from npr.types.v1 import sampling_pb2, trajectory_pb2
from npr_common.errors import DataLossError
from npr_common.tags import TagIds
from npr_common.topology import Topology, topology

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """One sequence to train on.

    Attributes:
        token_ids: int64 [S], prompt and response in canonical order.
        topology: its positions and visibility.
        trained: int64 [N], indices of the tokens that carry loss, increasing.
        behavior_log_probs: float32 [N], what the engine drew each of them with; zeros where there was no engine.
        advantage: of every trained token; fine-tuning doesn't look at it.
        temperature: at which the engine drew the tokens; the policy that is trained is the one at this temperature.
    """

    token_ids: IntArray
    topology: Topology
    trained: IntArray
    behavior_log_probs: npt.NDArray[np.float32]
    advantage: float = 1.0
    temperature: float = 1.0

    def __len__(self) -> int:
        return len(self.token_ids)


def make_row(
    token_ids: Sequence[int],
    forced: Sequence[bool],
    behavior_log_probs: Sequence[float] | None,
    tags: TagIds | None,
    advantage: float = 1.0,
) -> Row:
    """A row of a prompt and its response.

    Args:
        token_ids: S ids, prompt first.
        forced: one flag a response token; the prompt is what comes before.
        behavior_log_probs: one a response token, or None.
        tags: for parallel visibility, the tags' ids; None for plain causal visibility.
        advantage: of the response.
    """
    ids = np.asarray(token_ids, np.int64)
    start = len(ids) - len(forced)
    tree = topology(ids, start, tags) if tags is not None else Topology.causal(len(ids), start)
    sampled = ~np.asarray(forced, np.bool_) & ~tree.seams[start:]
    trained = np.flatnonzero(sampled)
    drawn = np.zeros(len(forced)) if behavior_log_probs is None else np.asarray(behavior_log_probs)
    return Row(ids, tree, trained + start, drawn[trained].astype(np.float32), advantage)


def row_of_trajectory(
    trajectory: trajectory_pb2.Trajectory, tags: TagIds | None, vocabulary_size: int, advantage: float = 1.0
) -> Row:
    """A trajectory as the engine made it. `tags` are needed where its visibility is parallel.

    Raises:
        DataLossError: its fields contradict each other, or its ids are not this vocabulary's.
    """
    length = len(trajectory.token_ids) - trajectory.prompt_length
    if not len(trajectory.forced) == len(trajectory.behavior_log_probs) == length:
        raise DataLossError(
            f"trajectory {trajectory.trajectory_id} has {length} response tokens, {len(trajectory.forced)} flags and "
            f"{len(trajectory.behavior_log_probs)} log-probabilities: discard its group and roll it out again"
        )
    if max(trajectory.token_ids, default=0) >= vocabulary_size:
        raise DataLossError(
            f"trajectory {trajectory.trajectory_id} has ids outside of the {vocabulary_size} of the model"
        )
    parallel = trajectory.visibility == sampling_pb2.VISIBILITY_PARALLEL
    return make_row(
        trajectory.token_ids,
        trajectory.forced,
        trajectory.behavior_log_probs,
        tags if parallel else None,
        advantage,
    )
