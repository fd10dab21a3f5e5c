"""The trees that are decoded again token for token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from _decoding import Decoding, decode
from _subjects import DIALECT, Subject

from npr.types.v1 import prompt_pb2
from npr_common.cues import step_cue, takeaway_cue
from npr_common.prompts import encode_prompt
from npr_common.tags import Role
from npr_common.tasks import MultipartTask, Split
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.scripted import ScriptedSampler
from npr_rollout.record.outcomes import Outcome, Visibility
from npr_rollout.record.request import FinishedEvent, Limits, Request
from npr_rollout.record.script import Script
from npr_rollout.testing.trees import Tree

PAGE_SIZE = 16
_SLACK = 4  # tokens that a limit leaves, so that no branch meets it
_TAKEAWAY_WORDS, _LAST_WORDS = 6, 4


def equal_tree(
    subject: Subject, drawn: random.Random, *, branches: int, branch_tokens: int, prompt_tokens: int, blocks: int = 1
) -> Tree:
    """A tree of random words whose branches all sample `branch_tokens` tokens, their `</step>` included."""
    tags, tokenizer = subject.tags, subject.tokenizer

    def words(count: int) -> list[int]:
        return drawn.choices(subject.words, k=count)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    headers, takeaway = cues(subject, branches)
    ids = words(prompt_tokens)
    for _ in range(blocks):
        ids.append(tags.open(Role.GUIDELINE))
        for number in range(1, branches + 1):
            ids += [tags.open(Role.PLAN), *encode(DIALECT.label_of(number)), *words(1), tags.close(Role.PLAN)]
        ids.append(tags.close(Role.GUIDELINE))
        for header in headers:
            ids += [*header, *words(branch_tokens - 1), tags.close(Role.STEP)]
        ids += [*takeaway, *words(_TAKEAWAY_WORDS), tags.close(Role.TAKEAWAY)]
    return Tree((*ids, *words(_LAST_WORDS), tokenizer.eos_token_id), prompt_tokens)


def cues(subject: Subject, branches: int) -> tuple[list[list[int]], list[int]]:
    """The tokens that the engine forces: each branch's header, and what follows the last branch."""
    headers = [step_cue(DIALECT, number).encode(subject.tokenizer) for number in range(1, branches + 1)]
    return [list(header) for header in headers], list(takeaway_cue(DIALECT).encode(subject.tokenizer))


def own_trees(model: Any, subject: Subject, count: int) -> list[Tree]:
    """What the model answers to held-out problems, where it forked and completed."""
    engine = Engine(model, subject.tokenizer, DIALECT, EngineConfig(pages=4096))
    for problem in MultipartTask().problems(2 * count, Split.TEST):
        message = prompt_pb2.ChatMessage(role="user", content=problem.prompt_text)
        ids = encode_prompt(subject.tokenizer, prompt_pb2.Prompt(messages=[message]))
        engine.submit(Request(problem.problem_id, tuple(ids), limits=Limits(max_tokens=400)))
    results = []
    while not engine.idle:
        results += [event.result for event in engine.step() if isinstance(event, FinishedEvent)]
    kept = [r for r in results if r.outcome is Outcome.COMPLETED and r.ledger.blocks and not r.branch_truncated]
    if len(kept) < count:
        raise SystemExit(f"Only {len(kept)} of {2 * count} responses forked and completed; give a model after stage 2.")
    return [Tree(result.token_ids, result.prompt_length) for result in kept[:count]]


def decode_trees(model: Any, subject: Subject, trees: Sequence[Tree], visibility: Visibility) -> Decoding:
    """Decode trees together by a fresh engine: fork and join as they say, or each as one causal sequence."""
    tags = subject.tags if visibility is Visibility.PARALLEL else None
    scripts = {str(i): Script.of(tree.token_ids, tree.prompt_length, tags) for i, tree in enumerate(trees)}
    pages = sum(-(-len(tree.token_ids) // PAGE_SIZE) + _partial_pages(subject, tree) for tree in trees)
    engine = Engine(
        model,
        subject.tokenizer,
        DIALECT,
        EngineConfig(page_size=PAGE_SIZE, pages=pages, max_running=len(trees)),
        sampler=ScriptedSampler(scripts),
    )
    requests = [
        Request(name, tree.prompt, limits=Limits(max_tokens=_response(tree) + _SLACK), visibility=visibility)
        for name, tree in zip(scripts, trees, strict=True)
    ]
    return decode(engine, requests)


def _response(tree: Tree) -> int:
    """Tokens after the prompt."""
    return len(tree.token_ids) - tree.prompt_length


def _partial_pages(subject: Subject, tree: Tree) -> int:
    """Pages that may be partly filled: each branch's last one; and some for the scheduler's caution."""
    return list(tree.token_ids).count(subject.tags.close(Role.STEP)) + 8
