"""The KV pool and its tables, alone and under random operations on the whole engine."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from npr_common.dialects import load_dialect
from npr_rollout.engine.audit import audit
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.kv_pool import KvPool, KvShape, PageAccountingError
from npr_rollout.engine.page_table import PageTables
from npr_rollout.engine.prompts import SharedPrompts
from npr_rollout.engine.sampling import Samples
from npr_rollout.record.outcomes import ForkRefusal, Outcome
from npr_rollout.record.request import FinishedEvent, Limits, Request, Result
from npr_rollout.testing.models import tagged_tokenizer, tiny_model
from npr_rollout.testing.trees import TreeMaker

TOKENIZER = tagged_tokenizer()
MODEL = tiny_model("qwen3", TOKENIZER, hidden=16, layers=1)


def tables(pages: int = 20, page_size: int = 4) -> PageTables:
    return PageTables(KvPool(KvShape(1, 1, 2, torch.float32, torch.device("cpu")), pages, page_size))


def slots(table: PageTables, row: int) -> list[int]:
    ids: list[int] = table.slots[row, : table.length[row]].tolist()
    return ids


def test_a_fork_shares_and_copies_nothing() -> None:
    table = tables()
    parent = table.open()
    table.extend(parent, 6)
    children = [table.fork(parent) for _ in range(3)]
    assert table.pool.free_pages == 20 - 2
    for child in children:
        table.extend(child, 1)
    assert table.pool.free_pages == 20 - 2 - 3
    assert all(slots(table, child)[:6] == slots(table, parent) for child in children)
    assert len({slots(table, child)[6] for child in children}) == 3


def test_a_join_hands_pages_over_in_plan_order() -> None:
    table = tables()
    parent = table.open()
    table.extend(parent, 5)
    first, second = table.fork(parent), table.fork(parent)
    table.extend(first, 3)
    table.extend(second, 6)
    expected = slots(table, parent) + slots(table, first)[5:] + slots(table, second)[5:]
    before = table.pool.free_pages
    table.join(parent, [first, second])
    assert slots(table, parent) == expected
    assert table.pool.free_pages == before
    table.extend(parent, 2)
    assert table.pool.free_pages == before  # it goes on in the last branch's page
    table.close(parent)
    assert table.pool.free_pages == 20


def test_freeing_twice_is_an_error() -> None:
    table = tables()
    row = table.open()
    table.extend(row, 1)
    pages = table.pages_of(row)
    table.close(row)
    with pytest.raises(PageAccountingError, match="twice"):
        table.pool.release(pages)


def test_a_parent_must_not_grow_while_branches_are_open() -> None:
    table = tables()
    parent = table.open()
    table.extend(parent, 2)
    child = table.fork(parent)
    table.extend(parent, 1)
    with pytest.raises(PageAccountingError, match="grew"):
        table.join(parent, [child])


@pytest.mark.parametrize("fault", ["count", "free", "slot"])
def test_the_audit_finds_faults(fault: str) -> None:
    table = tables()
    prompts = SharedPrompts(table)
    row = prompts.acquire((1, 2, 3)).row
    table.extend(row, 6)
    assert not audit(table, prompts, [])
    if fault == "count":
        table.pool.share(table.pages_of(row)[:1])
    elif fault == "free":
        table.pool._free.append(table.pages_of(row)[0])
    else:
        table.slots[row, 1] = table.slots[row, 0]
    assert audit(table, prompts, [])


def test_members_of_a_group_share_their_prompt() -> None:
    engine = Engine(MODEL, TOKENIZER, load_dialect("npr"), EngineConfig(page_size=4, pages=100))
    prompt = tuple(TreeMaker(TOKENIZER).words(20))
    for index in range(8):
        engine.submit(Request(str(index), prompt, limits=Limits(max_tokens=4)))
    engine.step()
    assert engine.status().pages_used <= 10 + 8


def test_what_is_needed_is_what_is_allocated() -> None:
    """To the page, in every step, with forks, joins and recomputations on the way."""
    engine = Engine(MODEL, TOKENIZER, load_dialect("npr"), EngineConfig(page_size=4, pages=90), sampler=SoupSampler(5))
    feeder, pool = engine._feeder, engine._pool
    plain_feed = feeder.feed

    def feed(trajectory: Any, chunks: Any, budget: int) -> int:
        expected, before = feeder.pages_needed([trajectory]), pool.free_pages
        planned = plain_feed(trajectory, chunks, budget)
        assert before - pool.free_pages == expected
        return planned

    feeder.feed = feed  # type: ignore[method-assign]
    for index in range(30):
        prompt = tuple(TreeMaker(TOKENIZER, index).words(8))
        engine.submit(Request(str(index), prompt, limits=Limits(max_tokens=120)))
    while not engine.idle:
        engine.step()
    assert engine.status().joins > 3
    assert engine.status().preemptions > 3


class SoupSampler:
    """Structure and nonsense, weighted so that all of it is reached."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._maker = TreeMaker(TOKENIZER, seed)
        self._said: dict[int, list[int]] = {}

    def sample(self, logits: Any, spans: Any) -> Samples:
        return Samples([self._token(span) for span in spans], [-0.5] * len(spans))

    def _token(self, span: Any) -> int:
        queue = self._said.setdefault(id(span), [])
        if not queue:
            queue.extend(self._phrase(span.is_branch))
        return queue.pop(0)

    def _phrase(self, branch: bool) -> list[int]:
        pick = self._random.random()
        if pick < 0.05:
            return self._maker.text(self._random.choice(["<plan>", "</takeaway>", "<|end|>", "<step>"]))
        if branch:
            return self._maker.text("</step>") if pick < 0.4 else self._maker.words(3)
        if pick < 0.5:
            guideline = self._maker.block(self._random.randint(1, 4), 1)
            end = guideline.index(self._maker.text("</guideline>")[0])
            return guideline[: end + 1]
        return self._maker.text("</takeaway>") if pick < 0.75 else self._maker.words(2)


class EngineMachine(RuleBasedStateMachine):
    """Submits, steps and aborts in any order, on a pool that is too small; the audit holds after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(
            MODEL,
            TOKENIZER,
            load_dialect("npr"),
            EngineConfig(page_size=4, pages=60, audit_every_step=True),
            sampler=SoupSampler(0),
        )
        self.submitted: list[str] = []
        self.results: list[Result] = []

    @rule(
        words=st.integers(1, 20),
        prompt=st.integers(0, 3),
        tokens=st.integers(1, 150),
        priority=st.integers(0, 2),
        serialize=st.booleans(),
    )
    def submit(self, words: int, prompt: int, tokens: int, priority: int, serialize: bool) -> None:
        name = str(len(self.submitted))
        self.submitted.append(name)
        self.engine.submit(
            Request(
                name,
                tuple(TreeMaker(TOKENIZER, prompt).words(words)),
                limits=Limits(max_tokens=tokens),
                priority=priority,
                fork_refusal=ForkRefusal.SERIALIZE if serialize else ForkRefusal.REJECT,
            )
        )

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._collect()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.submitted:
            self.engine.abort(data.draw(st.sampled_from(self.submitted)))

    @invariant()
    def sound(self) -> None:
        assert not self.engine.audit()

    def teardown(self) -> None:
        while not self.engine.idle:
            self._collect()
        self._collect()
        assert self.engine.status().pages_used == 0
        assert sorted(result.request_id for result in self.results) == sorted(self.submitted)
        for result in self.results:
            check_result(result)

    def _collect(self) -> None:
        self.results += [event.result for event in self.engine.step() if isinstance(event, FinishedEvent)]


def check_result(result: Result) -> None:
    response = len(result.token_ids) - result.prompt_length
    assert len(result.log_probs) == len(result.forced) == result.ledger.total_tokens == response
    assert result.ledger.forced_tokens == sum(result.forced)
    assert result.outcome in Outcome


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
