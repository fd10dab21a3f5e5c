"""kill -9 of every service during a three-stage run: it finishes, and every group is consumed exactly once."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npr_client.testing import NprCommand

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHORTENED = {
    "data.test.multipart.count": 48,
    "stages.zero.steps": 3,
    "stages.zero.prompts_per_step": 8,
    "stages.zero.samples_per_prompt": 8,
    "stages.beta.problems": 160,
    "stages.beta.tries": 3,
    "stages.beta.learning.epochs": 3,
    "stages.npr.steps": 4,
    "stages.npr.prompts_per_step": 8,
    "stages.npr.samples_per_prompt": 8,
    "stages.npr.malformed": "incorrect",
    "guard.min_forked_rate": 0.0,
    "guard.max_malformed_rate": 1.0,
}
"""Enough of the tiny recipe for every transition; far too little to learn much."""

KILLS = {
    ("zero", "sampled"): "learner",
    ("zero", "step_finished"): "rollout",
    ("zero", "evaluated"): "reward",
    ("beta", "sampled"): "buffer",
    ("beta", "train_progress"): "controller",
    ("npr", "sampled"): "learner",
    ("npr", "step_finished"): "valkey",
}
"""At the first event of this stage and kind, this service dies."""


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{"):
            yield json.loads(line)


def kill(npr: NprCommand, service: str) -> int:
    """kill -9 of a service's process; its pid."""
    state = json.loads(npr("status", "--json", code=None)[0])  # 1 while another one is being restarted
    pid = next(item["pid"] for item in state["components"] if item["name"] == service)
    os.kill(pid, signal.SIGKILL)
    return int(pid)


def test_a_run_survives_the_death_of_every_service(npr: NprCommand, recipes: Path) -> None:
    overrides = [part for key, value in SHORTENED.items() for part in ("--set", f"{key}={value}")]
    following = npr.start("run", str(recipes / "tiny.yaml"), "--run-id", "killed", "--json", *overrides)
    assert following.stdout is not None
    pending, last = dict(KILLS), ""
    for event in events(iter(following.stdout.readline, "")):
        last = event["run"].get("error", "")
        victim = pending.pop((event["run"].get("stage", ""), event["kind"]), None)
        if victim is not None:
            kill(npr, victim)
    assert following.wait(timeout=60) == 0, last
    assert not pending, f"never happened: {pending}"

    audit = json.loads(npr("audit", "killed", "--json")[0])["audit"]
    assert audit.get("problems", []) == []
    consumers = audit["consumed_by"]
    steps = {f"zero/step/{step}" for step in range(3)} | {f"npr/step/{step}" for step in range(4)}
    assert steps <= set(consumers)
    assert all(consumers[name] <= 8 for name in steps)
    counts = audit["counts"]
    assert counts["consumed"] == sum(consumers.values())
    assert counts.get("waiting", 0) == counts.get("leased", 0) == counts.get("ready", 0) == 0

    report = json.loads((npr.folder / "runs" / "killed" / "report.json").read_bytes())
    assert [stage["name"] for stage in report["stages"]] == ["seed", "zero", "beta", "npr"]
