"""What every backend must do, on the same trees: the engine of this process, and the one on an SGLang server.

The server runs where `NPR_SGLANG_PYTHON` names a Python with SGLang and the plug-in; elsewhere its half is skipped.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from npr_common.tags import Role
from npr_common.topology import topology
from npr_rollout.engine.config import EngineConfig
from npr_rollout.record.outcomes import BranchStop, Outcome
from npr_rollout.record.request import FinishedEvent, Limits, Request, SamplingParams
from npr_rollout.sglang.transport import Transport
from npr_rollout.testing.conformance import (
    GREEDY,
    POOL_TOKENS,
    SECONDS,
    TOKENIZER,
    TOLERANCE,
    Make,
    check_against_reference,
    check_idle,
    in_process,
    on_server,
    requests_of,
    run,
    scripts_of,
    without_words,
)
from npr_rollout.testing.trees import TreeMaker


@pytest.fixture(params=["torch", pytest.param("sglang", marks=pytest.mark.sglang)])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "torch":
        return in_process(EngineConfig(page_size=4, pages=POOL_TOKENS // 4, audit_every_step=True))
    return on_server(request.getfixturevalue("server"))


@pytest.mark.parametrize("seed", range(5))
def test_random_trees_equal_one_forward_pass(make: Make, seed: int) -> None:
    """Forty at once in a pool that holds about fifteen: evictions and retractions change nothing."""
    maker = TreeMaker(TOKENIZER, seed)
    trees = {f"{seed}.{i}": maker.tree() for i in range(40)}
    engine = make(scripts_of(trees, maker))
    results = run(engine, requests_of(trees))
    for name, tree in trees.items():
        assert (results[name].outcome, results[name].token_ids) == (Outcome.COMPLETED, tree.token_ids)
        check_against_reference(results[name], maker.tags)
    check_idle(engine)


def test_trees_of_another_dialect(make: Make) -> None:
    """Multiverse's tags: each block is wrapped, and its steps have other names."""
    maker = TreeMaker(TOKENIZER, 5, "multiverse")
    trees = {f"m{i}": maker.tree() for i in range(12)}
    engine = make(scripts_of(trees, maker), "multiverse")
    results = run(engine, requests_of(trees))
    for name, tree in trees.items():
        assert (results[name].outcome, results[name].token_ids) == (Outcome.COMPLETED, tree.token_ids)
        assert results[name].ledger.blocks
        check_against_reference(results[name], maker.tags)
    check_idle(engine)


def test_greedy_words_in_given_trees_are_the_likeliest(make: Make) -> None:
    """The structure is given, the words are the model's own."""
    maker = TreeMaker(TOKENIZER, 77)
    trees = {f"g{i}": maker.tree() for i in range(20)}
    scripts = without_words(scripts_of(trees, maker), maker)
    engine = make(scripts)
    results = run(engine, requests_of(trees))
    free = 0
    for name, result in results.items():
        tree_places = topology(result.token_ids, result.prompt_length, maker.tags)
        places = zip(tree_places.positions.tolist(), tree_places.branch_of.tolist(), strict=True)
        own = {i for i, place in enumerate(places) if i >= result.prompt_length and place not in scripts[name].tokens}
        free += len(own)
        check_against_reference(result, maker.tags, greedy=own)
    assert free > 200
    check_idle(engine)


def test_branches_that_use_up_their_budget_are_joined(make: Make) -> None:
    """They end by length, not by a token: a server that is to seal them must not end them a step before."""
    maker = TreeMaker(TOKENIZER, 41)
    trees = {f"b{i}": maker.tree(blocks=1, branches=6, longest=40) for i in range(8)}
    engine = make(scripts_of(trees, maker))
    limits = Limits(max_tokens=300, max_branch_tokens=24)
    results = run(engine, [replace(request, limits=limits) for request in requests_of(trees)])
    assert results.keys() == trees.keys()
    stops = [branch.stop for result in results.values() for branch in result.ledger.blocks[0].branches]
    assert set(stops) == {BranchStop.CLOSED, BranchStop.BUDGET}
    for result in results.values():
        assert maker.tags.open(Role.TAKEAWAY) in result.token_ids
        check_against_reference(result, maker.tags)
    check_idle(engine)


SAMPLINGS = [
    SamplingParams(temperature=1.0, seed=5, raw_log_probs=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=6, raw_log_probs=True),
    SamplingParams(temperature=1.2, min_p=0.05, repetition_penalty=1.3, seed=7, raw_log_probs=True),
]


@pytest.mark.sglang
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_are_the_same_on_both(server: Transport, sampling: SamplingParams) -> None:
    """Equal seeds draw equal tokens, with equal log-probabilities, up to draws on the very edge of a token."""
    maker = TreeMaker(TOKENIZER, 31)
    trees = {f"s{i}": maker.tree() for i in range(30)}
    scripts = without_words(scripts_of(trees, maker), maker)
    here = in_process(EngineConfig(page_size=4, pages=4000))(scripts)
    there = on_server(server)(scripts)
    ours, theirs = run(here, requests_of(trees, sampling)), run(there, requests_of(trees, sampling))
    same = [name for name in trees if ours[name].token_ids == theirs[name].token_ids]
    assert len(same) >= 28
    for name in same:
        assert ours[name].outcome is theirs[name].outcome
        assert theirs[name].log_probs == pytest.approx(ours[name].log_probs, abs=TOLERANCE)
        assert theirs[name].raw_log_probs == pytest.approx(ours[name].raw_log_probs, abs=TOLERANCE)
    check_idle(there)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_aborts_at_any_moment_leave_nothing_behind(make: Make, steps: int) -> None:
    maker = TreeMaker(TOKENIZER, steps)
    trees = {f"a{steps}.{i}": maker.tree(blocks=2) for i in range(6)}
    engine = make(scripts_of(trees, maker))
    for request in requests_of(trees):
        engine.submit(request)
    ended = {}
    for _ in range(steps):
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                ended[event.result.request_id] = event.result
    for name in list(trees)[:4]:
        assert engine.abort(name) == (name not in ended)
    end = time.monotonic() + SECONDS
    while not engine.idle and time.monotonic() < end:
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                ended[event.result.request_id] = event.result
    for event in engine.step():
        if isinstance(event, FinishedEvent):
            ended[event.result.request_id] = event.result
    assert ended.keys() == trees.keys()
    for name in list(trees)[4:]:
        assert ended[name].token_ids == trees[name].token_ids
    assert {ended[name].outcome for name in list(trees)[:4]} <= {Outcome.ABORTED, Outcome.COMPLETED}
    check_idle(engine)


def test_budgets_and_deadlines_end_typed(make: Make) -> None:
    maker = TreeMaker(TOKENIZER, 3)
    tree = maker.tree(blocks=1, branches=4, longest=12)
    trees = dict.fromkeys(("short", "late", "tight"), tree)
    engine = make(scripts_of(trees, maker))
    results = run(
        engine,
        [
            Request("short", tree.prompt, GREEDY, Limits(max_branch_tokens=12)),
            Request("late", tree.prompt, GREEDY, deadline=time.monotonic() - 1),
            Request("tight", tree.prompt, GREEDY, Limits(max_tokens=3)),
        ],
    )
    assert results["late"].outcome is Outcome.DEADLINE
    assert results["tight"].outcome is Outcome.TRUNCATED
    assert results["tight"].ledger.total_tokens == 3
    blocks = results["short"].ledger.blocks
    assert all(branch.used_tokens <= 12 for block in blocks for branch in block.branches)
    check_idle(engine)


def test_what_never_fits_is_refused(make: Make) -> None:
    engine = make({})
    engine.submit(Request("huge", (5,) * 10, GREEDY, Limits(max_tokens=10 * POOL_TOKENS)))
    (event,) = engine.step()
    assert isinstance(event, FinishedEvent)
    assert event.result.outcome is Outcome.REFUSED
