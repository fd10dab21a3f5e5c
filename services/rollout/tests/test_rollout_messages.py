"""The contract's messages and the spans: what was asked for gets to the engine, what it was held to gets out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from npr.types.v1 import policy_pb2, prompt_pb2, sampling_pb2
from npr_common.errors import InvalidArgumentError
from npr_common.telemetry import names
from npr_rollout import traces
from npr_rollout.messages import Decoding, Origin, trajectory_message
from npr_rollout.record.outcomes import BranchShare, Exhaustion, ForkRefusal, LimitKind, Outcome, Visibility
from npr_rollout.record.request import BudgetPolicy, EarlyStop, LedgerReport, Limits, Result, SamplingParams

FULL = sampling_pb2.BudgetPolicy(
    share=sampling_pb2.BRANCH_SHARE_FAIR,
    on_exhausted=sampling_pb2.EXHAUSTION_TRUNCATE,
    takeaway_reserve_tokens=7,
    early_stop=sampling_pb2.EarlyStop(quorum=2, straggler_factor=1.5, min_mean_log_prob=-3.0),
)
POLICY = BudgetPolicy(BranchShare.FAIR, Exhaustion.TRUNCATE, 7, EarlyStop(2, 1.5, -3.0))
LIMITS = Limits(100, 90, 80, 7, 6)


def parse(**fields: Any) -> Decoding:
    spec = sampling_pb2.DecodingSpec(**{"visibility": sampling_pb2.VISIBILITY_PARALLEL, **fields})
    return Decoding.parse(spec, default_refusal=ForkRefusal.REJECT)


def result() -> Result:
    return Result(
        request_id="r",
        token_ids=(1, 2, 3),
        prompt_length=1,
        log_probs=(-0.5, 0.0),
        forced=(False, True),
        policy_version=3,
        visibility=Visibility.PARALLEL,
        outcome=Outcome.TRUNCATED,
        limit=LimitKind.BRANCH_TOKENS,
        ledger=LedgerReport(total_tokens=2, limits=LIMITS, budget=POLICY),
        raw_log_probs=(-0.25, 0.0),
    )


def test_what_is_asked_for_gets_to_the_engine() -> None:
    asked = parse(sampling=sampling_pb2.Sampling(temperature=1, min_p=0.25, raw_log_probs=True), budget=FULL)
    assert asked.sampling == SamplingParams(min_p=0.25, raw_log_probs=True)
    assert asked.request("r", [1]).budget == POLICY


def test_what_is_not_set_is_the_default() -> None:
    assert parse().request("r", [1]).budget == BudgetPolicy()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"visibility": 99}, "visibility"),
        ({"fork_refusal": 99}, "fork_refusal"),
        ({"budget": sampling_pb2.BudgetPolicy(share=99)}, "budget.share"),  # type: ignore[arg-type]
        ({"budget": sampling_pb2.BudgetPolicy(on_exhausted=99)}, "budget.on_exhausted"),  # type: ignore[arg-type]
    ],
)
def test_a_choice_that_is_not_known_is_refused_by_its_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name) as refused:
        parse(**fields)
    assert list(refused.value.field_violations) == [f"decoding.{name}"]


def test_a_trajectory_says_what_it_was_held_to() -> None:
    origin = Origin("g", 0, prompt_pb2.Prompt(prompt_id="p"))
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    message = trajectory_message(result(), origin, policy_pb2.PolicyRef(version=3), tokenizer)
    assert list(message.raw_log_probs) == [-0.25, 0.0]
    assert message.ledger.budget == FULL
    limits = message.ledger.limits
    assert (limits.max_tokens, limits.max_critical_tokens, limits.max_branch_tokens) == (100, 90, 80)
    assert (limits.max_branches, limits.max_blocks) == (7, 6)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "tracer", lambda: provider.get_tracer("test"))
    return exporter


def test_the_trajectorys_span_has_limits_and_policy(spans: InMemorySpanExporter) -> None:
    traces.record_trajectory(result(), "g/0", "g", "")
    [span] = spans.get_finished_spans()
    assert isinstance(span, ReadableSpan)
    told = {
        names.TRAJECTORY_LIMIT: "branch_tokens",
        names.LIMITS_MAX_TOKENS: 100,
        names.LIMITS_MAX_CRITICAL_TOKENS: 90,
        names.LIMITS_MAX_BRANCH_TOKENS: 80,
        names.LIMITS_MAX_BRANCHES: 7,
        names.LIMITS_MAX_BLOCKS: 6,
        names.BUDGET_SHARE: "fair",
        names.BUDGET_ON_EXHAUSTED: "truncate",
        names.BUDGET_TAKEAWAY_RESERVE_TOKENS: 7,
        names.BUDGET_EARLY_STOP_QUORUM: 2,
        names.BUDGET_EARLY_STOP_STRAGGLER_FACTOR: 1.5,
        names.BUDGET_EARLY_STOP_MIN_MEAN_LOG_PROB: -3.0,
    }
    assert told.items() <= dict(span.attributes or {}).items()
