"""What every backend must do, on the same trees: the engine of this process, and the one on an SGLang server.

The server runs where `NPR_SGLANG_PYTHON` names a Python with SGLang and the plug-in; elsewhere its half is skipped.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from npr_common.dialects import load_dialect
from npr_common.topology import topology
from npr_rollout.backend import DecodingEngine
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine, eos_ids
from npr_rollout.engine.sampling import RandomSampler, Samples
from npr_rollout.record.outcomes import Outcome
from npr_rollout.record.request import FinishedEvent, Limits, Request, Result, SamplingParams
from npr_rollout.record.script import Script
from npr_rollout.record.trajectory import Span
from npr_rollout.sglang.client import wait_until_healthy
from npr_rollout.sglang.engine import SglangEngine
from npr_rollout.sglang.limits import ServerLimits
from npr_rollout.sglang.server import SglangServer
from npr_rollout.sglang.settings import SglangSettings
from npr_rollout.sglang.transport import Transport
from npr_rollout.testing.models import tagged_tokenizer, tiny_model
from npr_rollout.testing.trees import Tree, TreeMaker

TOKENIZER = tagged_tokenizer()
DIALECT = load_dialect("npr")
MODEL = tiny_model("qwen3", TOKENIZER, 2)
EOS = eos_ids(MODEL, TOKENIZER)
TOLERANCE = 1e-4
POOL_TOKENS = 3072
SECONDS = 120.0
START_SECONDS = 240.0
GREEDY = SamplingParams(temperature=0.0, raw_log_probs=True)

Scripts = Mapping[str, Script]
Make = Callable[[Scripts], DecodingEngine]


@dataclass
class FollowingSampler:
    """Says what the scripts say, and draws where they say nothing."""

    scripts: Scripts

    def sample(self, logits: torch.Tensor, spans: Sequence[Span]) -> Samples:
        drawn = RandomSampler().sample(logits, spans)
        raw = logits.log_softmax(dim=-1)
        tokens, log_probs = list(drawn.tokens), list(drawn.log_probs)
        for row, span in enumerate(spans):
            script = self.scripts.get(span.owner.request.request_id)
            token = script.tokens.get((span.end, span.branch)) if script is not None else None
            if token is not None:
                tokens[row], log_probs[row] = token, float(raw[row, token])
        return Samples(tokens, log_probs, [float(raw[row, token]) for row, token in enumerate(tokens)])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transport]:
    python = os.environ.get("NPR_SGLANG_PYTHON")
    if python is None:
        pytest.skip("NPR_SGLANG_PYTHON names no Python with SGLang")
    folder: Path = tmp_path_factory.mktemp("model")
    copy.deepcopy(MODEL).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    settings = SglangSettings(
        python=python,
        device="cpu",
        attention_backend="torch_native",
        pool_tokens=POOL_TOKENS,
        input_tokens=POOL_TOKENS,
        stream_interval=4,
    )
    process = SglangServer(folder, MODEL.config.max_position_embeddings, "float32", settings)
    transport = Transport(process.url)
    try:
        transport.ask(lambda client: wait_until_healthy(client, lambda: process.is_alive, START_SECONDS))
        yield transport
    finally:
        transport.close()
        process.end()


@pytest.fixture(params=["torch", pytest.param("sglang", marks=pytest.mark.sglang)])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param == "torch":
        config = EngineConfig(page_size=4, pages=POOL_TOKENS // 4, audit_every_step=True)
        return lambda scripts: Engine(
            copy.deepcopy(MODEL), TOKENIZER, DIALECT, config, sampler=FollowingSampler(scripts)
        )
    return on_server(request.getfixturevalue("server"))


def on_server(server: Transport) -> Make:
    told = server.ask(lambda client: client.info())
    limits = ServerLimits(
        context=MODEL.config.max_position_embeddings,
        vocab_size=len(TOKENIZER),
        pool_tokens=int(told["max_total_num_tokens"]),
        input_tokens=int(told["max_req_input_len"]),
        max_running=64,
        max_branches=16,
        max_blocks=16,
    )
    return lambda scripts: SglangEngine(server, TOKENIZER, DIALECT, limits, eos=EOS, scripts=scripts)


def run(engine: DecodingEngine, requests: Sequence[Request]) -> dict[str, Result]:
    for request in requests:
        engine.submit(request)
    results: dict[str, Result] = {}
    end = time.monotonic() + SECONDS
    while not engine.idle:
        assert time.monotonic() < end
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                results[event.result.request_id] = event.result
    return results


def check_idle(engine: DecodingEngine) -> None:
    """Nothing runs, nothing is held, nothing is lost; a server may take a moment to end what was aborted."""
    end = time.monotonic() + SECONDS
    while engine.status().pages_used and time.monotonic() < end:
        engine.step()
    assert engine.status().pages_used == 0
    assert engine.audit() == ()


def reference(token_ids: Sequence[int], prompt_length: int) -> torch.Tensor:
    """Log-probabilities [S, V] by one forward pass under the dense mask, by the library's own eager attention."""
    maker_tags = TreeMaker(TOKENIZER).tags
    shape = topology(token_ids, prompt_length, maker_tags)
    visible = torch.from_numpy(shape.dense_mask())
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    model = copy.deepcopy(MODEL)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(token_ids)[None],
            position_ids=torch.tensor(shape.positions)[None],
            attention_mask=mask,
            use_cache=False,
        )
    return output.logits[0].log_softmax(dim=-1)


def check_against_reference(result: Result, *, greedy: set[int] | None = None) -> None:
    """Every sampled token's raw log-probability; and that those at the places `greedy` are the likeliest."""
    expected = reference(result.token_ids, result.prompt_length)
    tags = TreeMaker(TOKENIZER).tags
    predecessors = topology(result.token_ids, result.prompt_length, tags).predecessors
    for index, forced in enumerate(result.forced):
        place = index + result.prompt_length
        if forced:
            continue
        row = expected[predecessors[place]]
        assert abs(float(row[result.token_ids[place]]) - result.raw_log_probs[index]) <= TOLERANCE
        if greedy is not None and place in greedy:
            assert int(row.argmax()) == result.token_ids[place]


def requests_of(trees: Mapping[str, Tree], sampling: SamplingParams = GREEDY) -> list[Request]:
    return [Request(name, tree.prompt, sampling) for name, tree in trees.items()]


def scripts_of(trees: Mapping[str, Tree], maker: TreeMaker) -> dict[str, Script]:
    return {name: Script.of(tree.token_ids, tree.prompt_length, maker.tags) for name, tree in trees.items()}


def without_words(scripts: Scripts, maker: TreeMaker) -> dict[str, Script]:
    """The same structure, with words that are left to the model."""
    words = {token for letter in "abcdefghijklmnopqrstuvwxyz" for token in maker.text(letter)}
    return {
        name: Script({place: token for place, token in script.tokens.items() if token not in words}, script.index)
        for name, script in scripts.items()
    }


@pytest.mark.parametrize("seed", range(5))
def test_random_trees_equal_one_forward_pass(make: Make, seed: int) -> None:
    """Forty at once in a pool that holds about fifteen: evictions and retractions change nothing."""
    maker = TreeMaker(TOKENIZER, seed)
    trees = {f"{seed}.{i}": maker.tree() for i in range(40)}
    engine = make(scripts_of(trees, maker))
    results = run(engine, requests_of(trees))
    for name, tree in trees.items():
        assert (results[name].outcome, results[name].token_ids) == (Outcome.COMPLETED, tree.token_ids)
        check_against_reference(results[name])
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
        check_against_reference(result, greedy=own)
    assert free > 200
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
    config = EngineConfig(page_size=4, pages=4000)
    here = Engine(copy.deepcopy(MODEL), TOKENIZER, DIALECT, config, sampler=FollowingSampler(scripts))
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
