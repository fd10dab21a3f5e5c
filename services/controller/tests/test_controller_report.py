"""The report: exact keys, one self-contained page, and nothing of the model's text unescaped."""

import json
from html.parser import HTMLParser

import pytest
import yaml
from scripted_worker import WELL_FORMED

from npr_controller.measures import Measures
from npr_controller.recipe import PublishedPolicy
from npr_controller.report import Report, build_report, render_html
from npr_controller.stages.records import (
    BenchmarkRecord,
    EvaluationRecord,
    RoundRecord,
    ShownTrajectory,
    StepRecord,
    TunedRecord,
)
from npr_controller.state import RunRecord

REQUIRED = {
    "name",
    "prompts",
    "format_pass_rate",
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "parallel_rate",
    "mean_branches",
    "total_tokens",
    "critical_path_tokens",
    "wall_seconds",
}
LEARNING = {"learning_rate": 0.001}
RECIPE = {
    "name": "told",
    "notes": "The seed's headroom is designed.",
    "model": "bundled:tiny",
    "data": {
        "train": {"kind": "multipart", "split": "train", "count": 10},
        "test": {"multipart": {"kind": "multipart", "split": "test", "count": 4}},
    },
    "evaluation": {"bootstrap_resamples": 200},
    "stages": [
        {"kind": "zero", "steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2, "learning": LEARNING},
        {"kind": "beta", "problems": 5, "learning": LEARNING},
    ],
}
VOID = {"meta", "link", "img", "br", "hr", "path", "use", "input"}


class Page(HTMLParser):
    """Checks nesting and collects what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in {"src", "href", "xlink:href", "data"} and not (value or "").startswith("#"):
                self.fetched.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def policy(version: int) -> PublishedPolicy:
    return PublishedPolicy(line="told", version=version, manifest_url="memory://", digest="ab")


def measures(accuracy: float) -> Measures:
    return Measures(
        responses=4,
        unscorable=0,
        accuracy=accuracy,
        format_pass_rate=0.75,
        malformed_rate=0.25,
        parallel_rate=1.0,
        genuine_parallel_rate=0.75,
        unfinished_rate=0.0,
        mean_branches=2.0,
        total_tokens=90.0,
        critical_path_tokens=60.0,
        reward_mean=0.5,
    )


def shown(response: str) -> ShownTrajectory:
    branch = {"budget_tokens": 10, "used_tokens": 7, "forced_tokens": 2, "stop": "closed"}
    return ShownTrajectory(
        trajectory_id="g/0",
        benchmark="multipart",
        prompt="<script>alert(1)</script>",
        response=response,
        gold="36",
        answer="36",
        verdict="correct",
        reason="equal",
        outcome="completed",
        format_penalty=0.0,
        total_tokens=20,
        critical_path_tokens=12,
        blocks=[[branch, branch]],
    )


def evaluation(stage: str, per_problem: list[float], begun: float) -> EvaluationRecord:
    accuracy = sum(per_problem) / len(per_problem)
    record = BenchmarkRecord(
        prompts=4,
        samples_per_problem=1,
        measures=measures(accuracy),
        accuracy_low=accuracy - 0.1,
        accuracy_high=accuracy + 0.1,
        best_at_k=accuracy,
        pass_at={1: accuracy},
        per_problem=per_problem,
    )
    return EvaluationRecord(
        stage=stage,
        policy=policy(1),
        overall=record,
        benchmarks={"multipart": record},
        shown=[shown(WELL_FORMED), shown("<guideline><plan>1: a</plan>broken")],
        started_at=begun,
        finished_at=begun + 5,
    )


@pytest.fixture
def report() -> Report:
    steps = {
        f"zero/step/{step}": StepRecord(
            step=step, policy=policy(step), metrics={"entropy": 1.0 - step / 10, "reward_mean": step / 10, "loss": 0.1}
        )
        for step in range(3)
    }
    facts = {
        **steps,
        "seed/evaluation": evaluation("seed", [0, 0, 1, 0], 10.0),
        "zero/evaluation": evaluation("zero", [1, 0, 1, 1], 40.0),
        "beta/round/0": RoundRecord(
            trajectory_ids=["a/0"], group_ids=["a"], accepted_problems=[0], measures=measures(0.5)
        ),
        "beta/tuned": TunedRecord(
            policy=policy(4), metrics={}, curve=[{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
        ),
        "beta/evaluation": evaluation("beta", [1, 1, 1, 1], 70.0),
    }
    record = RunRecord(run_id="r1", recipe="told", recipe_yaml=yaml.safe_dump(RECIPE), created_at=0.0, updated_at=80.0)
    return build_report(record, {name: fact.model_dump_json() for name, fact in facts.items()})


def test_report_json_has_the_agreed_keys_per_stage(report: Report) -> None:
    rows = json.loads(report.model_dump_json())["stages"]
    assert [row["name"] for row in rows] == ["seed", "zero", "beta"]
    for row in rows:
        assert row.keys() >= REQUIRED


def test_times_and_gains_are_those_of_the_facts(report: Report) -> None:
    seed, zero, beta = report.stages
    assert [(row.train_seconds, row.evaluation_seconds, row.wall_seconds) for row in report.stages] == [
        (10.0, 5.0, 15.0),
        (25.0, 5.0, 30.0),
        (25.0, 5.0, 30.0),
    ]
    assert seed.gain_over_seed is None
    assert zero.gain_over_seed is not None
    assert zero.gain_over_seed.accuracy == pytest.approx(0.5)
    assert zero.entropy == pytest.approx(0.8), "that of the last step"
    assert beta.entropy is None, "not measured is null, never a made-up number"
    assert [(row.tried, row.accepted) for row in report.rejection_sampling] == [(4, 1)]
    assert [curve.unit for curve in report.curves] == ["step", "update"]


def test_the_page_is_whole_and_fetches_nothing(report: Report) -> None:
    text = render_html(report)
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert len(page.ids) == len(set(page.ids)), "the figures' ids don't collide"
    assert page.tags.count("svg") == 3
    assert "@import" not in text
    assert "url(http" not in text
    assert "script" not in page.tags


def test_the_page_tells_what_must_be_told(report: Report) -> None:
    text = render_html(report)
    assert "The seed&#39;s headroom is designed." in text
    assert "&lt;script&gt;alert(1)" in text
    assert "prefers-color-scheme: dark" in text
    assert text.count('class="branch"') >= 2 * 3, "branches stand side by side in every stage's well-formed trajectory"
    assert text.count('class="bad"') >= 3, "what is wrong with the broken one is said"
    assert "7 of 10 tokens, closed" in text


def test_a_run_without_a_measurement_has_a_report_too() -> None:
    record = RunRecord(run_id="r1", recipe="told", recipe_yaml=yaml.safe_dump(RECIPE), created_at=0.0, updated_at=1.0)
    text = render_html(build_report(record, {}))
    assert "Nothing has been measured yet." in text
