"""The structural filter, and what enters a batch of PAPO and DAPO."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from npr.buffer.v1 import buffer_pb2
from npr.types.v1 import sampling_pb2, trajectory_pb2
from npr_common.dialects import load_dialect
from npr_learner.filters import Defect, StructuralFilter, is_usable
from npr_learner.options import Malformed, StageOptions
from npr_learner.reinforcement import select_by_accuracy, select_by_reward
from npr_learner.testing import World

DIALECT = load_dialect("npr")
CORRECT, INCORRECT = trajectory_pb2.VERDICT_KIND_CORRECT, trajectory_pb2.VERDICT_KIND_INCORRECT


def no_block(world: World) -> trajectory_pb2.Trajectory:
    visibility = sampling_pb2.VISIBILITY_PARALLEL
    pieces = [("alpha \\boxed{7}<|end|>", False)]
    return world.trajectory(np.random.default_rng(0), "g", 0, pieces, visibility=visibility)


def spelled(world: World) -> trajectory_pb2.Trajectory:
    """Well-formed to read, but one tag is spelled in ordinary tokens."""
    trajectory = world.parallel(np.random.default_rng(0), "g", 0, branches=2)
    ids = list(trajectory.token_ids)
    place = ids.index(world.encode("<plan>")[0])
    vocabulary = world.tokenizer.get_vocab()
    ids[place : place + 1] = [vocabulary["<"], vocabulary["plan"], vocabulary[">"]]
    del trajectory.token_ids[:]
    trajectory.token_ids.extend(ids)
    return trajectory


def unclosed(world: World) -> trajectory_pb2.Trajectory:
    trajectory = world.parallel(np.random.default_rng(0), "g", 0, branches=2)
    del trajectory.token_ids[-12:]
    return trajectory


def well_formed(world: World, **changes: Any) -> trajectory_pb2.Trajectory:
    trajectory = world.parallel(np.random.default_rng(0), "g", 0, branches=2)
    trajectory.MergeFrom(trajectory_pb2.Trajectory(**changes))
    return trajectory


CASES: dict[str, tuple[Callable[[World], trajectory_pb2.Trajectory], Defect | None]] = {
    "well_formed": (well_formed, None),
    "no_block": (no_block, Defect.NO_BLOCK),
    "spelled": (spelled, Defect.SPELLED_TAG),
    "unclosed": (unclosed, Defect.MALFORMED),
    "cut": (lambda world: well_formed(world, branch_truncated=True), Defect.BRANCH_TRUNCATED),
    "serialized": (lambda world: well_formed(world, serialized_blocks=1), Defect.SERIALIZED),
    "truncated": (lambda world: well_formed(world, outcome=trajectory_pb2.OUTCOME_TRUNCATED), Defect.NOT_COMPLETED),
}


@pytest.mark.parametrize("name", CASES)
def test_structural_filter_names_the_defect(world: World, name: str) -> None:
    make, defect = CASES[name]
    structural = StructuralFilter(world.tokenizer, DIALECT, world.tags)
    assert structural.defect(make(world)) is defect


@pytest.mark.parametrize(
    ("changes", "verdict", "usable"),
    [
        ({}, CORRECT, True),
        ({}, INCORRECT, True),
        ({}, trajectory_pb2.VERDICT_KIND_UNSCORABLE, False),
        ({}, trajectory_pb2.VERDICT_KIND_UNSPECIFIED, False),
        ({"outcome": trajectory_pb2.OUTCOME_ABORTED}, CORRECT, False),
        ({"outcome": trajectory_pb2.OUTCOME_DEADLINE}, CORRECT, False),
        ({"outcome": trajectory_pb2.OUTCOME_REFUSED}, CORRECT, False),
        ({"malformed_reason": trajectory_pb2.MALFORMED_REASON_KV_POOL}, INCORRECT, False),
    ],
)
def test_only_what_was_decoded_and_judged_is_usable(
    world: World, changes: dict[str, Any], verdict: "trajectory_pb2.VerdictKind.ValueType", usable: bool
) -> None:
    scored = trajectory_pb2.ScoredTrajectory(
        trajectory=well_formed(world, **changes), score=trajectory_pb2.Score(verdict=verdict)
    )
    assert is_usable(scored) is usable


def group_of(*scored: trajectory_pb2.ScoredTrajectory, max_tokens: int = 0) -> buffer_pb2.ReadGroupsResponse:
    limits = sampling_pb2.Limits(max_tokens=max_tokens)
    group = buffer_pb2.Group(group_id="g", decoding=sampling_pb2.DecodingSpec(limits=limits))
    return buffer_pb2.ReadGroupsResponse(group=group, trajectories=scored)


def scored_as(
    trajectory: trajectory_pb2.Trajectory, verdict: "trajectory_pb2.VerdictKind.ValueType", reward: float = 0.0
) -> trajectory_pb2.ScoredTrajectory:
    return trajectory_pb2.ScoredTrajectory(
        trajectory=trajectory, score=trajectory_pb2.Score(verdict=verdict, reward=reward)
    )


@pytest.mark.parametrize("malformed", list(Malformed))
def test_papo_drops_the_malformed_or_counts_them_as_incorrect(world: World, malformed: Malformed) -> None:
    structural = StructuralFilter(world.tokenizer, DIALECT, world.tags)
    group = group_of(
        scored_as(well_formed(world), CORRECT, reward=0.25),
        scored_as(well_formed(world), INCORRECT),
        scored_as(no_block(world), CORRECT),
        scored_as(well_formed(world, serialized_blocks=1), CORRECT),
        scored_as(well_formed(world), trajectory_pb2.VERDICT_KIND_UNSCORABLE),
    )
    selection = select_by_accuracy([group], structural, malformed)
    expected = [1.0, -1.0] if malformed is Malformed.DROP else [1.0, -1.0, -1.0]
    assert [response.reward for response in selection.kept] == expected
    metrics = selection.metrics()
    assert metrics["kept_fraction"] == len(expected) / 5
    assert metrics["malformed_rate"] == 2 / 4
    assert metrics["accuracy"] == 3 / 4


def test_dapo_takes_the_buffers_reward_less_the_overlong_penalty(world: World) -> None:
    trajectory = well_formed(world)
    length = len(trajectory.token_ids) - trajectory.prompt_length
    options = StageOptions(learning_rate=1.0, overlong_buffer_tokens=10, overlong_penalty=0.5)
    group = group_of(scored_as(trajectory, CORRECT, reward=1.0), max_tokens=length + 5)
    kept = select_by_reward([group], options).kept
    assert [response.reward for response in kept] == [pytest.approx(1.0 - 0.5 * 5 / 10)]
