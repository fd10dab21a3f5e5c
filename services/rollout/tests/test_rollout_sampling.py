"""Draws: reproducible, independent of batch mates, from the right distribution; greedy as `transformers` does it."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npr_common.dialects import load_dialect
from npr_common.errors import InvalidArgumentError
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.sampling import RandomSampler
from npr_rollout.engine.scripted import ScriptedSampler
from npr_rollout.record.outcomes import Visibility
from npr_rollout.record.request import FinishedEvent, Limits, Request, Result, SamplingParams, TokensEvent
from npr_rollout.record.script import Script
from npr_rollout.testing.models import tagged_tokenizer, tiny_model
from npr_rollout.testing.trees import TreeMaker

TOKENIZER = tagged_tokenizer()
VOCABULARY = len(TOKENIZER)


def decode(model: Any, requests: list[Request], **config: Any) -> dict[str, Result]:
    settings = EngineConfig(**{"page_size": 4, "pages": 2000, "audit_every_step": True, **config})
    engine = Engine(model, TOKENIZER, load_dialect("npr"), settings)
    for request in requests:
        engine.submit(request)
    results = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                results[event.result.request_id] = event.result
    assert engine.status().pages_used == 0
    return results


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    maker = TreeMaker(TOKENIZER, seed)
    return [tuple(maker.words(length)) for length in range(1, count + 1)]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_greedy_equals_generate(family: str) -> None:
    model = tiny_model(family, TOKENIZER, 1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    expected = []
    model.set_attn_implementation("sdpa")
    for prompt in prompts(12):
        output = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=-1)
        expected.append(tuple(output[0].tolist()))
    requests = [
        Request(str(i), p, SamplingParams(0.0), Limits(max_tokens=40), Visibility.SEQUENTIAL)
        for i, p in enumerate(prompts(12))
    ]
    results = decode(model, requests)
    for i, tokens in enumerate(expected):
        end = tokens.index(TOKENIZER.eos_token_id) + 1 if TOKENIZER.eos_token_id in tokens else len(tokens)
        assert results[str(i)].token_ids == tokens[:end]


def sampled(name: str, prompt: tuple[int, ...], seed: int = 7) -> Request:
    return Request(name, prompt, SamplingParams(1.0, seed=seed), Limits(max_tokens=60))


def test_draws_do_not_depend_on_batch_mates() -> None:
    model = tiny_model("qwen3", TOKENIZER, 2)
    requests = [sampled(str(i), p) for i, p in enumerate(prompts(16))]
    together = decode(model, requests)
    for request in requests:
        alone = decode(model, [request])[request.request_id]
        assert alone.token_ids == together[request.request_id].token_ids
        assert alone.log_probs == pytest.approx(together[request.request_id].log_probs, abs=1e-4)


def test_preemption_changes_nothing() -> None:
    model = tiny_model("qwen3", TOKENIZER, 2)
    requests = [
        replace(sampled(str(i), p), priority=i % 3, visibility=Visibility.SEQUENTIAL) for i, p in enumerate(prompts(16))
    ]
    plenty = decode(model, requests)
    scarce = decode(model, requests, pages=40)
    assert sum(result.ledger.preemptions for result in scarce.values()) > 5
    for name, result in plenty.items():
        assert scarce[name].token_ids == result.token_ids


def test_seeds_and_prompts_make_different_draws() -> None:
    model = tiny_model("qwen3", TOKENIZER, 2)
    prompt = prompts(8)[-1]
    results = decode(model, [sampled(str(seed), prompt, seed) for seed in range(8)])
    assert len({result.token_ids for result in results.values()}) > 4


def span(branch: int = -1, end: int = 0, key: int = 0, seen: Any = None, **params: Any) -> Any:
    request = SimpleNamespace(sampling=SamplingParams(**params))
    return SimpleNamespace(owner=SimpleNamespace(request=request, key=key), branch=branch, end=end, seen=seen)


def test_the_distribution_is_the_models() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6) * 2
    draws = 40_000
    spans = [span(end=i, temperature=0.7) for i in range(draws)]
    samples = RandomSampler().sample(logits.expand(draws, -1), spans)
    expected = (logits / 0.7).softmax(-1)
    counts = torch.bincount(torch.tensor(samples.tokens), minlength=6)
    chi_square = float((((counts - draws * expected) ** 2) / (draws * expected)).sum())
    assert chi_square < 25.7  # 5 degrees of freedom: exceeded once in 10,000 runs; the draws are fixed by their keys
    chosen = torch.tensor(samples.tokens)
    assert torch.allclose(torch.tensor(samples.log_probs), expected.log()[chosen], atol=1e-5)


def test_log_probs_are_those_of_the_truncated_distribution() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    by_k = RandomSampler().sample(logits.expand(200, -1), [span(end=i, top_k=2) for i in range(200)])
    by_p = RandomSampler().sample(logits.expand(200, -1), [span(end=i, top_p=0.6) for i in range(200)])
    for samples in (by_k, by_p):
        assert set(samples.tokens) == {0, 1}
        probabilities = torch.tensor(samples.log_probs).exp()
        expected = torch.tensor([0.625, 0.375])[torch.tensor(samples.tokens)]
        assert torch.allclose(probabilities, expected, atol=1e-5)


def test_rows_of_one_batch_keep_their_own_settings() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    mixed = [span(temperature=0.0), span(end=1, temperature=2.0), span(end=2, top_k=1)]
    samples = RandomSampler().sample(logits, mixed)
    assert samples.tokens[0] == int(logits[0].argmax())
    assert samples.log_probs[0] == 0.0
    assert samples.tokens[2] == int(logits[2].argmax())
    alone = RandomSampler().sample(logits[1:2], mixed[1:2])
    assert alone.tokens[0] == samples.tokens[1]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.999, 0.8, 0.1]),
    top_k=st.sampled_from([0, 1, 7, 200, 10**6]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    min_p=st.sampled_from([0.0, 0.001, 0.2]),
    raw_log_probs=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=2, max_size=9),
    vocabulary=st.sampled_from([5, 51, 512, 513, 3001]),
    sharpness=st.sampled_from([0.1, 1.0, 6.0]),
    seed=st.integers(0, 2**32),
)
def test_a_row_is_the_same_to_the_bit_beside_any_others(
    params: list[SamplingParams], vocabulary: int, sharpness: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), vocabulary, generator=generator) * sharpness
    said = torch.rand(len(params), vocabulary, generator=generator) < 0.1
    spans = [
        span(end=i, key=seed, seen=said[i] if p.repetition_penalty != 1 else None, **asdict(p))
        for i, p in enumerate(params)
    ]
    together = RandomSampler().sample(logits, spans)
    raw = together.raw_log_probs or [0.0] * len(spans)
    for row, one in enumerate(spans):
        alone = RandomSampler().sample(logits[row : row + 1], [one])
        assert alone.tokens == [together.tokens[row]]
        assert alone.log_probs == [together.log_probs[row]]
        assert (alone.raw_log_probs or [0.0]) == [raw[row]]


@settings(max_examples=40, deadline=None)
@given(params=PARAMS, vocabulary=st.sampled_from([5, 600, 20_000]), seed=st.integers(0, 2**32))
def test_the_cuts_are_those_of_the_definition(params: SamplingParams, vocabulary: int, seed: int) -> None:
    """Against sorting the whole vocabulary in float64, one row at a time."""
    params = replace(params, temperature=params.temperature or 1.0, repetition_penalty=1.0)
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    scaled = logits.double() / params.temperature
    ranked, order = scaled.sort(descending=True)
    ranked[params.top_k or vocabulary :] = float("-inf")
    mass = ranked.softmax(-1)
    before = mass.cumsum(-1) - mass
    if params.top_p < 1:
        ranked[before >= params.top_p] = float("-inf")
    ranked[(ranked - ranked[0]).exp() < params.min_p] = float("-inf")
    expected = torch.empty_like(ranked).scatter_(0, order, ranked).log_softmax(-1)
    samples = RandomSampler().sample(logits.expand(64, -1), [span(end=i, **asdict(params)) for i in range(64)])
    assert samples.log_probs == pytest.approx(expected[torch.tensor(samples.tokens)].tolist(), abs=1e-4)


def test_min_p_keeps_what_is_likely_enough_after_temperature() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = {
        (min_p, temperature): set(
            RandomSampler()
            .sample(logits.expand(400, -1), [span(end=i, min_p=min_p, temperature=temperature) for i in range(400)])
            .tokens
        )
        for min_p in (0.2, 0.4)
        for temperature in (1.0, 4.0)
    }
    assert kept == {(0.2, 1.0): {0, 1, 2}, (0.4, 1.0): {0, 1}, (0.2, 4.0): {0, 1, 2, 3}, (0.4, 4.0): {0, 1, 2, 3}}


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    cuts: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.5}]
    for cut in cuts:
        samples = RandomSampler().sample(logits.expand(200, -1), [span(end=i, **cut) for i in range(200)])
        assert set(samples.tokens) == {0, 1, 2, 3}


def test_draws_reach_every_chunk_of_a_large_vocabulary() -> None:
    draws, vocabulary = 4000, 5000
    samples = RandomSampler().sample(torch.zeros(draws, vocabulary), [span(end=i) for i in range(draws)])
    counts = np.bincount(np.array(samples.tokens) // 500, minlength=10)
    assert ((counts - draws / 10) ** 2 / (draws / 10)).sum() < 33.7  # 9 degrees of freedom, once in 10,000


def test_raw_log_probs_are_the_models_own() -> None:
    torch.manual_seed(3)
    logits, seen = torch.randn(6, 80) * 2, torch.rand(80) < 0.5
    asked = [
        span(raw_log_probs=True),
        span(temperature=0.0, raw_log_probs=True),
        span(temperature=0.5, end=1, raw_log_probs=True),
        span(top_k=3, min_p=0.1, top_p=0.7, end=2, raw_log_probs=True),
        span(repetition_penalty=1.5, seen=seen, end=3, raw_log_probs=True),
        span(temperature=0.5, end=4),
    ]
    samples = RandomSampler().sample(logits, asked)
    own = logits.log_softmax(-1).gather(1, torch.tensor(samples.tokens)[:, None])[:, 0].tolist()
    assert samples.raw_log_probs == [*own[:5], 0.0]
    assert samples.log_probs[0] == pytest.approx(own[0], abs=1e-5)
    assert samples.log_probs[1] == 0.0
    assert all(samples.log_probs[i] != own[i] for i in range(1, 6))
    assert RandomSampler().sample(logits[5:], asked[5:]).raw_log_probs == []


def test_raw_log_probs_are_told_where_asked_for() -> None:
    model = tiny_model("qwen3", TOKENIZER, 2)
    plain, warm = prompts(2)
    engine = Engine(model, TOKENIZER, load_dialect("npr"), EngineConfig(pages=200))
    engine.submit(Request("plain", plain, SamplingParams(0.5), Limits(max_tokens=30), stream=True))
    asked = SamplingParams(0.5, raw_log_probs=True)
    engine.submit(Request("warm", warm, asked, Limits(max_tokens=30), Visibility.SEQUENTIAL, stream=True))
    told: dict[str, list[float]] = {"plain": [], "warm": []}
    results: dict[str, Result] = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, TokensEvent):
                told[event.request_id] += event.raw_log_probs
            elif isinstance(event, FinishedEvent):
                results[event.result.request_id] = event.result
    assert results["plain"].raw_log_probs == ()
    assert told["plain"] == []
    result = results["warm"]
    assert result.raw_log_probs == tuple(told["warm"])
    assert len(result.raw_log_probs) == len(result.log_probs) > 3
    reference = tiny_model("qwen3", TOKENIZER, 2)
    with torch.no_grad():
        logits = reference(torch.tensor([result.token_ids])).logits[0].log_softmax(-1)
    for index, value in enumerate(result.raw_log_probs, result.prompt_length):
        assert value == pytest.approx(float(logits[index - 1, result.token_ids[index]]), abs=1e-3)


def test_forced_tokens_have_no_raw_log_prob() -> None:
    maker = TreeMaker(TOKENIZER, 4)
    tree = maker.tree(blocks=2, branches=3)
    script = ScriptedSampler({"r": Script.of(tree.token_ids, tree.prompt_length, maker.tags)})
    model = tiny_model("qwen3", TOKENIZER, 3)
    engine = Engine(model, TOKENIZER, load_dialect("npr"), EngineConfig(pages=200), sampler=script)
    engine.submit(Request("r", tree.prompt, SamplingParams(raw_log_probs=True)))
    events = []
    while not engine.idle:
        events += engine.step()
    [result] = [event.result for event in events if isinstance(event, FinishedEvent)]
    assert any(result.forced)
    assert len(result.raw_log_probs) == len(result.forced)
    assert all((value == 0) == forced for value, forced in zip(result.raw_log_probs, result.forced, strict=True))


@pytest.mark.parametrize("min_p", [-0.1, 1.0, float("nan")])
def test_a_min_p_that_cannot_be_is_refused(min_p: float) -> None:
    engine = Engine(tiny_model("qwen3", TOKENIZER, 2), TOKENIZER, load_dialect("npr"), EngineConfig(pages=20))
    with pytest.raises(InvalidArgumentError, match="min_p") as refused:
        engine.submit(Request("r", prompts(1)[0], SamplingParams(min_p=min_p)))
    assert "sampling.min_p" in refused.value.field_violations


def test_the_penalty_touches_only_what_the_body_holds() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.9, 0.0]])
    seen = torch.tensor([True, True, False, False])
    greedy = {"temperature": 0.0, "repetition_penalty": 1.2}
    assert RandomSampler().sample(logits, [span(seen=None, **greedy)]).tokens == [0]
    assert RandomSampler().sample(logits, [span(seen=seen, **greedy)]).tokens == [2]
    drawn = RandomSampler().sample(
        logits.expand(500, -1), [span(end=i, seen=seen, repetition_penalty=1.2) for i in range(500)]
    )
    expected = torch.tensor([2.0 / 1.2, -1.2, 1.9, 0.0]).log_softmax(-1)
    assert torch.allclose(torch.tensor(drawn.log_probs), expected[torch.tensor(drawn.tokens)], atol=1e-5)


def test_a_step_counts_its_own_sampled_words_only() -> None:
    """Neither the prompt, the guideline, forced tokens and tags, nor siblings are in what the penalty looks at."""
    maker = TreeMaker(TOKENIZER, 4)
    tree = maker.tree(blocks=2, branches=3)
    script = ScriptedSampler({"r": Script.of(tree.token_ids, tree.prompt_length, maker.tags)})
    seen: list[tuple[int, set[int]]] = []

    class Watching(RandomSampler):
        def sample(self, logits: Any, spans: Any) -> Any:
            for item in (item for item in spans if item.is_branch):
                body = {t for t, forced in zip(item.tokens, item.forced, strict=True) if not forced}
                seen.append((int(item.seen.sum()), body))
                assert all(bool(item.seen[token]) for token in body)
            return script.sample(logits, spans)

    model = tiny_model("qwen3", TOKENIZER, 3)
    engine = Engine(model, TOKENIZER, load_dialect("npr"), EngineConfig(pages=200), sampler=Watching())
    engine.submit(Request("r", tree.prompt, SamplingParams(repetition_penalty=1.02)))
    while not engine.idle:
        engine.step()
    assert max(count for count, _ in seen) > 3
    assert all(count == len(body) for count, body in seen)
