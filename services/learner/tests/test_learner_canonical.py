"""Text becomes the tokens that the engine would have fed and sampled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npr.types.v1 import sampling_pb2
from npr_common.cues import Cue
from npr_common.dialects import load_dialect
from npr_common.schema import parse_text
from npr_common.topology import topology
from npr_learner.canonical import ResponseEncoder, canonical_pieces
from npr_learner.fine_tuning import plan_updates
from npr_learner.options import StageOptions
from npr_learner.testing import World

DIALECT = load_dialect("npr")
SPACE = st.text(" \n", max_size=3)


def written(spaces: list[str], steps: int) -> str:
    """A block whose white space before, between and after its steps is `spaces`, in turn."""
    take = iter(spaces * 10)
    plans = "".join(f"<plan>{i}: alpha</plan>" for i in range(1, steps + 1))
    body = "".join(f"{next(take)}<step>{next(take)}{i}: beta{i}</step>" for i in range(1, steps + 1))
    return f"alpha<guideline>{plans}</guideline>{body}{next(take)}<takeaway>gamma</takeaway>\n\\boxed{{7}}"


@given(st.lists(SPACE, min_size=1, max_size=8), st.integers(1, 4))
def test_separators_become_the_engines_whatever_they_were(spaces: list[str], steps: int) -> None:
    pieces = canonical_pieces(written(spaces, steps), DIALECT)
    assert pieces == canonical_pieces(written([""], steps), DIALECT)
    assert pieces is not None
    assert [piece.text for piece in pieces if isinstance(piece, Cue)] == [
        *(f"\n<step>{i}:" for i in range(1, steps + 1)),
        "\n<takeaway>",
    ]
    joined = "".join(piece.text if isinstance(piece, Cue) else piece for piece in pieces)
    assert parse_text(joined, DIALECT).well_formed


@pytest.mark.parametrize("text", ["\\boxed{7}", "<guideline><plan>1: a</plan></guideline>", "<step>1: a</step>"])
def test_what_is_malformed_or_holds_no_block_is_refused(text: str) -> None:
    assert canonical_pieces(text, DIALECT) is None


def test_encoded_text_equals_what_the_engine_made(world: World) -> None:
    """An engine's trajectory, written as text and encoded again, has the engine's ids and forced flags."""
    encoder = ResponseEncoder(world.tokenizer, DIALECT, parallel=True)
    for seed in range(20):
        trajectory = world.parallel(np.random.default_rng(seed), "g", 0)
        encoded = encoder.encode(trajectory.response_text)
        assert encoded is not None
        assert encoded.ids == list(trajectory.token_ids)[trajectory.prompt_length :]
        assert encoded.forced == list(trajectory.forced)
        tree = topology(encoded.ids, 0, world.tags)
        assert all(forced for forced, seam in zip(encoded.forced, tree.seams, strict=True) if seam)


def test_a_causal_stage_keeps_the_text_as_it_is(world: World) -> None:
    encoded = ResponseEncoder(world.tokenizer, DIALECT, parallel=False).encode("alpha \\boxed{7}<|end|>")
    assert encoded is not None
    assert world.tokenizer.decode(encoded.ids) == "alpha \\boxed{7}<|end|>"
    assert not any(encoded.forced)


def test_multiverse_blocks_get_their_own_cues() -> None:
    dialect = load_dialect("multiverse")
    text = (
        "<Parallel><Goal><Outline>1: a</Outline><Outline>2: b</Outline></Goal> <Path>1: c</Path> <Path>2: d</Path>"
        "<Conclusion>e</Conclusion></Parallel>f"
    )
    pieces = canonical_pieces(text, dialect)
    assert pieces is not None
    assert [piece.text for piece in pieces if isinstance(piece, Cue)] == ["\n<Path>1:", "\n<Path>2:", "\n<Conclusion>"]
    assert pieces[-1] == "e</Conclusion></Parallel>f"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120), st.integers(1, 3))
def test_every_row_is_in_one_update_an_epoch(lengths: list[int], capacity: int, epochs: int) -> None:
    options = StageOptions(learning_rate=1.0, tokens_per_update=capacity, epochs=epochs)
    plan = plan_updates(lengths, options)
    assert sorted(index for update in plan for index in update) == sorted([*range(len(lengths))] * epochs)
    assert all(len(update) == 1 or sum(lengths[i] for i in update) <= capacity for update in plan)
    assert plan == plan_updates(lengths, options)


def test_world_is_parallel(world: World) -> None:
    assert world.parallel(np.random.default_rng(0), "g", 0).visibility == sampling_pb2.VISIBILITY_PARALLEL
