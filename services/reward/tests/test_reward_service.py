"""The gRPC contract: order, rules, refusals, backpressure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from npr.reward.v1 import reward_pb2, reward_pb2_grpc
from npr.types.v1 import trajectory_pb2
from npr_common.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, rpc_errors
from npr_common.rpc.client import connect
from npr_common.testing.servers import running_server
from npr_reward.service import MAX_BATCH, RewardService
from npr_reward.settings import RewardSettings

WELL_FORMED = (
    "<guideline><plan>1: add</plan><plan>2: multiply</plan></guideline>"
    "<step>1: 1+1=2</step><step>2: 2*3=6</step><takeaway>together</takeaway> So \\boxed{8}."
)


def item(response_text: str, gold: str = "8", verifier: str = "math") -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(response_text=response_text, gold=gold, verifier=verifier)


async def score(stub, *items: reward_pb2.ScoreItem, rule: int = 0, dialect: str = ""):
    with rpc_errors():
        response = await stub.Score(reward_pb2.ScoreRequest(items=items, rule=rule, dialect=dialect))
    return list(response.scores)


async def test_scores_come_in_order_whatever_way_they_are_judged(stub) -> None:
    answers = [str(n) if n % 3 else rf"\sqrt{{{n * n}}}+x-x" for n in range(60)]
    scores = await score(stub, *(item(rf"\boxed{{{answer}}}", gold=str(n)) for n, answer in enumerate(answers)))
    assert [one.answer for one in scores] == answers
    assert {one.verdict for one in scores} == {trajectory_pb2.VERDICT_KIND_CORRECT}


async def test_a_hostile_answer_does_not_fail_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    settings = RewardSettings(workers=1, deadline_seconds=0.5, extra_verifiers=("hostile_verifiers:HostileVerifier",))
    async with running_server(RewardService(settings)) as address, connect(address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        names = [item(f"\\boxed{{{act}}}", verifier="hostile") for act in ("fine", "loop", "raise", "fine2")]
        kinds = [one.verdict for one in await score(stub, *names)]
    correct, unscorable = trajectory_pb2.VERDICT_KIND_CORRECT, trajectory_pb2.VERDICT_KIND_UNSCORABLE
    assert kinds == [correct, unscorable, unscorable, correct]


@pytest.mark.parametrize(
    ("text", "gold", "accuracy", "gated"),
    [
        (WELL_FORMED, "8", 1.0, 1.0),
        (WELL_FORMED, "9", -1.0, -1.0),
        ("So \\boxed{8}.", "8", 1.0, -2.0),
        (WELL_FORMED.replace("<step>2:", "<step>3:"), "8", 1.0, -0.25),
        (WELL_FORMED.replace("\\boxed{8}", "8"), "9", -1.0, -0.5),
    ],
)
async def test_the_rules_make_the_reward(stub, text: str, gold: str, accuracy: float, gated: float) -> None:
    (plain,) = await score(stub, item(text, gold), rule=reward_pb2.REWARD_RULE_ACCURACY)
    (stage_1,) = await score(stub, item(text, gold), rule=reward_pb2.REWARD_RULE_FORMAT_GATED)
    assert (plain.reward, stage_1.reward) == (accuracy, gated)
    assert (stage_1.format_penalty == 0) == (not stage_1.violations) == (gated == accuracy)


async def test_another_dialect_has_other_tags(stub) -> None:
    (npr,) = await score(stub, item(WELL_FORMED))
    (multiverse,) = await score(stub, item(WELL_FORMED), dialect="multiverse")
    assert (npr.format_penalty, multiverse.format_penalty) == (0.0, -2.0)


async def test_an_empty_batch_has_no_scores(stub) -> None:
    assert await score(stub) == []


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (reward_pb2.ScoreRequest(items=[item("", verifier="oracle")]), "UNKNOWN_VERIFIER"),
        (reward_pb2.ScoreRequest(items=[item("")], dialect="klingon"), "UNKNOWN_DIALECT"),
        (reward_pb2.ScoreRequest(items=[item("")], dialect="/etc/hostname"), "UNKNOWN_DIALECT"),
        (reward_pb2.ScoreRequest(items=[item("")] * (MAX_BATCH + 1)), "BATCH_TOO_LONG"),
        (reward_pb2.ScoreRequest(items=[item("")], rule=99), "UNKNOWN_RULE"),
    ],
)
async def test_bad_requests_are_refused_with_a_reason(stub, request_: reward_pb2.ScoreRequest, reason: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal, rpc_errors():
        await stub.Score(request_)
    assert refusal.value.reason == reason


async def test_an_unknown_verifier_is_named_with_its_place(stub) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        await score(stub, item("8"), item("8", verifier="oracle"))
    assert set(refusal.value.field_violations) == {"items[1].verifier"}


async def test_a_batch_beyond_the_queue_is_told_when_to_come_again() -> None:
    settings = RewardSettings(workers=1, max_waiting=4)
    async with running_server(RewardService(settings)) as address, connect(address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        batch = [item(rf"\boxed{{x+{n}}}", gold="x") for n in range(1, 6)]
        with pytest.raises(ResourceExhaustedError) as refusal:
            await score(stub, *batch)
        assert refusal.value.retry_after_seconds is not None
        assert len(await score(stub, *batch[:4])) == 4
        assert len(await score(stub, *[batch[0]] * 50)) == 50  # equal answers are one judgement


async def test_many_clients_at_once(stub) -> None:
    batches = [[item(rf"\boxed{{{n}x+{k}}}", gold=f"{k}+{n}x") for n in range(2, 12)] for k in range(1, 9)]
    for scores in await asyncio.gather(*(score(stub, *batch) for batch in batches)):
        assert {one.verdict for one in scores} == {trajectory_pb2.VERDICT_KIND_CORRECT}


async def test_verifiers_are_listed_by_name(stub) -> None:
    verifiers = (await stub.ListVerifiers(reward_pb2.ListVerifiersRequest())).verifiers
    names = [verifier.name for verifier in verifiers]
    assert names == sorted(names)
    assert {"math", "exact", "integer", "multiple_choice", "logic_grid", "expression"} <= set(names)
    assert all(verifier.description for verifier in verifiers)


def test_a_verifier_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(FailedPreconditionError, match="NPR_REWARD_EXTRA_VERIFIERS"):
        RewardService(RewardSettings(extra_verifiers=("nowhere:Verifier",)))
