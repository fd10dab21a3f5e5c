"""What counts (SPEC section 2): the engine's logits while decoding equal one forward pass over the canonical list."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from npr_common.dialects import load_dialect
from npr_common.tags import Role
from npr_common.topology import SpanKind, topology
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.scripted import ScriptedSampler
from npr_rollout.record.outcomes import Outcome
from npr_rollout.record.request import FinishedEvent, Request, Result, SamplingParams
from npr_rollout.record.script import Script
from npr_rollout.testing.models import tagged_tokenizer, tiny_model
from npr_rollout.testing.trees import Tree, TreeMaker

TOLERANCE = 1e-4


def reference_logits(model: Any, tree: Tree, maker: TreeMaker) -> torch.Tensor:
    """The learner's forward pass: dense additive mask and positions, by the library's own eager attention."""
    shape = topology(tree.token_ids, tree.prompt_length, maker.tags)
    visible = torch.from_numpy(shape.dense_mask())
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(tree.token_ids)[None],
            position_ids=torch.tensor(shape.positions)[None],
            attention_mask=mask,
            use_cache=False,
        )
    return output.logits[0]


def decode(
    model: Any, trees: Sequence[Tree], maker: TreeMaker, **config: Any
) -> tuple[dict[str, Result], ScriptedSampler]:
    scripts = {str(i): Script.of(tree.token_ids, tree.prompt_length, maker.tags) for i, tree in enumerate(trees)}
    sampler = ScriptedSampler(scripts, keep_logits=True)
    engine = Engine(
        copy.deepcopy(model),  # an engine takes a model apart
        tagged_tokenizer(),
        load_dialect("npr"),
        EngineConfig(**{"page_size": 4, "pages": 2000, "audit_every_step": True, **config}),
        sampler=sampler,
    )
    for name, tree in zip(scripts, trees, strict=True):
        engine.submit(Request(name, tree.prompt, SamplingParams()))
    results: dict[str, Result] = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                results[event.result.request_id] = event.result
    assert engine.status().pages_used == 0
    return results, sampler


def worst_difference(model: Any, trees: Sequence[Tree], maker: TreeMaker, **config: Any) -> float:
    results, sampler = decode(model, trees, maker, **config)
    worst = 0.0
    for name, tree in enumerate(trees):
        result = results[str(name)]
        assert result.outcome is Outcome.COMPLETED, result
        assert result.token_ids == tree.token_ids
        predecessors = topology(tree.token_ids, tree.prompt_length, maker.tags).predecessors
        reference = reference_logits(model, tree, maker)
        seen = sampler.logits[str(name)]
        sampled = {i + tree.prompt_length for i, forced in enumerate(result.forced) if not forced}
        assert set(seen) == sampled
        for index, logits in seen.items():
            worst = max(worst, float((logits - reference[predecessors[index]]).abs().max()))
    return worst


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("seed", range(4))
def test_logits_equal_one_forward_pass(family: str, seed: int) -> None:
    maker = TreeMaker(tagged_tokenizer(), seed)
    trees = [maker.tree() for _ in range(30)]
    assert worst_difference(tiny_model(family, tagged_tokenizer(), seed), trees, maker) <= TOLERANCE


def test_preemption_changes_no_logit() -> None:
    maker = TreeMaker(tagged_tokenizer(), 11)
    trees = [maker.tree(blocks=2) for _ in range(12)]
    model = tiny_model("qwen3", tagged_tokenizer(), 11)
    results, _ = decode(model, trees, maker, pages=260)
    assert sum(result.ledger.preemptions for result in results.values()) > 3
    assert worst_difference(model, trees, maker, pages=260) <= TOLERANCE


def test_changing_a_sibling_changes_nothing() -> None:
    maker = TreeMaker(tagged_tokenizer(), 5)
    model = tiny_model("qwen3", tagged_tokenizer(), 5)
    tree = maker.tree(blocks=1, branches=3)
    branches = [s for s in topology(tree.token_ids, tree.prompt_length, maker.tags).spans if s.kind is SpanKind.BRANCH]
    header = len(maker.text("\n<step>1:"))
    body = range(branches[0].start + header, branches[0].end - 1)
    changed = list(tree.token_ids)
    other = maker.text("z")[0]
    for index in body:
        changed[index] = other if changed[index] != other else maker.text("y")[0]
    _, before = decode(model, [tree], maker)
    _, after = decode(model, [Tree(tuple(changed), tree.prompt_length)], maker)
    for branch in branches[1:]:
        for index in range(branch.start + header, branch.end):
            assert torch.equal(before.logits["0"][index], after.logits["0"][index])
    takeaway = tree.token_ids.index(maker.tags.close(Role.TAKEAWAY), branches[-1].end)
    assert not torch.allclose(before.logits["0"][takeaway], after.logits["0"][takeaway])
