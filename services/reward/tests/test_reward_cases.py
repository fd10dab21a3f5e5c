"""Every recorded case gets its verdict through a running service, hostile ones at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npr.reward.v1 import reward_pb2
from npr.types.v1 import trajectory_pb2

CASES = [
    json.loads(line)
    for path in sorted((Path(__file__).parent / "cases").glob("*.jsonl"))
    for line in path.read_text("utf-8").splitlines()
]


async def test_every_case_gets_its_verdict(stub) -> None:
    request = reward_pb2.ScoreRequest(
        items=[
            reward_pb2.ScoreItem(
                response_text=case["response"], gold=case["gold"], verifier=case.get("verifier", "math")
            )
            for case in CASES
        ]
    )
    scores = (await stub.Score(request)).scores
    found = [trajectory_pb2.VerdictKind.Name(score.verdict).removeprefix("VERDICT_KIND_").lower() for score in scores]
    wrong = [
        (case, verdict, score.reason)
        for case, verdict, score in zip(CASES, found, scores, strict=True)
        if verdict != case["verdict"]
    ]
    assert not wrong


@pytest.mark.parametrize(
    "answer", [r"10^{10^{10}}", r"(10^{9})!", r"\binom{10^9}{5\cdot 10^8}", r"\sum_{i=1}^{10^9} i^i", r"e^{10^{10}}"]
)
async def test_huge_numbers_are_incorrect_long_before_the_deadline(stub, answer: str) -> None:
    item = reward_pb2.ScoreItem(response_text=rf"\boxed{{{answer}}}", gold="$5$", verifier="math")
    (score,) = (await stub.Score(reward_pb2.ScoreRequest(items=[item]))).scores
    assert score.verdict == trajectory_pb2.VERDICT_KIND_INCORRECT
    assert score.seconds < 2.5  # half the deadline: nothing was killed
