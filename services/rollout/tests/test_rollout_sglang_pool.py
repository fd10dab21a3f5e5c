"""A server whose pool is too small for the load: what it takes away is computed again, and nothing is lost or held."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from npr_rollout.backend import DecodingEngine
from npr_rollout.record.outcomes import MalformedReason, Outcome
from npr_rollout.record.request import FinishedEvent, Limits, Request, Result
from npr_rollout.record.script import Script
from npr_rollout.sglang.engine import SglangEngine
from npr_rollout.sglang.transport import Transport
from npr_rollout.testing.conformance import (
    GREEDY,
    POOL_TOKENS,
    SECONDS,
    TOKENIZER,
    check_against_reference,
    check_idle,
    on_server,
    requests_of,
    run,
    scripts_of,
)
from npr_rollout.testing.trees import Tree, TreeMaker

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def test_running_streams_are_retracted_and_go_on(server: Transport) -> None:
    """Twelve trajectories that no one has expected to grow: together they need two pools."""
    maker = TreeMaker(TOKENIZER, 11)
    trees = {f"r{i}": uneven(maker, longest=460) for i in range(12)}
    engine = on_server(server)(scripts_of(trees, maker))
    results = run(
        engine,
        [Request(name, tree.prompt, GREEDY, Limits(max_tokens=len(tree.token_ids))) for name, tree in trees.items()],
    )
    assert sum(len(tree.token_ids) for tree in trees.values()) > 2 * POOL_TOKENS
    assert sum(result.ledger.preemptions for result in results.values()) > 0
    for name, tree in trees.items():
        assert (results[name].outcome, results[name].token_ids) == (Outcome.COMPLETED, tree.token_ids)
        check_against_reference(results[name], maker.tags)
    assert engine.status().preemptions == sum(result.ledger.preemptions for result in results.values())
    check_idle(engine)


def test_a_branch_that_is_evicted_before_its_join_is_computed_again(server: Transport) -> None:
    """One branch is long, the others have ended and are held by nobody; then long prompts need their room."""
    maker = TreeMaker(TOKENIZER, 12)
    tree = uneven(maker, longest=300)
    engine = on_server(server)({"waits": Script.of(tree.token_ids, tree.prompt_length, maker.tags)})
    engine.submit(Request("waits", tree.prompt, GREEDY, Limits(max_tokens=420)))
    step_until(engine, lambda: engine.status().tokens > 60)
    for index in range(3):
        prompt = tuple(maker.words(430)[:850])
        engine.submit(Request(f"fills{index}", prompt, GREEDY, Limits(max_tokens=150)))
    results = run(engine, [])
    assert engine.status().evictions > 0
    assert results["waits"].token_ids == tree.token_ids
    check_against_reference(results["waits"], maker.tags)
    assert results.keys() == {"waits", "fills0", "fills1", "fills2"}
    check_idle(engine)


def test_a_fork_that_never_fits_is_refused(server: Transport) -> None:
    maker = TreeMaker(TOKENIZER, 13)
    tree = maker.tree(blocks=1, branches=8, longest=4)
    engine = on_server(server)({"tight": Script.of(tree.token_ids, tree.prompt_length, maker.tags)})
    assert isinstance(engine, SglangEngine)
    limits, _ = engine.limits.resolve(Request("tight", tree.prompt, GREEDY))
    fits = min(engine.limits.pool_tokens, engine.limits.input_tokens) - len(tree.prompt) - 4
    assert limits.max_tokens < fits
    (result,) = run(engine, [Request("tight", tree.prompt, GREEDY, Limits(max_tokens=fits))]).values()
    assert (result.outcome, result.malformed_reason) == (Outcome.MALFORMED, MalformedReason.KV_POOL)
    check_idle(engine)


@pytest.mark.parametrize("moment", [1, 3, 6, 10, 20])
def test_aborts_while_the_pool_is_full_leave_nothing_behind(server: Transport, moment: int) -> None:
    """Whatever the server is doing to a request then: it waits, runs, was retracted, or is sealed again."""
    maker = TreeMaker(TOKENIZER, 20 + moment)
    trees = {f"f{moment}.{i}": maker.tree(blocks=2, branches=6, longest=60) for i in range(20)}
    engine = on_server(server)(scripts_of(trees, maker))
    for request in requests_of(trees):
        engine.submit(request)
    ended = {}
    for _ in range(10 * moment):
        ended |= results_of(engine)
    for name in list(trees)[::2]:
        engine.abort(name)
    ended |= run(engine, [])
    assert ended.keys() == trees.keys()
    for name in list(trees)[1::2]:
        assert ended[name].token_ids == trees[name].token_ids
    check_idle(engine)


def uneven(maker: TreeMaker, longest: int) -> Tree:
    """A tree of four branches, the last of which is much longer than the others."""
    return maker.lengthen(maker.tree(blocks=1, branches=4, longest=2), words=longest // 2, last_only=True)


def step_until(engine: DecodingEngine, condition: Callable[[], bool]) -> None:
    """Step until the condition holds."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        engine.step()


def results_of(engine: DecodingEngine) -> dict[str, Result]:
    """What ends in one step."""
    return {e.result.request_id: e.result for e in engine.step() if isinstance(e, FinishedEvent)}
