"""Trajectories as rows, and rows as padded micro-batches of tensors.

Invariants:
- A row is a trajectory's own token ids; nothing is re-tokenised on the way.
- Trained tokens are those that the engine sampled: no prompt, no forced token, and no seam, whose predecessor in the
  list is not the one that the engine drew it after.
- Cutting a batch into micro-batches changes no number but rounding: rows don't see each other or the padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from npr.types.v1 import sampling_pb2, trajectory_pb2
from npr_common.errors import DataLossError
from npr_common.tags import TagIds
from npr_common.topology import Topology, mask_mod, stack_branch_arrays, topology

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


@dataclass(frozen=True)
class Batch:
    """Rows padded at the right to S tokens, and the N trained tokens of all of them, flat.

    Attributes:
        token_ids_BS: int64; padding is 0.
        positions_BS: int64, None where every row is plain causal.
        visible_B1SS: bool, true where the query (third axis) sees the key; None where every row is plain causal.
        sources_N: int64, index into the flattened [B * S] hidden states of the token before each trained one.
        targets_N: int64, the trained tokens.
        behavior_log_probs_N: float32.
        advantages_N: float64.
        temperatures_N: float32.
    """

    token_ids_BS: torch.Tensor
    positions_BS: torch.Tensor | None
    visible_B1SS: torch.Tensor | None
    sources_N: torch.Tensor
    targets_N: torch.Tensor
    behavior_log_probs_N: torch.Tensor
    advantages_N: torch.Tensor
    temperatures_N: torch.Tensor


def collate(rows: Sequence[Row], device: torch.device) -> Batch:
    """Pads rows into tensors on `device`. Plain causal rows need no mask: padding comes after all that is real."""
    width = max(map(len, rows))
    token_ids_BS = _pad([row.token_ids for row in rows], width)
    forked = any(row.topology.block_count for row in rows)
    counts_B = [len(row.trained) for row in rows]
    sources = [row.topology.predecessors[row.trained] + index * width for index, row in enumerate(rows)]
    return Batch(
        token_ids_BS=torch.from_numpy(token_ids_BS).to(device),
        positions_BS=_positions(rows, width).to(device) if forked else None,
        visible_B1SS=_visible([row.topology for row in rows], width, device) if forked else None,
        sources_N=torch.from_numpy(np.concatenate(sources)).to(device),
        targets_N=torch.from_numpy(np.concatenate([row.token_ids[row.trained] for row in rows])).to(device),
        behavior_log_probs_N=torch.from_numpy(np.concatenate([row.behavior_log_probs for row in rows])).to(device),
        advantages_N=_repeated([row.advantage for row in rows], counts_B, np.float64).to(device),
        temperatures_N=_repeated([row.temperature for row in rows], counts_B, np.float32).to(device),
    )


def micro_batches(rows: Sequence[Row], budget_tokens: int) -> list[list[Row]]:
    """Cuts rows into micro-batches of like lengths, longest first, each of at most `budget_tokens` with its padding.

    A row longer than the budget gets a micro-batch of its own. Longest first: memory runs out at once or never.
    """
    batches: list[list[Row]] = []
    room = 0
    for row in sorted(rows, key=len, reverse=True):
        if room == 0:
            batches.append([])
            room = max(1, budget_tokens // max(1, len(row)))
        batches[-1].append(row)
        room -= 1
    return batches


def _pad(arrays: Sequence[IntArray], width: int) -> IntArray:
    padded = np.zeros((len(arrays), width), np.int64)
    for index, array in enumerate(arrays):
        padded[index, : len(array)] = array
    return padded


def _repeated(values_B: Sequence[float], counts_B: Sequence[int], dtype: npt.DTypeLike) -> torch.Tensor:
    return torch.from_numpy(np.repeat(np.asarray(values_B, dtype), counts_B))


def _positions(rows: Sequence[Row], width: int) -> torch.Tensor:
    return torch.from_numpy(_pad([row.topology.positions for row in rows], width))


def _visible(topologies: Sequence[Topology], width: int, device: torch.device) -> torch.Tensor:
    """The dense mask, bool [B, 1, S, S]."""
    arrays = stack_branch_arrays(topologies, width)
    visible = mask_mod(torch.from_numpy(arrays.block).to(device), torch.from_numpy(arrays.branch).to(device))
    b = torch.arange(len(topologies), device=device)[:, None, None]
    q = torch.arange(width, device=device)[:, None]
    return visible(b, torch.zeros_like(b), q, q.T)[:, None]
