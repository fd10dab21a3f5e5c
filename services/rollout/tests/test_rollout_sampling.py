"""Draws: reproducible, independent of batch mates, from the right distribution; greedy as `transformers` does it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npr_common.dialects import load_dialect
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.outcomes import Visibility
from npr_rollout.engine.request import FinishedEvent, Limits, Request, Result, SamplingParams
from npr_rollout.engine.sampling import RandomSampler
from npr_rollout.engine.script import Script, ScriptedSampler
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
