"""What a request tells the plug-in: there and back, and what is not sound."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from npr_sglang.contract import Block, Context, ContractError, Params

CONTEXT = Context((Block(3, (2, 4)), Block(2, (1, 1, 5))))
TOKENS = list(range(100, 100 + CONTEXT.length + 4))


def test_params_travel_as_json() -> None:
    params = Params(
        CONTEXT, key=2**64 - 1, branch=3, penalty=1.2, said=2, seal=True, raw_log_probs=True, script=(5, -1)
    )
    assert Params.from_dict(json.loads(json.dumps(params.to_dict())), len(TOKENS)) == params
    assert Params.from_dict({}, 1) == Params()


def test_positions_lie_below_places_by_what_branches_overlap() -> None:
    """SPEC section 2: what follows a block starts behind its longest branch."""
    assert CONTEXT.length == 3 + 6 + 2 + 7
    assert CONTEXT.hidden == (6 - 4) + (7 - 5)
    assert (Context().length, Context().hidden) == (0, 0)


def test_each_branch_is_cached_behind_the_trunk_before_it() -> None:
    parts = CONTEXT.parts(TOKENS, "salt")
    assert [part.trunk for part in parts] == [3, 3, 2, 2, 2]
    assert [list(part.tokens) for part in parts] == [
        [100, 101, 102, 103, 104],
        [100, 101, 102, 105, 106, 107, 108],
        [109, 110, 111],
        [109, 110, 112],
        [109, 110, 113, 114, 115, 116, 117],
    ]
    assert all(isinstance(part.tokens, array) for part in parts)
    first, later = {part.namespace for part in parts[:2]}, {part.namespace for part in parts[2:]}
    assert (first, len(later)) == ({"salt"}, 1)


def test_a_namespace_depends_on_all_that_is_before_it() -> None:
    names = {
        CONTEXT.namespace(TOKENS, 1, ""),
        CONTEXT.namespace(TOKENS, 2, ""),
        CONTEXT.namespace(TOKENS, 1, "salt"),
        CONTEXT.namespace([*TOKENS[:8], 0, *TOKENS[9:]], 1, ""),
        Context((Block(3, (4, 2)), CONTEXT.blocks[1])).namespace(TOKENS, 1, ""),
    }
    assert len(names) == 5
    assert CONTEXT.namespace([*TOKENS[:9], 0, *TOKENS[10:]], 1, "") == CONTEXT.namespace(TOKENS, 1, "")


@pytest.mark.parametrize(
    "raw",
    [
        [],
        "text",
        {"unknown": 1},
        {"context": {}},
        {"context": [[3]]},
        {"context": [[3, []]]},
        {"context": [[0, [1]]]},
        {"context": [[3, [0]]]},
        {"context": [[3, [1.5]]]},
        {"context": [[30, [1]]]},
        {"context": [[10, [5, 5]]]},
        {"key": -1},
        {"key": 2**64},
        {"key": "ten"},
        {"branch": -2},
        {"branch": True},
        {"penalty": 0},
        {"penalty": float("nan")},
        {"penalty": float("inf")},
        {"penalty": "1"},
        {"said": 21},
        {"script": 5},
        {"script": [-2]},
        {"script": ["a"]},
    ],
)
def test_what_is_not_sound_is_named(raw: Any) -> None:
    with pytest.raises(ContractError):
        Params.from_dict(raw, 20)
