"""`npr verify`: what the reward service says of answers in a file, and whether that agrees with what the file says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from npr.reward.v1 import reward_pb2
from npr.types.v1 import trajectory_pb2
from npr_client.cli.options import JsonOption, StateDirOption
from npr_client.cli.output import Output
from npr_client.render import words
from npr_client.sdk import NprClient, ServiceAddresses
from npr_client.sdk.jsonl import Record, read_records
from npr_client.stack.layout import StateDir
from npr_client.stack.private import private_service
from npr_common.errors import InvalidArgumentError

DISAGREES = 1
VERDICTS = ("correct", "incorrect", "unscorable")


@dataclass(frozen=True)
class Judged:
    """One line of the file and what became of it. `agrees` is None where the file expects nothing."""

    line: int
    verdict: str
    reason: str
    answer: str
    gold: str
    expected: str | None
    agrees: bool | None
    seconds: float


@dataclass(frozen=True)
class Summary:
    """All lines in numbers."""

    lines: int
    verdicts: dict[str, int]
    compared: int
    agree: int
    disagree: int
    longest_seconds: float


def verify(
    file: Annotated[Path, typer.Argument(help="JSON Lines of gold, response, and maybe verdict, verifier.")],
    verifier: Annotated[str, typer.Option(help="For lines that name none.")] = "math",
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judges answers by the running reward service, or one started for the call; exit code 1 if any verdict differs."""
    out = Output(as_json)
    records = list(read_records(file))
    if not records:
        raise InvalidArgumentError(f"{file} holds no line to judge")
    items = [_item(record, verifier) for record in records]
    expected = [_expected(record) for record in records]
    scores = asyncio.run(_scores(items, ServiceAddresses.resolve(StateDir.at(state_dir))))
    judged = [_judged(*line) for line in zip(records, items, expected, scores, strict=True)]
    for each in judged:
        out.result(asdict(each), _drawn(each))
    summary = _summary(judged)
    out.result({"summary": asdict(summary)}, _drawn_summary(summary))
    if summary.disagree:
        raise typer.Exit(DISAGREES)


async def _scores(items: Sequence[reward_pb2.ScoreItem], addresses: ServiceAddresses) -> list[trajectory_pb2.Score]:
    if "reward" in addresses.by_name:
        return await _score_at(addresses, items)
    async with private_service("reward") as address:
        return await _score_at(ServiceAddresses({"reward": address}), items)


async def _score_at(addresses: ServiceAddresses, items: Sequence[reward_pb2.ScoreItem]) -> list[trajectory_pb2.Score]:
    async with NprClient(addresses) as client:
        return await client.verification.score(items)


def _item(record: Record, verifier: str) -> reward_pb2.ScoreItem:
    metadata = record.fields.get("metadata", {})
    if not isinstance(metadata, dict):
        raise record.fault("field 'metadata' must be an object")
    return reward_pb2.ScoreItem(
        response_text=record.text("response"),
        gold=record.text("gold"),
        verifier=record.text("verifier", default=verifier),
        metadata={str(key): str(value) for key, value in metadata.items()},
    )


def _expected(record: Record) -> str | None:
    expected = record.text("verdict", default="")
    if expected and expected not in VERDICTS:
        raise record.fault(f"field 'verdict' must be one of {', '.join(VERDICTS)}")
    return expected or None


def _judged(record: Record, item: reward_pb2.ScoreItem, expected: str | None, score: trajectory_pb2.Score) -> Judged:
    verdict = words.verdict(score.verdict)
    return Judged(
        line=record.line,
        verdict=verdict,
        reason=score.reason,
        answer=score.answer,
        gold=item.gold,
        expected=expected,
        agrees=None if expected is None else verdict == expected,
        seconds=round(score.seconds, 6),
    )


def _summary(judged: Sequence[Judged]) -> Summary:
    agreement = Counter(each.agrees for each in judged)
    return Summary(
        lines=len(judged),
        verdicts=dict(Counter(each.verdict for each in judged)),
        compared=agreement[True] + agreement[False],
        agree=agreement[True],
        disagree=agreement[False],
        longest_seconds=max(each.seconds for each in judged),
    )


def _drawn(each: Judged) -> Text:
    style = {"correct": "green", "incorrect": "red"}.get(each.verdict, "yellow")
    line = Text.assemble(f"{each.line:>5}  ", (f"{each.verdict:<10}", style), f"  {each.reason}")
    if each.agrees is False:
        line.append(f"  expected {each.expected}: gold {each.gold}, answer {each.answer}", style="bold red")
    return line


def _drawn_summary(summary: Summary) -> Text:
    verdicts = ", ".join(f"{count} {name}" for name, count in sorted(summary.verdicts.items()))
    told = f"{summary.lines} judged: {verdicts}; longest {summary.longest_seconds:.3f} s"
    if summary.compared:
        told += f"; {summary.agree}/{summary.compared} agree with the file"
    return Text(told, style="bold")
