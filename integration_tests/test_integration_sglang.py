"""The three stages of the tiny recipe with rollouts on an SGLang server."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from npr_client.testing import NprCommand, npr_with_stack
from npr_common.dialects import load_dialect
from npr_common.tags import TagIds
from npr_common.topology import SpanKind, topology

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

SHORTENED = {
    "data.test.multipart.count": 64,
    "stages.zero.steps": 3,
    "stages.zero.prompts_per_step": 8,
    "stages.zero.samples_per_prompt": 8,
    "stages.beta.problems": 512,
    "stages.beta.tries": 3,
    "stages.npr.steps": 3,
    "stages.npr.prompts_per_step": 8,
    "stages.npr.samples_per_prompt": 8,
    "stages.npr.malformed": "incorrect",
    "guard.min_forked_rate": 0.0,
    "guard.max_malformed_rate": 1.0,
}
"""Enough of the recipe for every transition, and for forks in the last stage."""

DRIFT = 1e-3
"""How far the server's log-probabilities may be off the learner's, which sees the dense mask; both in float32."""


MODEL = Path(__file__).resolve().parent.parent / "services" / "learner" / "npr_learner" / "seed" / "tiny-npr"


@contextmanager
def stack(folder: Path, **settings: str) -> Iterator[NprCommand]:
    """`npr` with a stack whose rollouts are an SGLang server's."""
    python = os.environ.get("NPR_SGLANG_PYTHON")
    if python is None:
        pytest.skip("NPR_SGLANG_PYTHON names no Python with SGLang")
    server = {
        "PYTHON": python,
        "DEVICE": "cpu",
        "ATTENTION_BACKEND": "torch_native",
        "POOL_TOKENS": "16384",
        **settings,
    }
    named = {f"NPR_SGLANG_{name}": value for name, value in server.items()}
    with npr_with_stack(folder, {"NPR_ROLLOUT_BACKEND": "sglang", **named}) as command:
        yield command


def test_the_three_stages_on_a_server(tmp_path: Path, recipes: Path) -> None:
    overrides = [part for key, value in SHORTENED.items() for part in ("--set", f"{key}={value}")]
    with stack(tmp_path) as npr:
        npr("run", str(recipes / "tiny.yaml"), "--run-id", "served", "--json", *overrides, seconds=800)
        audit = json.loads(npr("audit", "served", "--json")[0])["audit"]
    assert audit.get("problems", []) == []
    report = json.loads((tmp_path / "runs" / "served" / "report.json").read_bytes())
    assert [stage["name"] for stage in report["stages"]] == ["seed", "zero", "beta", "npr"]
    assert report["stages"][-1]["parallel_rate"] > 0.3
    steps = [point for curve in report["curves"] for point in curve["points"] if "log_prob_drift_max" in point]
    assert len(steps) == 6
    assert max(step["log_prob_drift_max"] for step in steps) <= DRIFT


def test_a_server_without_the_plug_in_joins_by_text_and_says_so(tmp_path: Path) -> None:
    """Branches are decoded in isolation, but what follows them reads all of them as one text, position by position."""
    prompt = ("--model", "bundled:tiny-npr", "--prompt", "max of a=4*3+8, b=3*2+9", "--raw-log-probs")
    with stack(tmp_path, PLUGIN="false") as npr:
        npr("submit", *prompt, "--samples", "6", "--job-id", "plain", "--watch", "--json")
        found = trajectories(npr, "plain")
        drawn = npr("show", found[0]["trajectory_id"])[0]
        npr("submit", *prompt, "--top-p", "0.5", "--job-id", "cut", "--watch", code=1)
        (refused,) = trajectories(npr, "cut")
    joined = [trajectory for trajectory in found if trajectory.get("textual_joins")]
    completed = [trajectory for trajectory in joined if trajectory["outcome"] == "OUTCOME_COMPLETED"]
    assert completed  # draws don't repeat there, and after a join by text the policy errs now and then
    assert ("not native" in drawn) == (found[0] in joined)
    assert refused["outcome"] == "OUTCOME_REFUSED"
    assert "without the plug-in can't do top_p" in refused["message"]
    for trajectory in completed:
        assert trajectory["textual_joins"] == len(trajectory["ledger"]["blocks"])
        check_as_text(trajectory)


def trajectories(npr: NprCommand, job: str) -> list[dict[str, Any]]:
    """A job's trajectories, whole."""
    groups = map(json.loads, npr("trajectories", "jobs", "--channel", job, "--json")[0].splitlines())
    names = [f"{group['group_id']}/{index}" for group in groups for index in range(group["sample_count"])]
    return [json.loads(npr("show", name, "--json")[0])["trajectory"] for name in names]


def check_as_text(trajectory: dict[str, Any]) -> None:
    """Each sampled token's log-probability, by forward passes over plain causal text: all of it, and each branch."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids, start = trajectory["token_ids"], trajectory["prompt_length"]
    shape = topology(ids, start, TagIds.from_tokenizer(tokenizer, load_dialect("npr")))
    told, forced = trajectory["raw_log_probs"], trajectory["forced"]
    for span in shape.spans:
        if span.kind is SpanKind.PROMPT:
            continue
        before = ids[: span.start]
        if span.kind is SpanKind.BRANCH:
            first = next(s for s in shape.spans if (s.block, s.branch) == (span.block, 0))
            before = ids[: first.start]
        text = [*before, *ids[span.start : span.end]]
        with torch.no_grad():
            log_probs = model(torch.tensor([text])).logits[0].log_softmax(dim=-1)
        for place in range(span.start, span.end):
            if not forced[place - start]:
                row = len(before) + place - span.start - 1
                assert float(log_probs[row, ids[place]]) == pytest.approx(told[place - start], abs=1e-3)
