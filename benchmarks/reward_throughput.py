"""Honest verdicts a second: the reward service against plain math-verify in this process, on the same pairs.

The rival has no sandbox: it parses and verifies in one process, as a training script would. Both judge the same mix of
integers, fractions, expressions, sets and intervals, half of them right:

- `distinct`: no gold and no answer twice, so that nothing can be remembered;
- `groups`: eight samples a gold, four right and alike, four wrong in two ways, as a policy's groups are.

The service pays for gRPC, a pipe and a process that can be killed. It gains from numbers that need no parser, from
judging equal answers of a batch once, from remembering parsed golds, and from more than one core.
Also measured: what one looping answer costs a batch of honest ones.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass

from _harness import parser, tell
from math_verify import parse, verify

from npr.reward.v1 import reward_pb2, reward_pb2_grpc
from npr.types.v1 import trajectory_pb2
from npr_common.rpc.client import connect
from npr_common.testing.servers import running_server
from npr_reward.service import MAX_BATCH, RewardService
from npr_reward.settings import RewardSettings

CORRECT = trajectory_pb2.VERDICT_KIND_CORRECT


@dataclass(frozen=True)
class Pair:
    """One honest answer."""

    gold: str
    response: str


@dataclass(frozen=True)
class Run:
    """Seconds for a list of pairs, and how many were right."""

    seconds: float
    correct: int


def distinct_pairs(count: int, rng: random.Random) -> list[Pair]:
    """Pairs of the kinds that competition sets hold, half of them right, each with numbers of its own."""
    return [_pair(index // 2, index % 2, rng) for index in range(count)]


def grouped_pairs(count: int, rng: random.Random) -> list[Pair]:
    """The same kinds, in groups of eight samples of one problem."""
    seeds = [rng.random() for _ in range(count // 8)]
    return [_pair(k, wrong, random.Random(seed)) for k, seed in enumerate(seeds) for wrong in (0, 0, 0, 0, 1, 1, 2, 2)]


def _pair(kind: int, wrong: int, rng: random.Random) -> Pair:
    """A pair whose answer is off by `wrong`."""
    a, b, c = rng.sample(range(2, 10_000), 3)
    gold, answer = {
        0: (f"{a}", f"{a + wrong}"),
        1: (f"\\frac{{{a}}}{{{b}}}", f"\\dfrac{{{a + wrong}}}{{{b}}}"),
        2: (f"{a}\\sqrt{{{b}}}", f"{a + wrong} \\sqrt{{{b}}}"),
        3: (f"{a}", f"{a + wrong}"),
        4: (f"{a}x + {b}", f"{b} + {a + wrong}x"),
        5: (f"({a}, {a + b}]", f"({a + wrong}, {a + b}]"),
        6: (f"{a}/{b}", f"{a + wrong}/{b}"),
        7: (f"\\{{{a}, {b}, {c}\\}}", f"\\{{{c}, {a}, {b + wrong}\\}}"),
    }[kind % 8]
    return Pair(f"${gold}$", f"We get two cases, and so the answer is \\boxed{{{answer}}}.")


def time_math_verify(pairs: list[Pair]) -> Run:
    """One process, no sandbox, math-verify's own alarm as the only guard."""
    started = time.perf_counter()
    correct = sum(bool(verify(parse(pair.gold), parse(pair.response))) for pair in pairs)
    return Run(time.perf_counter() - started, correct)


async def time_service(pairs: list[Pair], workers: int) -> Run:
    """Through gRPC, in batches of 64, four in flight."""
    service = RewardService(RewardSettings(workers=workers))
    async with running_server(service) as address, connect(address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        slots = asyncio.Semaphore(4)

        async def score(batch: list[Pair]) -> int:
            async with slots:
                response = await stub.Score(_request(batch))
            return sum(score.verdict == CORRECT for score in response.scores)

        started = time.perf_counter()
        correct = await asyncio.gather(*(score(pairs[i : i + 64]) for i in range(0, len(pairs), 64)))
        return Run(time.perf_counter() - started, sum(correct))


async def time_hostile(deadline_seconds: float) -> float:
    """Seconds that honest answers wait, on two workers, while one answer of another batch runs into its deadline."""
    settings = RewardSettings(workers=2, deadline_seconds=deadline_seconds)
    looping = Pair("$7$", "\\boxed{\\int_0^1 x^{x^{\\sin x^{\\cos x}}} \\cdot \\Gamma(x)^{x} dx}")
    honest = distinct_pairs(64, random.Random(2))
    async with running_server(RewardService(settings)) as address, connect(address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        hostile = asyncio.ensure_future(stub.Score(_request([looping])))
        started = time.perf_counter()
        await stub.Score(_request(honest))
        seconds = time.perf_counter() - started
        await hostile
    return seconds


def _request(pairs: list[Pair]) -> reward_pb2.ScoreRequest:
    assert len(pairs) <= MAX_BATCH
    return reward_pb2.ScoreRequest(
        items=[reward_pb2.ScoreItem(response_text=pair.response, gold=pair.gold, verifier="math") for pair in pairs]
    )


def measure(count: int) -> dict[str, object]:
    """All figures, as one JSON object."""
    cores = len(os.sched_getaffinity(0))
    time_math_verify(distinct_pairs(64, random.Random(0)))  # warm parsers and regexes, as the service's are
    mixes = {"distinct": distinct_pairs(count, random.Random(1)), "groups": grouped_pairs(count, random.Random(1))}
    figures: dict[str, object] = {"benchmark": "reward_throughput", "pairs": count, "cores": cores}
    ratios: dict[str, float] = {}
    for mix, pairs in mixes.items():
        rival = time_math_verify(pairs)
        figures[f"{mix}_math_verify_per_second"] = round(count / rival.seconds, 1)
        for label, workers in (("one_worker", 1), ("all_workers", cores)):
            run = asyncio.run(time_service(pairs, workers))
            assert run.correct == rival.correct == count // 2
            figures[f"{mix}_service_{label}_per_second"] = round(count / run.seconds, 1)
            ratios[f"{mix}_service_{label}_vs_math_verify"] = round(rival.seconds / run.seconds, 2)
    figures["honest_batch_beside_a_hostile_answer_seconds"] = round(asyncio.run(time_hostile(1.0)), 3)
    return figures | {"ratios": ratios}


def main() -> None:
    """Measures and tells."""
    arguments = parser(__doc__).parse_args()
    tell(measure(512 if arguments.quick else 8192), as_json=arguments.json)


if __name__ == "__main__":
    main()
