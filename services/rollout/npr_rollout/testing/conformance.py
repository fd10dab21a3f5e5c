"""What the tests of all backends share: trees that engines are made to say, and what they must be then.

Trees are given as scripts, and engines follow them: the engine of this process by its sampler, the one on a server by
the plug-in's. So structure is a test's choice, and the numbers are the model's.
"""

from __future__ import annotations

import copy
import functools
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from npr_common.dialects import load_dialect
from npr_common.tags import TagIds
from npr_common.tokenizers import add_tag_tokens, eos_ids
from npr_common.topology import Topology, topology
from npr_rollout.backend import DecodingEngine
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.sampling import RandomSampler, Samples
from npr_rollout.record.request import FinishedEvent, Request, Result, SamplingParams
from npr_rollout.record.script import Script
from npr_rollout.record.trajectory import Span
from npr_rollout.sglang.engine import SglangEngine
from npr_rollout.sglang.limits import ServerLimits
from npr_rollout.sglang.server import ServedModel
from npr_rollout.sglang.transport import Transport
from npr_rollout.testing.models import tagged_tokenizer, tiny_model
from npr_rollout.testing.sglang_servers import settings_for, sglang_server
from npr_rollout.testing.trees import Tree, TreeMaker

TOKENIZER = add_tag_tokens(tagged_tokenizer(), load_dialect("multiverse"))
"""It has the tags of two dialects."""
DTYPE = os.environ.get("NPR_SGLANG_DTYPE", "float32")
"""Type that the server computes in; the reference is computed in float32, from the same rounded weights."""
_HIDDEN = 256 if "NPR_SGLANG_DEVICE" in os.environ else 64  # a GPU's attention kernels want heads of 64
MODEL = tiny_model("qwen3", TOKENIZER, 2, hidden=_HIDDEN).to(getattr(torch, DTYPE)).float()
EOS = eos_ids(TOKENIZER, MODEL.generation_config)
TOLERANCE = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.4}[DTYPE]
"""How far a log-probability may be off the reference, in nats."""
POOL_TOKENS = 3072
SECONDS = 120.0
GREEDY = SamplingParams(temperature=0.0, raw_log_probs=True)

Scripts = Mapping[str, Script]
"""What requests are to say, by their ids."""


class Make(Protocol):
    """Makes an engine for a dialect that follows scripts."""

    def __call__(self, scripts: Scripts, dialect: str = "npr") -> DecodingEngine: ...


@dataclass
class FollowingSampler:
    """Says what the scripts say, and draws where they say nothing."""

    scripts: Scripts

    def sample(self, logits: torch.Tensor, spans: Sequence[Span]) -> Samples:
        """One token a row of float32 [N, V]."""
        drawn = RandomSampler().sample(logits, spans)
        raw = logits.log_softmax(dim=-1)
        tokens, log_probs = list(drawn.tokens), list(drawn.log_probs)
        for row, span in enumerate(spans):
            script = self.scripts.get(span.owner.request.request_id)
            token = script.tokens.get((span.end, span.branch)) if script is not None else None
            if token is not None:
                tokens[row], log_probs[row] = token, float(raw[row, token])
        return Samples(tokens, log_probs, [float(raw[row, token]) for row, token in enumerate(tokens)])


@contextmanager
def model_server(python: str) -> Iterator[Transport]:
    """A server with MODEL, scheduled as on a GPU; `python` is the one that has SGLang."""
    with tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(MODEL).save_pretrained(folder)
        TOKENIZER.save_pretrained(folder)
        model = ServedModel(Path(folder), MODEL.config.max_position_embeddings, DTYPE)
        with sglang_server(model, settings_for(python, POOL_TOKENS, stream_interval=4, overlap=True)) as transport:
            yield transport


def in_process(config: EngineConfig) -> Make:
    """Makes engines of this process."""

    def make(scripts: Scripts, dialect: str = "npr") -> DecodingEngine:
        sampler = FollowingSampler(scripts)
        return Engine(copy.deepcopy(MODEL), TOKENIZER, load_dialect(dialect), config, sampler=sampler)

    return make


def on_server(server: Transport) -> Make:
    """Makes engines on a server."""
    limits = ServerLimits.told(
        server.ask(lambda client: client.info()),
        context=MODEL.config.max_position_embeddings,
        vocab_size=len(TOKENIZER),
        max_running=64,
        max_branches=16,
        max_blocks=16,
    )

    def make(scripts: Scripts, dialect: str = "npr") -> DecodingEngine:
        return SglangEngine(server, TOKENIZER, load_dialect(dialect), limits, eos=EOS, scripts=scripts)

    return make


def run(engine: DecodingEngine, requests: Sequence[Request]) -> dict[str, Result]:
    """Decode all at once; the results by id."""
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


def reference(token_ids: Sequence[int], shape: Topology) -> torch.Tensor:
    """Log-probabilities [S, V] by one forward pass under the dense mask, by the library's own eager attention."""
    visible = torch.from_numpy(shape.dense_mask())
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        output = _eager_model()(
            input_ids=torch.tensor(token_ids)[None],
            position_ids=torch.tensor(shape.positions)[None],
            attention_mask=mask,
            use_cache=False,
        )
    log_probs: torch.Tensor = output.logits[0].log_softmax(dim=-1)
    return log_probs


@functools.cache
def _eager_model() -> Any:
    model = copy.deepcopy(MODEL)
    model.set_attn_implementation("eager")
    return model


def check_against_reference(result: Result, tags: TagIds, *, greedy: Collection[int] = ()) -> None:
    """Every sampled token's raw log-probability; and that those at the places `greedy` are the likeliest."""
    shape = topology(result.token_ids, result.prompt_length, tags)
    expected = reference(result.token_ids, shape)
    for index, forced in enumerate(result.forced):
        place = index + result.prompt_length
        if forced:
            continue
        row = expected[shape.predecessors[place]]
        assert abs(float(row[result.token_ids[place]]) - result.raw_log_probs[index]) <= TOLERANCE
        if place in greedy:
            is_likeliest = int(row.argmax()) == result.token_ids[place]
            is_near = DTYPE != "float32" and float(row.max() - row[result.token_ids[place]]) <= TOLERANCE
            assert is_likeliest or is_near


def requests_of(trees: Mapping[str, Tree], sampling: SamplingParams = GREEDY) -> list[Request]:
    """A request a tree."""
    return [Request(name, tree.prompt, sampling) for name, tree in trees.items()]


def scripts_of(trees: Mapping[str, Tree], maker: TreeMaker) -> dict[str, Script]:
    """Scripts that say whole trees."""
    return {name: Script.of(tree.token_ids, tree.prompt_length, maker.tags) for name, tree in trees.items()}


def without_words(scripts: Scripts, maker: TreeMaker) -> dict[str, Script]:
    """The same structure, with words that are left to the model."""
    words = {token for letter in "abcdefghijklmnopqrstuvwxyz" for token in maker.text(letter)}
    return {
        name: Script({place: token for place, token in script.tokens.items() if token not in words}, script.index)
        for name, script in scripts.items()
    }
