"""Gradients of whole batches against a float64 reference written straight from the formulas.

The reference runs one trajectory at a time, with the oracle's dense mask, full logits and plain autograd: no padding,
no micro-batches, no chunked head.
"""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from npr_common.topology import Topology
from npr_learner.forward import TokenScorer
from npr_learner.gradient import GradientSummary, accumulate_gradient, trained_tokens
from npr_learner.objectives import ClipRange, dapo_loss, papo_loss, sft_loss
from npr_learner.options import StageOptions
from npr_learner.packing import families_of, micro_batches, pack
from npr_learner.row import Row, row_of_trajectory
from npr_learner.testing import World as Texts
from npr_learner.testing import qwen3
from npr_learner.world import World


def reference_log_probs(model: Any, row: Row) -> torch.Tensor:
    """log pi of the trained tokens of one row, by pairwise visibility and full logits."""
    tree: Topology = row.topology
    size = len(row)
    mask = torch.tensor([[tree.visible(q, k) for k in range(size)] for q in range(size)])
    logits = model(
        input_ids=torch.tensor([row.token_ids.tolist()]),
        attention_mask=mask[None, None],
        position_ids=torch.tensor([tree.positions.tolist()]),
    ).logits[0]
    table = torch.log_softmax(logits / row.temperature, -1)
    return torch.stack([table[int(index) - 1, int(row.token_ids[index])] for index in row.trained])


def exact(model: Any) -> Any:
    """The model in float64 throughout; its own norms would round to float32."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Qwen3RMSNorm):
                norm = torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model.double()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def rows_of(world: Texts, *, parallel: bool, count: int = 7) -> list[Row]:
    generator = np.random.default_rng(5)
    make = world.parallel if parallel else world.sequential
    trajectories = [make(generator, "g", index) for index in range(count)]
    advantages = generator.normal(size=count)
    vocabulary = len(world.tokenizer)
    rows = [
        row_of_trajectory(item, world.tags, vocabulary, float(advantage))
        for item, advantage in zip(trajectories, advantages, strict=True)
    ]
    return [replace(row, temperature=(1.0, 0.5)[index % 2]) for index, row in enumerate(rows)]


CLIP = ClipRange()


def papo(log_probs: torch.Tensor, behavior: torch.Tensor, advantage: float) -> torch.Tensor:
    return (log_probs.exp() / log_probs.exp().detach() * advantage).sum()


def dapo(log_probs: torch.Tensor, behavior: torch.Tensor, advantage: float) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for log_prob, drawn in zip(log_probs, behavior, strict=True):
        ratio = (log_prob - drawn).exp()
        surrogate = min(ratio * advantage, min(max(ratio, 1 - CLIP.low), 1 + CLIP.high) * advantage)
        total = total + (max(surrogate, CLIP.dual * advantage) if advantage < 0 else surrogate)
    return total


def sft(log_probs: torch.Tensor, behavior: torch.Tensor, advantage: float) -> torch.Tensor:
    return log_probs.sum()


OBJECTIVES = {
    "papo": (papo, lambda lp, b, n: papo_loss(lp, b.advantages_N, n)),
    "dapo": (dapo, lambda lp, b, n: dapo_loss(lp, b.behavior_log_probs_N, b.advantages_N, n, CLIP)),
    "sft": (sft, lambda lp, b, n: sft_loss(lp, n)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("micro_batch_tokens", [1, 130, 10_000])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_gradient_equals_the_reference_however_rows_are_packed(
    world: Texts, name: str, micro_batch_tokens: int, *, share_prompts: bool
) -> None:
    formula, objective = OBJECTIVES[name]
    rows = rows_of(world, parallel=name != "dapo")
    model = exact(qwen3(len(world.tokenizer)))
    normalizer = trained_tokens(rows)
    expected_loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        behavior = torch.from_numpy(row.behavior_log_probs).double()
        expected_loss = expected_loss - formula(reference_log_probs(model, row), behavior, row.advantage) / normalizer
    expected_loss.backward()
    expected = gradients(model)
    model.zero_grad()

    options = StageOptions(learning_rate=1e-3, micro_batch_tokens=micro_batch_tokens, share_prompts=share_prompts)
    seen: list[tuple[int, int]] = []
    summary = accumulate_gradient(
        TokenScorer(model, options.dtype),
        rows,
        lambda lp, b: objective(lp, b, normalizer),
        options,
        observe=lambda done, total, _: seen.append((done, total)),
        world=World.alone(torch.device("cpu")),
    )
    assert summary.loss == pytest.approx(expected_loss.item(), rel=1e-10)
    assert summary.tokens == normalizer
    assert seen[-1] == (len(seen), len(seen))
    assert len(seen) == {1: len(rows), 10_000: 1}.get(micro_batch_tokens, len(seen))
    for parameter, gradient in gradients(model).items():
        message = f"{parameter} differs by {(gradient - expected[parameter]).abs().max()}"
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-8, atol=1e-11, msg=message)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-4  # the comparison is of something


def test_forced_tokens_and_seams_carry_no_loss_and_a_sibling_changes_nothing(world: Texts) -> None:
    generator = np.random.default_rng(1)
    trajectory = world.parallel(generator, "g", 0, branches=3)
    row = row_of_trajectory(trajectory, world.tags, len(world.tokenizer))
    forced = np.flatnonzero(trajectory.forced) + trajectory.prompt_length
    assert len(forced) > 8
    assert not set(row.trained) & set(forced)
    assert len(row.trained) + len(forced) == len(row) - trajectory.prompt_length
    assert not row.topology.seams[row.trained].any()

    branches = next(row.topology.blocks())
    changed = row.token_ids.copy()
    changed[branches[0].start + 4] = world.encode("7")[0] + 1
    assert changed.tolist() != row.token_ids.tolist()
    other = Row(changed, row.topology, row.trained, row.behavior_log_probs)
    model = qwen3(len(world.tokenizer)).double()
    before, after = reference_log_probs(model, row), reference_log_probs(model, other)
    in_siblings = np.isin(row.trained, np.arange(branches[1].start, branches[2].end))
    torch.testing.assert_close(before[in_siblings], after[in_siblings], rtol=0, atol=1e-12)
    takeaway = row.trained >= branches[2].end
    assert (before[takeaway] - after[takeaway]).abs().max() > 1e-6


def measured(model: Any, rows: list[Row]) -> GradientSummary:
    """What is measured of these rows."""
    options = StageOptions(learning_rate=1.0)
    scorer, alone = TokenScorer(model, options.dtype), World.alone(torch.device("cpu"))
    return accumulate_gradient(
        scorer, rows, lambda lp, _: sft_loss(lp, 1.0), options, observe=lambda *_: None, world=alone
    )


def test_log_prob_drift_is_the_largest_difference_to_the_engine(world: Texts) -> None:
    rows = rows_of(world, parallel=True, count=3)
    model = qwen3(len(world.tokenizer))
    truth = [reference_log_probs(model, row).detach().numpy() for row in rows]
    truth[1][2] += 0.25
    exact = [replace(row, behavior_log_probs=t.astype(np.float32)) for row, t in zip(rows, truth, strict=True)]
    summary = measured(model, exact)
    assert summary.drift.largest == pytest.approx(0.25, abs=1e-5)
    assert summary.drift.mean == pytest.approx(0.25 / summary.tokens, rel=1e-2)
    assert summary.drift.within[-1] == pytest.approx(1 - 1 / summary.tokens)
    assert summary.drift.within[1] == summary.drift.within[-1]


def test_micro_batches_hold_every_row_once_within_the_budget(world: Texts) -> None:
    rows = rows_of(world, parallel=True, count=20)
    for budget, share in itertools.product((1, 60, 100, 333, 100_000), (False, True)):
        batches = micro_batches(families_of(rows, share_prompts=share), budget)
        assert sorted(id(row) for batch in batches for family in batch for row in family.rows) == sorted(map(id, rows))
        for batch in batches:
            single = len(batch) == len(batch[0].rows) == 1
            assert single or sum(len(pack([family]).token_ids) for family in batch) <= budget


def test_entropy_of_a_uniform_policy_is_log_of_the_vocabulary(world: Texts) -> None:
    rows = rows_of(world, parallel=True, count=2)
    model = qwen3(len(world.tokenizer))
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    summary = measured(model, rows)
    assert summary.mean("entropy") == pytest.approx(math.log(len(world.tokenizer)), rel=1e-5)
