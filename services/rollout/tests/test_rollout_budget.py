"""Budget policies: who gets how many tokens, what happens at their end, and that nothing else decides about it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npr_common.dialects import load_dialect
from npr_common.errors import InvalidArgumentError
from npr_common.schema import ViolationCode, parse_tokens
from npr_common.tags import TagIds
from npr_common.topology import topology
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.sampling import Samples
from npr_rollout.record.outcomes import (
    BranchShare,
    BranchStop,
    Exhaustion,
    LimitKind,
    MalformedReason,
    Outcome,
)
from npr_rollout.record.request import BudgetPolicy, EarlyStop, FinishedEvent, Limits, Request, Result
from npr_rollout.record.trajectory import Span, Trajectory
from npr_rollout.testing.models import tagged_tokenizer, tiny_model

DIALECT = load_dialect("npr")
TOKENIZER = tagged_tokenizer()
TAGS = TagIds.from_tokenizer(TOKENIZER, DIALECT)
MODEL = tiny_model("qwen3", TOKENIZER, hidden=32, layers=2)
END = "<|end|>"
FAIR, FIRST_COME = BranchShare.FAIR, BranchShare.FIRST_COME
CLOSE, TRUNCATE = Exhaustion.CLOSE, Exhaustion.TRUNCATE
HEADER, CUE = 4, 2  # tokens of `\n<step>1:` and of `\n<takeaway>`


@functools.cache
def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def guideline(branches: int) -> str:
    return f"<guideline>{''.join(f'<plan>{i}: a</plan>' for i in range(1, branches + 1))}</guideline>"


class Speaker:
    """Says a text on each trunk span and in each branch, and `z` behind its end; one log-probability a branch."""

    def __init__(
        self, trunk: Sequence[str], branches: Mapping[int, str], log_probs: Mapping[int, float] | None = None
    ) -> None:
        self._trunk = [encode(text) for text in trunk]
        self._branches = {index: encode(text) for index, text in branches.items()}
        self._log_probs = log_probs or {}

    def sample(self, logits: Any, spans: Sequence[Span]) -> Samples:
        return Samples([self._token(span) for span in spans], [self._log_probs.get(s.branch, -1.0) for s in spans])

    def _token(self, span: Span) -> int:
        said = self._branches[span.branch] if span.is_branch else self._trunk[sum(1 for _ in span.owner.blocks())]
        index = span.forced.count(False)
        return said[index] if index < len(said) else encode("z")[0]


def run(
    branches: Mapping[int, str],
    budget: BudgetPolicy,
    limits: Limits | None = None,
    log_probs: Mapping[int, float] | None = None,
) -> Result:
    """Decode one block with these branches, then a takeaway of three tokens and a last word."""
    trunk = [guideline(len(branches)), f" t</takeaway> s{END}"]
    engine = Engine(
        MODEL,
        TOKENIZER,
        DIALECT,
        EngineConfig(page_size=4, pages=600, audit_every_step=True),
        sampler=Speaker(trunk, branches, log_probs),
    )
    engine.submit(Request("r", tuple(encode("a b")), limits=limits or Limits(), budget=budget))
    events = []
    while not engine.idle:
        events += engine.step()
    [result] = [event.result for event in events if isinstance(event, FinishedEvent)]
    assert engine.status().pages_used == 0
    return result


def stops(result: Result) -> list[BranchStop]:
    return [branch.stop for branch in result.ledger.blocks[0].branches]


def used(result: Result) -> list[int]:
    return [branch.used_tokens for branch in result.ledger.blocks[0].branches]


SHORT, ENDLESS = " u</step>", " x" * 200
SPOKEN = len(encode(SHORT))


# --- shares ---


def test_first_come_lets_a_long_branch_use_what_a_short_one_leaves() -> None:
    result = run({0: ENDLESS, 1: SHORT}, BudgetPolicy(FIRST_COME), Limits(max_tokens=80))
    spent = len(encode(guideline(2))) + CUE + HEADER + SPOKEN
    assert used(result) == [80 - spent, HEADER + SPOKEN]
    assert stops(result) == [BranchStop.BUDGET, BranchStop.CLOSED]


def test_a_fair_share_is_an_equal_part_and_no_more() -> None:
    result = run({0: ENDLESS, 1: SHORT, 2: ENDLESS}, BudgetPolicy(FAIR), Limits(max_tokens=120))
    part = (120 - len(encode(guideline(3))) - CUE) // 3
    assert [branch.budget_tokens for branch in result.ledger.blocks[0].branches] == [part] * 3
    assert used(result) == [part, HEADER + SPOKEN, part]
    assert (result.outcome, result.branch_truncated) == (Outcome.COMPLETED, True)


def test_a_branch_with_a_longer_header_gets_no_more_than_its_part() -> None:
    result = run(dict.fromkeys(range(11), ENDLESS), BudgetPolicy(FAIR), Limits(max_tokens=250))
    part = (250 - len(encode(guideline(11))) - CUE) // 11
    assert used(result) == [part] * 11


def test_a_fair_share_below_a_header_is_no_fork() -> None:
    limits = Limits(max_tokens=len(encode(guideline(11))) + CUE + 11 * (HEADER + 1) + 2)
    branches = dict.fromkeys(range(11), ENDLESS)
    assert run(branches, BudgetPolicy(FIRST_COME), limits).malformed_reason is MalformedReason.NONE
    assert run(branches, BudgetPolicy(FAIR), limits).malformed_reason is MalformedReason.LEDGER


# --- what is kept for the takeaway ---


@pytest.mark.parametrize("share", BranchShare)
@pytest.mark.parametrize("limits", [Limits(max_tokens=80), Limits(max_critical_tokens=60)])
def test_the_reserve_pays_for_what_follows_the_join(share: BranchShare, limits: Limits) -> None:
    branches = {0: ENDLESS, 1: ENDLESS}
    assert run(branches, BudgetPolicy(share), limits).outcome is Outcome.TRUNCATED
    tail = len(encode(f" t</takeaway> s{END}"))
    kept = run(branches, BudgetPolicy(share, takeaway_reserve_tokens=tail), limits)
    assert kept.outcome is Outcome.COMPLETED
    assert kept.ledger.total_tokens <= (limits.max_tokens or 10**6)
    assert kept.ledger.critical_path_tokens <= (limits.max_critical_tokens or 10**6)


def test_a_fork_that_cannot_be_paid_beside_the_reserve_is_refused() -> None:
    least = len(encode(guideline(2))) + 2 * (HEADER + 1) + CUE
    branches = {0: SHORT, 1: SHORT}
    for reserve, reason in ((10, MalformedReason.NONE), (11, MalformedReason.LEDGER)):
        result = run(branches, BudgetPolicy(takeaway_reserve_tokens=reserve), Limits(max_tokens=least + 10))
        assert result.malformed_reason is reason


# --- the end of a budget ---


@pytest.mark.parametrize(
    ("limits", "share", "kind"),
    [
        (Limits(max_branch_tokens=12), FIRST_COME, LimitKind.BRANCH_TOKENS),
        (Limits(max_critical_tokens=50), FIRST_COME, LimitKind.CRITICAL_TOKENS),
        (Limits(), FIRST_COME, LimitKind.CONTEXT),
        (Limits(max_tokens=90), FAIR, LimitKind.TOKENS),
        (Limits(max_tokens=90), FIRST_COME, LimitKind.TOKENS),
    ],
)
def test_truncate_ends_the_trajectory_with_the_limit_that_was_reached(
    limits: Limits, share: BranchShare, kind: LimitKind
) -> None:
    branches = {0: " x" * 2000, 1: SHORT}
    result = run(branches, BudgetPolicy(share, TRUNCATE), limits)
    assert (result.outcome, result.limit) == (Outcome.TRUNCATED, kind)
    assert stops(result) == [BranchStop.BUDGET, BranchStop.CLOSED]
    assert result.branch_truncated
    assert result.token_ids[-SPOKEN:] == tuple(encode(SHORT))  # neither joined nor gone on


def test_truncate_closes_the_siblings_that_are_open() -> None:
    branches = dict.fromkeys(range(10), ENDLESS)
    result = run(branches, BudgetPolicy(FIRST_COME, TRUNCATE), Limits(max_branch_tokens=20))
    assert stops(result) == [BranchStop.ABORTED] * 9 + [BranchStop.BUDGET]  # the tenth has a longer header
    tree = parse_tokens(result.token_ids, TOKENIZER, DIALECT, result.prompt_length).tree
    assert len(tree.blocks[0].steps) == 10


# --- early stop ---


@pytest.mark.parametrize(("factor", "length"), [(1.0, 8), (1.5, 12), (2.0, 16), (2.1, 17)])
def test_a_straggler_is_measured_by_the_longest_branch_that_closed_itself(factor: float, length: int) -> None:
    branches = {0: "u</step>", 1: "u v</step>", 2: ENDLESS, 3: ENDLESS}
    assert HEADER + len(encode(branches[1])) == 8
    result = run(branches, BudgetPolicy(early_stop=EarlyStop(2, factor)), Limits(max_branch_tokens=40))
    assert stops(result) == [BranchStop.CLOSED, BranchStop.CLOSED, BranchStop.EARLY, BranchStop.EARLY]
    assert used(result)[2:] == [length + 1] * 2  # its closing tag is forced
    assert (result.outcome, result.branch_truncated) == (Outcome.COMPLETED, True)


def test_without_a_quorum_nobody_is_a_straggler() -> None:
    branches = {0: SHORT, 1: f" u{END}", 2: ENDLESS}  # an EOS does not close a step
    result = run(branches, BudgetPolicy(early_stop=EarlyStop(2, 1.0)), Limits(max_branch_tokens=40))
    assert stops(result) == [BranchStop.CLOSED, BranchStop.EOS, BranchStop.BUDGET]


def test_a_branch_that_gets_too_unlikely_is_closed() -> None:
    branches, log_probs = {0: ENDLESS, 1: ENDLESS}, {0: -2.0, 1: -0.5}
    result = run(
        branches, BudgetPolicy(early_stop=EarlyStop(min_mean_log_prob=-1.5)), Limits(max_tokens=200), log_probs
    )
    assert stops(result) == [BranchStop.EARLY, BranchStop.BUDGET]
    assert used(result)[0] == HEADER + 32 + 1
    assert used(result)[1] > 100  # it goes on with what the other one left


def test_what_early_stop_ends_does_not_truncate() -> None:
    policy = BudgetPolicy(FIRST_COME, TRUNCATE, early_stop=EarlyStop(1, 2.0))
    result = run({0: SHORT, 1: ENDLESS}, policy, Limits(max_branch_tokens=30))
    assert (result.outcome, stops(result)) == (Outcome.COMPLETED, [BranchStop.CLOSED, BranchStop.EARLY])


# --- what is reported and refused ---


def test_the_ledger_says_what_it_was_held_to() -> None:
    policy = BudgetPolicy(FAIR, TRUNCATE, 7, EarlyStop(1, 3.0, -4.0))
    ledger = run({0: SHORT, 1: SHORT}, policy, Limits(max_tokens=99, max_branches=5)).ledger
    assert ledger.budget == policy
    assert ledger.limits == Limits(99, 1024 - 3, 1024 - 3, 5, 16)


@pytest.mark.parametrize(
    ("field", "policy"),
    [
        ("takeaway_reserve_tokens", BudgetPolicy(takeaway_reserve_tokens=-1)),
        ("takeaway_reserve_tokens", BudgetPolicy(takeaway_reserve_tokens=50)),
        ("early_stop.quorum", BudgetPolicy(early_stop=EarlyStop(-1))),
        ("early_stop.straggler_factor", BudgetPolicy(early_stop=EarlyStop(1, 0.9))),
        ("early_stop.straggler_factor", BudgetPolicy(early_stop=EarlyStop(1, float("nan")))),
        ("early_stop.straggler_factor", BudgetPolicy(early_stop=EarlyStop(0, 2.0))),
        ("early_stop.min_mean_log_prob", BudgetPolicy(early_stop=EarlyStop(min_mean_log_prob=0.5))),
        ("early_stop.min_mean_log_prob", BudgetPolicy(early_stop=EarlyStop(min_mean_log_prob=float("nan")))),
    ],
)
def test_a_policy_that_cannot_be_is_refused(field: str, policy: BudgetPolicy) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        run({0: SHORT}, policy, Limits(max_tokens=50))
    assert list(refused.value.field_violations) == [f"budget.{field}"]


# --- whatever the model writes ---


class Babbler:
    """Says random blocks: a pure function of the trajectory's key and the place, like the sampler that serves."""

    def sample(self, logits: Any, spans: Sequence[Span]) -> Samples:
        return Samples(*map(list, zip(*(self._say(span) for span in spans), strict=True)))

    def _say(self, span: Span) -> tuple[int, float]:
        dice = np.random.default_rng([span.owner.key, span.branch + 1, span.end])
        log_prob = -float(dice.exponential(1 + span.branch % 3))
        if span.is_branch:
            words = ["</step>", END, "<plan>"] if span.branch == 5 else ["</step>"]
            return encode(str(dice.choice(words) if dice.random() < 0.06 else dice.choice(list("uvwxyz"))))[0], log_prob
        return self._trunk(span, log_prob)

    def _trunk(self, span: Span, log_prob: float) -> tuple[int, float]:
        block = sum(1 for _ in span.owner.blocks())
        dice = np.random.default_rng([span.owner.key, block])
        text = "p" * int(dice.integers(4)) if block == 0 else "t" * int(dice.integers(6)) + "</takeaway> s"
        text += guideline(int(dice.integers(1, 12))) if dice.random() < 0.8 else END
        said, index = encode(text), span.forced.count(False)
        return said[index] if index < len(said) else encode("z")[0], log_prob


def check_promises(trajectory: Trajectory) -> None:
    """What the ledger has promised can be paid in every limit."""
    ledger, policy = trajectory.ledger, trajectory.request.budget
    assert ledger.total + ledger.reserved <= ledger.limits.max_tokens
    block = trajectory.open_block
    assert (ledger.reserved, ledger.kept) == (0, 0) or block is not None
    if block is not None:
        still_open = sum(branch.open for branch in block.branches)
        assert ledger.kept == policy.takeaway_reserve_tokens
        assert ledger.reserved == still_open + CUE + ledger.kept
        longest = max(len(branch.tokens) + branch.open for branch in block.branches)
        assert trajectory.critical + longest + CUE + ledger.kept <= ledger.limits.max_critical_tokens


def decode(requests: Sequence[Request], **config: Any) -> tuple[dict[str, Result], Engine]:
    settings_of = EngineConfig(**{"page_size": 4, "pages": 2000, "audit_every_step": True, **config})
    engine = Engine(MODEL, TOKENIZER, DIALECT, settings_of, sampler=Babbler())
    for request in requests:
        engine.submit(request)
    results = {}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                results[event.result.request_id] = event.result
        for trajectory in engine._live:
            check_promises(trajectory)
    assert engine.status().pages_used == 0
    return results, engine


POLICIES = st.builds(
    BudgetPolicy,
    share=st.sampled_from(BranchShare),
    on_exhausted=st.sampled_from(Exhaustion),
    takeaway_reserve_tokens=st.sampled_from([0, 1, 15]),
    early_stop=st.sampled_from(
        [EarlyStop(), EarlyStop(1, 1.0), EarlyStop(2, 1.5), EarlyStop(3, 2.0, -1.5), EarlyStop(min_mean_log_prob=-1.2)]
    ),
)
LIMITS = st.builds(
    Limits,
    max_tokens=st.one_of(st.just(400), st.integers(16, 250)),
    max_critical_tokens=st.one_of(st.none(), st.integers(16, 200)),
    max_branch_tokens=st.one_of(st.none(), st.integers(5, 60)),
)


@settings(max_examples=30, deadline=None)
@given(policies=st.lists(st.tuples(POLICIES, LIMITS), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_under_any_policy_limits_hold_and_the_result_parses(
    policies: list[tuple[BudgetPolicy, Limits]], seed: int
) -> None:
    prompt = tuple(encode(str(seed)))
    requests = [
        Request(str(index), (*prompt, *encode("a" * index)), limits=limits, budget=policy)
        for index, (policy, limits) in enumerate(policies)
    ]
    results, _ = decode(requests)
    for request in requests:
        check_result(results[request.request_id], request)


SAID_NOTHING = {ViolationCode.EMPTY_STEP, ViolationCode.EMPTY_TAKEAWAY}
"""What is left to the model; the rest of a completed trajectory's form is the engine's to keep."""


def check_result(result: Result, request: Request) -> None:
    ledger, limits, policy = result.ledger, result.ledger.limits, request.budget
    assert limits is not None
    assert ledger.total_tokens == len(result.token_ids) - result.prompt_length <= (limits.max_tokens or 0)
    assert TAGS is not None
    tree = topology(result.token_ids, result.prompt_length, TAGS)
    assert ledger.critical_path_tokens == tree.critical_path_length <= (limits.max_critical_tokens or 0)
    parsed = parse_tokens(result.token_ids, TOKENIZER, DIALECT, result.prompt_length)
    for block, written in zip(ledger.blocks, parsed.tree.blocks, strict=False):
        spans = block.branches
        assert len(written.steps) == len(spans) or result.malformed_reason is MalformedReason.TAG_IN_STEP
        assert all(branch.used_tokens <= branch.budget_tokens <= (limits.max_branch_tokens or 0) for branch in spans)
        assert BranchStop.OPEN not in {branch.stop for branch in spans}
        if policy.share is FAIR:
            assert all(b.used_tokens == b.budget_tokens for b in spans if b.stop is BranchStop.BUDGET)
        if policy.early_stop == EarlyStop():
            assert BranchStop.EARLY not in {branch.stop for branch in spans}
    exhausted = any(branch.stop is BranchStop.BUDGET for block in ledger.blocks for branch in block.branches)
    if policy.on_exhausted is TRUNCATE and exhausted:
        assert result.outcome in (Outcome.TRUNCATED, Outcome.MALFORMED)
    if result.outcome is Outcome.COMPLETED:
        assert {violation.code for violation in parsed.violations} <= SAID_NOTHING


def essence(result: Result) -> tuple[Any, ...]:
    blocks = [
        [(b.budget_tokens, b.used_tokens, b.forced_tokens, b.stop) for b in block.branches]
        for block in result.ledger.blocks
    ]
    return result.token_ids, result.log_probs, result.outcome, result.limit, result.malformed_reason, blocks


def test_neither_batch_mates_nor_preemption_decide() -> None:
    policies = [
        BudgetPolicy(share, end, reserve, early)
        for share in BranchShare
        for end in Exhaustion
        for reserve in (0, 9)
        for early in (EarlyStop(), EarlyStop(1, 1.5, -1.3))
    ]
    requests = [
        Request(str(index), tuple(encode(f"a b {index}")), limits=Limits(max_tokens=260), budget=policy)
        for index, policy in enumerate(policies)
    ]
    alone = {request.request_id: decode([request])[0][request.request_id] for request in requests}
    loaded, engine = decode(
        [replace(request, priority=index % 3) for index, request in enumerate(requests)], pages=140, prefill_tokens=24
    )
    assert engine.status().preemptions > 10
    kinds = {branch.stop for result in alone.values() for block in result.ledger.blocks for branch in block.branches}
    assert kinds >= {BranchStop.CLOSED, BranchStop.BUDGET, BranchStop.EARLY}
    for name, result in alone.items():
        assert essence(loaded[name]) == essence(result)
