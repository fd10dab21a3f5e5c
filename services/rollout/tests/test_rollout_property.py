"""A hundred thousand random operations on an engine whose pool is too small for its load.

A seeded driver rather than hypothesis's state machine: that keeps and shrinks whole histories, which takes minutes for
a thousandth of the length that is wanted here. A failure names seed and operation, and happens again with them.

The model is real and random, so its tokens depend on every key and value they attend to: a page that is given to the
wrong one, or too early, shows in a trajectory that was decoded again alone. Structure, which a random model doesn't
write, comes from a guide that knows only the request and the place in it.
"""

from __future__ import annotations

import copy
import functools
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from npr_common.dialects import load_dialect
from npr_common.tags import TagIds
from npr_common.topology import topology
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.sampling import RandomSampler, Samples
from npr_rollout.record.outcomes import BranchShare, BranchStop, Exhaustion, ForkRefusal, Outcome, Visibility
from npr_rollout.record.request import (
    BudgetPolicy,
    EarlyStop,
    FinishedEvent,
    Limits,
    Request,
    Result,
    SamplingParams,
    TokensEvent,
)
from npr_rollout.status import EngineStatus
from npr_rollout.testing.models import tagged_tokenizer, tiny_model

DIALECT = load_dialect("npr")
TOKENIZER = tagged_tokenizer()
_TAGS = TagIds.from_tokenizer(TOKENIZER, DIALECT)
assert _TAGS is not None
SPECIAL = torch.tensor(sorted({*_TAGS, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id}))
MODELS = [tiny_model("qwen3", TOKENIZER, seed, hidden=16, layers=1) for seed in range(2)]
"""A swap goes from one to the other."""

FREE, RAW = -1, -2
"""Items of a guide: a token drawn from the logits, without tags and with them."""

SEED = int(os.environ.get("NPR_PROPERTY_SEED", "0"))
SHARE = float(os.environ.get("NPR_PROPERTY_SHARE", "1"))
"""A hundredth or a hundred times as many operations."""

OPERATIONS = {"pages of four": 36_000, "pages of one": 30_000, "pages of sixteen": 26_000, "token by token": 9_000}
CONFIGS = {
    "pages of four": {"page_size": 4, "pages": 130, "max_running": 40, "prefill_tokens": 60},
    "pages of one": {"page_size": 1, "pages": 400, "max_running": 40, "prefill_tokens": 40},
    "pages of sixteen": {"page_size": 16, "pages": 48, "max_running": 60, "prefill_tokens": 200},
    "token by token": {"page_size": 2, "pages": 100, "max_running": 8, "prefill_tokens": 3},
}


@functools.cache
def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


class Guide:
    """What a request's model is made to write: by its seed, block and branch."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        random = np.random.default_rng([seed, 1])
        self._trunk: list[int] = []
        for _ in range(random.integers(1, 4)):
            self._trunk += [FREE] * int(random.integers(0, 3)) + [*self._guideline(random)]
            self._trunk += [FREE] * int(random.integers(0, 3)) + [*encode("</takeaway>")]
        self._trunk += [FREE] * int(random.integers(1, 6)) + ([RAW] * 3 if random.random() < 0.1 else [])

    def trunk(self, index: int) -> int:
        """The item at an index of the sampled tokens of the trunk."""
        return self._trunk[index] if index < len(self._trunk) else int(TOKENIZER.eos_token_id)

    def branch(self, block: int, branch: int, index: int) -> int:
        """The item at an index of the sampled tokens of a branch."""
        length, kind = self._branch(block, branch)
        if index < length:
            return FREE
        if kind < 0.04:
            return FREE  # for ever: until a budget ends it
        if kind < 0.06:
            return int(TOKENIZER.eos_token_id)
        return RAW if kind < 0.1 else encode("</step>")[0]

    @functools.cache  # noqa: B019 - guides live as long as the tests
    def _branch(self, block: int, branch: int) -> tuple[int, float]:
        random = np.random.default_rng([self._seed, 2, block, branch])
        return int(random.integers(0, 5)), random.random()

    @staticmethod
    def _guideline(random: np.random.Generator) -> tuple[int, ...]:
        plans = int(random.integers(1, 5))
        text = "".join(f"<plan>{index + 1}: a</plan>" for index in range(plans))
        flaw = random.random()
        if flaw < 0.05:
            text = text.replace("1:", "2:")
        elif flaw < 0.1:
            text = ""
        elif flaw < 0.13:
            text += "<step>"
        return encode(f"<guideline>{text}</guideline>")


@functools.cache
def guide_of(seed: int) -> Guide:
    return Guide(seed)


class GuidedSampler:
    """Draws as `RandomSampler` does, except for what the guides say."""

    def __init__(self) -> None:
        self._taken: Counter[tuple[str, int, int]] = Counter()
        self._random = RandomSampler()

    def sample(self, logits: torch.Tensor, spans: Sequence[Any]) -> Samples:
        """See `Sampler`."""
        items = [self._item(span) for span in spans]
        tame = torch.tensor([i for i, item in enumerate(items) if item != RAW], dtype=torch.long)
        logits = logits.clone()
        logits[tame[:, None], SPECIAL] = float("-inf")
        drawn = self._random.sample(logits, spans)
        said = [(i, item) for i, item in enumerate(items) if item >= 0]
        tokens, log_probs = list(drawn.tokens), list(drawn.log_probs)
        for i, item in said:
            tokens[i], log_probs[i] = item, -1.0
        return replace(drawn, tokens=tokens, log_probs=log_probs)

    def _item(self, span: Any) -> int:
        request = span.owner.request
        guide = guide_of(request.sampling.seed)
        place = (request.request_id, span.block, span.branch) if span.is_branch else (request.request_id, -1, -1)
        index = self._taken[place]
        self._taken[place] += 1
        return guide.branch(span.block, span.branch, index) if span.is_branch else guide.trunk(index)


@dataclass
class Driver:
    """Does random things to an engine, and checks it after each.

    Attributes:
        done: operations by kind; those that happen inside of the engine are added from its status.
        results: by request id, with the model that decoded it.
    """

    config: dict[str, Any]
    random: np.random.Generator
    now: float = 0.0
    version: int = 0
    done: Counter[str] = field(default_factory=Counter)
    requests: dict[str, Request] = field(default_factory=dict)
    results: dict[str, tuple[int, Result]] = field(default_factory=dict)
    streamed: dict[str, list[TokensEvent]] = field(default_factory=lambda: defaultdict(list))
    idle_steps: int = 0

    def __post_init__(self) -> None:
        self.prompts = [self._tokens(int(self.random.integers(1, 24))) for _ in range(16)]
        self.past = EngineStatus.zero()
        self.engine = self._make()

    def act(self) -> None:
        """One random operation."""
        live = len(self.requests) - len(self.results)
        kind = self.random.random()
        if live < 100 and kind < 0.8:
            self._submit()
        elif 0.8 < kind < 0.82:
            self._abort()
        elif 0.82 < kind < 0.85:
            self.now += float(self.random.exponential(4.0))
        elif 0.85 < kind < 0.8505:
            self._swap()
        else:
            self.step()

    def step(self) -> None:
        """One step, its events, and the accounts."""
        before = self.engine.status().tokens
        for event in self.engine.step():
            self._hear(event)
        status = self.engine.status()
        assert status.pages_used + status.pages_cached <= status.pages_total
        self.idle_steps = 0 if status.tokens > before or self.engine.idle else self.idle_steps + 1
        assert self.idle_steps < 200, "the engine has work, but nothing gets on"

    def finish(self) -> None:
        """Let everything end; nothing may be left."""
        while not self.engine.idle:
            self.step()
        self.step()
        status = self.engine.status()
        assert status.pages_used == 0
        assert not self.engine.audit()
        assert self.results.keys() == self.requests.keys()

    def operations(self) -> Counter[str]:
        """What has been done and what has happened."""
        status = self.past.plus(self.engine.status())
        inside = {name: getattr(status, name) for name in ("forks", "joins", "preemptions", "evictions")}
        ends = Counter(result.outcome.name.lower() for _, result in self.results.values())
        return self.done + Counter(inside) + Counter({"deadlines": ends["deadline"]})

    def _make(self) -> Engine:
        config = EngineConfig(audit_every_step=True, **self.config)
        model = copy.deepcopy(MODELS[self.version % 2])
        return Engine(
            model,
            TOKENIZER,
            DIALECT,
            config,
            policy_version=self.version,
            sampler=GuidedSampler(),
            clock=lambda: self.now,
        )

    def _submit(self) -> None:
        random = self.random
        new = random.random() < 0.2
        prompt = self._tokens(int(random.integers(1, 40))) if new else self.prompts[random.integers(len(self.prompts))]
        max_tokens = int(random.choice([1, 30, 60, 100, 100, 100, 400]))
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            SamplingParams(
                temperature=float(random.choice([0.0, 0.7, 1.0])),
                top_p=float(random.choice([0.8, 1.0])),
                top_k=int(random.choice([0, 5])),
                repetition_penalty=float(random.choice([1.0, 1.3])),
                min_p=float(random.choice([0.0, 0.0, 0.1])),
                raw_log_probs=bool(random.random() < 0.2),
                seed=int(random.integers(1 << 30)),
            ),
            Limits(
                max_tokens=max_tokens,
                max_branch_tokens=int(random.choice([6, 12, 40])),
                max_branches=int(random.choice([2, 3, 8])),
                max_blocks=int(random.choice([1, 4])),
            ),
            visibility=Visibility(int(random.choice([Visibility.PARALLEL] * 4 + [Visibility.SEQUENTIAL]))),
            fork_refusal=ForkRefusal(int(random.choice([ForkRefusal.REJECT, ForkRefusal.SERIALIZE]))),
            priority=int(random.choice([0, 0, 0, 1, 5])),
            deadline=self.now + float(random.exponential(40.0)) if random.random() < 0.3 else None,
            stream=bool(random.random() < 0.3),
            job=str(random.integers(3)),
            budget=BudgetPolicy(
                BranchShare(int(random.choice(list(BranchShare)))),
                Exhaustion(int(random.choice([Exhaustion.CLOSE, Exhaustion.CLOSE, Exhaustion.TRUNCATE]))),
                takeaway_reserve_tokens=int(random.choice([0, 0, 10])) if max_tokens > 10 else 0,
                early_stop=EarlyStop(1, 1.5) if random.random() < 0.3 else EarlyStop(),
            ),
        )
        self.requests[request.request_id] = request
        self.engine.submit(request)
        self.done["submits"] += 1

    def _abort(self) -> None:
        waiting = [name for name in self.requests if name not in self.results]
        if waiting:
            name = waiting[self.random.integers(len(waiting))]
            self.engine.abort(name)
            self.done["aborts"] += 1

    def _swap(self) -> None:
        """The other model takes over; what is on its way ends first, or is aborted."""
        if self.random.random() < 0.5:
            for name in [name for name in self.requests if name not in self.results]:
                self.engine.abort(name)
        while not self.engine.idle:
            self.step()
        self.step()
        assert self.engine.status().pages_used == 0
        self.past = self.past.plus(self.engine.status())
        self.version += 1
        self.engine = self._make()
        self.done["swaps"] += 1

    def _hear(self, event: Any) -> None:
        if isinstance(event, TokensEvent):
            self.streamed[event.request_id].append(event)
            return
        assert isinstance(event, FinishedEvent)
        result = event.result
        assert result.request_id not in self.results, "it ended twice"
        assert result.policy_version == self.version
        self.results[result.request_id] = (self.version, result)

    def _tokens(self, count: int) -> tuple[int, ...]:
        words = [i for i in range(len(TOKENIZER)) if i not in set(SPECIAL.tolist())]
        return tuple(self.random.choice(words, count).tolist())


def check_result(request: Request, result: Result, streamed: Sequence[TokensEvent]) -> None:
    """What holds of every end."""
    response = result.token_ids[result.prompt_length :]
    assert result.outcome in set(Outcome)
    assert result.token_ids[: result.prompt_length] == request.prompt_ids
    assert len(response) == len(result.log_probs) == len(result.forced) == result.ledger.total_tokens
    if request.sampling.raw_log_probs and result.outcome is not Outcome.REFUSED:
        assert len(result.raw_log_probs) == len(response)
    if request.limits.max_tokens is not None:
        assert result.ledger.total_tokens <= request.limits.max_tokens
    for block in result.ledger.blocks:
        for branch in block.branches:
            assert branch.used_tokens <= branch.budget_tokens
            assert branch.stop is not BranchStop.OPEN
    if request.stream and result.outcome is not Outcome.REFUSED:
        spans: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for event in streamed:
            place = (event.block, event.branch) if event.branch >= 0 else (-1, -1)
            for offset, token in enumerate(event.token_ids):
                assert event.position + offset not in spans[place], "a token was told twice"
                spans[place][event.position + offset] = token
        assert Counter(t for span in spans.values() for t in span.values()) == Counter(response)
    if (
        result.outcome is Outcome.COMPLETED
        and not result.serialized_blocks
        and result.visibility is Visibility.PARALLEL
    ):
        shape = topology(result.token_ids, result.prompt_length, _TAGS)
        assert shape.critical_path_length == result.ledger.critical_path_tokens


def alone(request: Request, version: int, config: dict[str, Any]) -> Result:
    """The same request in an engine of this size that it has to itself: how much fits is the size's to say."""
    model = copy.deepcopy(MODELS[version % 2])
    engine = Engine(model, TOKENIZER, DIALECT, EngineConfig(**config), sampler=GuidedSampler())
    engine.submit(replace(request, deadline=None, stream=False))
    results = []
    while not engine.idle:
        results += [event.result for event in engine.step() if isinstance(event, FinishedEvent)]
    [result] = results
    return result


@pytest.mark.parametrize("name", CONFIGS)
def test_a_long_random_history(name: str) -> None:
    config = CONFIGS[name]
    driver = Driver(config, np.random.default_rng([SEED, list(CONFIGS).index(name)]))
    count = 0
    try:
        while sum(driver.operations().values()) < OPERATIONS[name] * SHARE:
            for _ in range(100):
                driver.act()
                count += 1
        driver.finish()
    except Exception as error:
        error.add_note(f"{name}: NPR_PROPERTY_SEED={SEED}, action {count}")
        raise
    done = driver.operations()
    for kind in ("submits", "forks", "joins", "aborts", "deadlines", "preemptions", "evictions"):
        assert done[kind] > 50 * SHARE, f"{kind}: {done}"
    assert done["swaps"] >= int(3 * SHARE)
    for request_id, (_, result) in driver.results.items():
        check_result(driver.requests[request_id], result, driver.streamed[request_id])
    _compare_with_alone(driver)


def _compare_with_alone(driver: Driver) -> None:
    """Tokens and log-probabilities are the same to the bit, however crowded it was."""
    natural = [
        (request_id, version, result)
        for request_id, (version, result) in driver.results.items()
        if result.outcome in {Outcome.COMPLETED, Outcome.MALFORMED, Outcome.TRUNCATED}
    ]
    preempted = [entry for entry in natural if entry[2].ledger.preemptions]
    assert len(preempted) > 50 * SHARE
    chosen = preempted[:: max(1, len(preempted) // 150)] + natural[:: max(1, len(natural) // 150)]
    for request_id, version, result in chosen:
        expected = alone(driver.requests[request_id], version, driver.config)
        assert result.token_ids == expected.token_ids, request_id
        assert result.log_probs == expected.log_probs, request_id
        assert (result.outcome, result.malformed_reason) == (expected.outcome, expected.malformed_reason), request_id
