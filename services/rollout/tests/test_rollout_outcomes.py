"""Every way in which a trajectory can end, and what its ledger says then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from npr_common.dialects import load_dialect
from npr_common.errors import AlreadyExistsError, InvalidArgumentError
from npr_common.schema import parse_tokens
from npr_common.tags import TagIds
from npr_common.tokenizers import add_tag_tokens
from npr_common.topology import topology
from npr_rollout.engine.admission import resolve_limits
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.sampling import Samples
from npr_rollout.record.admission import check_request
from npr_rollout.record.outcomes import BranchStop, ForkRefusal, LimitKind, MalformedReason, Outcome, Visibility
from npr_rollout.record.request import Event, FinishedEvent, Limits, Request, Result, SamplingParams, TokensEvent
from npr_rollout.testing.models import plain_tokenizer, tagged_tokenizer, tiny_model

DIALECT = load_dialect("npr")
TOKENIZER = tagged_tokenizer()
TAGS = TagIds.from_tokenizer(TOKENIZER, DIALECT)
MODEL = tiny_model("qwen3", TOKENIZER, hidden=32, layers=2)
END = "<|end|>"
GUIDELINE = "<guideline><plan>1: a b</plan><plan>2: c</plan></guideline>"


class Dictated:
    """Says a text on the trunk and one in each branch, by its place in the block; then the fallback for ever."""

    def __init__(self, trunk: str, branches: Mapping[int, str] | None = None, fallback: str = "z") -> None:
        self._said = {-1: encode(trunk), **{k: encode(v) for k, v in (branches or {}).items()}}
        self._fallback = encode(fallback)[0]
        self._next: dict[tuple[int, int], int] = {}

    def sample(self, logits: Any, spans: Any) -> Samples:
        return Samples([self._token(span) for span in spans], [-1.0] * len(spans))

    def _token(self, span: Any) -> int:
        place = (span.block, span.branch)
        index = self._next.get(place, 0)
        self._next[place] = index + 1
        said = self._said.get(span.branch, [])
        return said[index] if index < len(said) else self._fallback


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def engine_for(sampler: Any = None, tokenizer: Any = TOKENIZER, **config: Any) -> Engine:
    defaults = {"page_size": 4, "pages": 400, "audit_every_step": True}
    return Engine(MODEL, tokenizer, DIALECT, EngineConfig(**{**defaults, **config}), sampler=sampler)


def drive(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
    return events + engine.step()


def request(name: str = "r", **fields: Any) -> Request:
    return Request(name, tuple(encode(fields.pop("prompt", "a b"))), **fields)


def run(trunk: str, branches: Mapping[int, str] | None = None, **fields: Any) -> tuple[Result, Engine]:
    config = fields.pop("config", {})
    engine = engine_for(Dictated(trunk, branches), **config)
    engine.submit(request(**fields))
    results = [event.result for event in drive(engine) if isinstance(event, FinishedEvent)]
    assert len(results) == 1
    assert engine.status().pages_used == 0
    assert not engine.audit()
    return results[0], engine


def text_of(result: Result) -> str:
    text: str = TOKENIZER.decode(result.token_ids[result.prompt_length :])
    return text


CLOSED = {0: " x y</step>", 1: " u</step>"}
WHOLE = f"{GUIDELINE} t</takeaway> s{END}"


def test_a_well_formed_response_completes() -> None:
    result, engine = run("p" + WHOLE, CLOSED)
    assert result.outcome is Outcome.COMPLETED
    expected = f"p{GUIDELINE}\n<step>1: x y</step>\n<step>2: u</step>\n<takeaway> t</takeaway> s{END}"
    assert text_of(result) == expected
    assert parse_tokens(result.token_ids, TOKENIZER, DIALECT, result.prompt_length).well_formed
    assert (engine.status().forks, engine.status().joins) == (1, 1)


def test_the_ledger_counts_all_branches() -> None:
    result, _ = run("p" + WHOLE, CLOSED)
    ledger, block = result.ledger, result.ledger.blocks[0]
    tree = topology(result.token_ids, result.prompt_length, TAGS)
    assert ledger.total_tokens == len(result.token_ids) - result.prompt_length == len(result.forced)
    assert ledger.critical_path_tokens == tree.critical_path_length < ledger.total_tokens
    assert ledger.forced_tokens == sum(result.forced) == 2 * 4 + 2
    assert [branch.stop for branch in block.branches] == [BranchStop.CLOSED] * 2
    assert [branch.used_tokens for branch in block.branches] == [9, 7]
    assert block.critical_path_tokens == 9
    # Forced tokens ride along, so there are fewer steps than tokens on the critical path.
    assert ledger.engine_steps < ledger.critical_path_tokens


def test_forced_tokens_have_no_log_prob() -> None:
    result, _ = run("p" + WHOLE, CLOSED)
    assert all((value == 0.0) == forced for value, forced in zip(result.log_probs, result.forced, strict=True))


@pytest.mark.parametrize(
    ("guideline", "reason", "limits"),
    [
        ("<guideline></guideline>", MalformedReason.NO_PLAN, Limits()),
        ("<guideline><plan>2: a</plan></guideline>", MalformedReason.LABELS, Limits()),
        ("<guideline><plan>a</plan></guideline>", MalformedReason.LABELS, Limits()),
        ("<guideline><plan>1: </plan></guideline>", MalformedReason.EMPTY_PLAN, Limits()),
        (GUIDELINE, MalformedReason.TOO_MANY_BRANCHES, Limits(max_branches=1)),
        (GUIDELINE, MalformedReason.TOO_MANY_BLOCKS, Limits(max_blocks=0)),
        (GUIDELINE, MalformedReason.LEDGER, Limits(max_tokens=25)),
        (GUIDELINE, MalformedReason.LEDGER, Limits(max_branch_tokens=4)),
    ],
)
def test_a_fork_is_refused_with_its_reason(guideline: str, reason: MalformedReason, limits: Limits) -> None:
    result, engine = run(guideline, limits=limits)
    assert (result.outcome, result.malformed_reason) == (Outcome.MALFORMED, reason)
    assert engine.status().fork_refusals == {reason: 1}
    assert result.token_ids[result.prompt_length :] == tuple(encode(guideline))


def test_a_fork_that_the_pool_can_never_pay_is_refused() -> None:
    plans = "".join(f"<plan>{i}: a</plan>" for i in range(1, 9))
    result, _ = run(f"<guideline>{plans}</guideline>", limits=Limits(max_tokens=150), config={"pages": 42})
    assert (result.outcome, result.malformed_reason) == (Outcome.MALFORMED, MalformedReason.KV_POOL)


def test_serialize_goes_on_without_a_fork() -> None:
    said = f"{GUIDELINE}\n<step>1: x</step>\n<step>2: y</step>\n<takeaway>t</takeaway> s{END}"
    result, engine = run(said, limits=Limits(max_branches=1), fork_refusal=ForkRefusal.SERIALIZE)
    assert (result.outcome, result.serialized_blocks) == (Outcome.COMPLETED, 1)
    assert result.malformed_reason is MalformedReason.TOO_MANY_BRANCHES
    assert text_of(result) == said
    assert not any(result.forced)
    assert engine.status().forks == 0


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("a</plan>", MalformedReason.UNEXPECTED_TAG),
        ("a<step>", MalformedReason.UNEXPECTED_TAG),
        ("<guideline><guideline>", MalformedReason.UNEXPECTED_TAG),
        (f"<guideline><plan>1: a{END}", MalformedReason.UNEXPECTED_TAG),
    ],
)
def test_a_tag_where_none_can_be_is_malformed(said: str, reason: MalformedReason) -> None:
    result, _ = run(said)
    assert (result.outcome, result.malformed_reason) == (Outcome.MALFORMED, reason)


def test_a_tag_in_a_step_ends_the_whole_trajectory_parseably() -> None:
    result, _ = run(GUIDELINE, {0: " x<plan>", 1: " u v w x y z"})
    assert (result.outcome, result.malformed_reason) == (Outcome.MALFORMED, MalformedReason.TAG_IN_STEP)
    assert text_of(result) == f"{GUIDELINE}\n<step>1: x<plan></step>\n<step>2: u </step>"
    assert [branch.stop for branch in result.ledger.blocks[0].branches] == [BranchStop.TAG, BranchStop.ABORTED]
    assert result.branch_truncated


def test_a_tag_in_a_serialized_step_is_malformed() -> None:
    said = f"{GUIDELINE}<step>1: x<plan>"
    result, _ = run(said, limits=Limits(max_branches=1), fork_refusal=ForkRefusal.SERIALIZE)
    assert (result.outcome, result.malformed_reason) == (Outcome.MALFORMED, MalformedReason.TAG_IN_STEP)


def test_eos_in_a_branch_is_dropped_and_the_join_goes_on() -> None:
    result, _ = run(WHOLE, {0: f" x{END}", 1: " u v</step>"})
    assert (result.outcome, result.branch_truncated) == (Outcome.COMPLETED, True)
    assert "1: x</step>" in text_of(result)
    assert [branch.stop for branch in result.ledger.blocks[0].branches] == [BranchStop.EOS, BranchStop.CLOSED]


def test_a_branch_over_its_budget_is_closed() -> None:
    result, _ = run(WHOLE, {0: " x x x x x x x", 1: " u</step>"}, limits=Limits(max_branch_tokens=8))
    assert (result.outcome, result.branch_truncated) == (Outcome.COMPLETED, True)
    longest = result.ledger.blocks[0].branches[0]
    assert (longest.stop, longest.used_tokens, longest.budget_tokens) == (BranchStop.BUDGET, 8, 8)


def test_max_tokens_is_the_total_over_all_branches() -> None:
    result, _ = run(GUIDELINE, {0: " x" * 99, 1: " u" * 99}, limits=Limits(max_tokens=60))
    assert (result.outcome, result.limit) == (Outcome.TRUNCATED, LimitKind.TOKENS)
    assert 58 <= result.ledger.total_tokens <= 60
    assert parse_tokens(result.token_ids, TOKENIZER, DIALECT, result.prompt_length).tree.blocks[0].steps
    assert text_of(result).count("</step>") == 2


@pytest.mark.parametrize(("limit", "kind"), [(40, LimitKind.CRITICAL_TOKENS), (None, LimitKind.CONTEXT)])
def test_the_critical_path_is_limited(limit: int | None, kind: LimitKind) -> None:
    limits, config = Limits(max_critical_tokens=limit), {"pages": 2000}
    result, _ = run(GUIDELINE, {0: " x" * 9999, 1: " u</step>"}, limits=limits, config=config)
    assert (result.outcome, result.limit) == (Outcome.TRUNCATED, kind)
    assert result.ledger.critical_path_tokens == (limit or 1024 - result.prompt_length)


def test_a_deadline_reaches_every_branch() -> None:
    now, deadline = [0.0], 1.0
    engine = Engine(
        MODEL, TOKENIZER, DIALECT, EngineConfig(pages=400), sampler=Dictated(GUIDELINE), clock=lambda: now[0]
    )
    engine.submit(request(deadline=deadline))
    for _ in range(len(encode(GUIDELINE)) + 5):
        assert not [event for event in engine.step() if isinstance(event, FinishedEvent)]
    now[0] = deadline
    [finished] = [event for event in drive(engine) if isinstance(event, FinishedEvent)]
    assert finished.result.outcome is Outcome.DEADLINE
    used = [branch.used_tokens for branch in finished.result.ledger.blocks[0].branches]
    assert len(used) == 2
    assert min(used) > 0
    assert engine.status().pages_used == 0


def test_an_abort_at_any_step_gives_every_page_back() -> None:
    steps = run(WHOLE, CLOSED)[0].ledger.engine_steps
    for moment in range(steps):
        engine = engine_for(Dictated(WHOLE, CLOSED))
        engine.submit(request())
        for _ in range(moment):
            engine.step()
        assert engine.abort("r")
        assert engine.status().pages_used == 0
        finished = [event for event in engine.step() if isinstance(event, FinishedEvent)]
        assert [event.result.outcome for event in finished] == [Outcome.ABORTED]
        assert not engine.abort("r")


def test_what_can_never_fit_is_refused_at_once() -> None:
    result, engine = run("", limits=Limits(max_tokens=5000))
    assert result.outcome is Outcome.REFUSED
    assert "lower max_tokens to" in result.message
    assert engine.status().steps == 0


def test_sequential_visibility_never_forks() -> None:
    said = f"{GUIDELINE}</step><plan>{END}"
    result, engine = run(said, visibility=Visibility.SEQUENTIAL)
    assert result.outcome is Outcome.COMPLETED
    assert text_of(result) == said
    assert engine.status().forks == 0


def test_without_tag_tokens_nothing_forks() -> None:
    engine = Engine(MODEL, plain_tokenizer(), DIALECT, EngineConfig(pages=100), sampler=Dictated(WHOLE))
    ids = plain_tokenizer().encode(GUIDELINE, add_special_tokens=False)
    assert len(ids) > len(encode(GUIDELINE))
    engine.submit(request(limits=Limits(max_tokens=20)))
    drive(engine)
    assert engine.status().forks == 0


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("sampling.repetition_penalty", Request("r", (1,), SamplingParams(repetition_penalty=1e-38))),
        ("sampling.repetition_penalty", Request("r", (1,), SamplingParams(repetition_penalty=1e38))),
        ("deadline", Request("r", (1,), deadline=float("nan"))),
        ("limits.max_tokens", Request("r", (1,), limits=Limits(max_tokens=0))),
        ("limits.max_branch_tokens", Request("r", (1,), limits=Limits(max_branch_tokens=-5))),
        ("limits.max_blocks", Request("r", (1,), limits=Limits(max_blocks=-1))),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_field(field: str, request_: Request) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        check_request(request_, context=100, vocab_size=10)
    assert set(refused.value.field_violations) == {field}


@pytest.mark.parametrize("pages", [3, 4, 5, 6])
def test_a_small_pool_grants_what_it_holds(pages: int) -> None:
    """A request without a limit gets a page of tokens at least, or is refused."""
    limits, obstacle = resolve_limits(Request("r", (1, 2, 3)), EngineConfig(pages=pages, page_size=4), context=100)
    assert obstacle or limits.max_tokens >= 4


@pytest.mark.parametrize("prompt", ["", "a " * 600])
def test_a_prompt_that_cannot_be_is_an_error(prompt: str) -> None:
    with pytest.raises(InvalidArgumentError, match="prompt"):
        engine_for().submit(request(prompt=prompt))


def test_a_request_id_is_used_once_at_a_time() -> None:
    engine = engine_for()
    engine.submit(request())
    with pytest.raises(AlreadyExistsError):
        engine.submit(request())


def test_streamed_tokens_are_the_result() -> None:
    engine = engine_for(Dictated("p" + WHOLE, CLOSED))
    engine.submit(request(stream=True))
    events = drive(engine)
    last = events[-1]
    assert isinstance(last, FinishedEvent)
    tree = topology(last.result.token_ids, last.result.prompt_length, TAGS)
    place = {
        (int(p), int(b)): token
        for p, b, token in zip(tree.positions, tree.branch_of, last.result.token_ids, strict=True)
    }
    told = {
        (event.position + i, event.branch): token
        for event in events
        if isinstance(event, TokensEvent)
        for i, token in enumerate(event.token_ids)
    }
    assert told == {key: token for key, token in place.items() if key[0] >= last.result.prompt_length}


def test_another_dialect_is_served_by_its_table() -> None:
    dialect = load_dialect("multiverse")
    tokenizer = add_tag_tokens(plain_tokenizer(), dialect)

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return encoded

    said = {
        -1: ids(
            "<Parallel><Goal><Outline>1: a</Outline><Outline>2: b</Outline></Goal>c</Conclusion></Parallel><|end|>"
        ),
        0: ids(" x y</Path>"),
        1: ids(" u</Path>"),
    }
    sampler = Dictated("")
    sampler._said = said
    model = tiny_model("qwen3", tokenizer, hidden=32, layers=2)
    engine = Engine(model, tokenizer, dialect, EngineConfig(pages=100, audit_every_step=True), sampler=sampler)
    engine.submit(Request("r", tuple(ids("a b"))))
    last = drive(engine)[-1]
    assert isinstance(last, FinishedEvent)
    result = last.result
    assert result.outcome is Outcome.COMPLETED
    assert len(result.ledger.blocks[0].branches) == 2
    assert parse_tokens(result.token_ids, tokenizer, dialect, result.prompt_length).well_formed
