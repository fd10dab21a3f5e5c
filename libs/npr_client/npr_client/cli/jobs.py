"""`npr submit`, `npr watch`, `npr jobs`, `npr cancel`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from npr.rollout.v1 import rollout_pb2
from npr.types.v1 import prompt_pb2, trajectory_pb2
from npr_client.cli.options import JsonOption, MinPOption, StateDirOption, with_client
from npr_client.cli.output import Output
from npr_client.cli.policies import ModelOption, PolicyOption, chosen_policy
from npr_client.cli.runs import follow
from npr_client.render import words
from npr_client.render.tables import jobs_table
from npr_client.sdk import (
    BranchShare,
    BudgetOptions,
    DecodingOptions,
    Exhaustion,
    NprClient,
    prompts_from_jsonl,
    text_prompt,
)
from npr_common.errors import InvalidArgumentError, NotFoundError, NprError
from npr_common.references import PACKAGE_PREFIX, resolve_reference

REFUSED = 1
"""Exit code of a watched job of which a sample was refused."""

_CONDITION_SECONDS = 2.0


def submit(
    *,
    prompt: Annotated[str | None, typer.Option(help="One prompt's text.")] = None,
    file: Annotated[str | None, typer.Option(help="Prompts as JSON Lines, a path or `package:MODULE/PATH`.")] = None,
    policy: PolicyOption = None,
    model: ModelOption = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Samples a prompt.")] = 1,
    gold: Annotated[str, typer.Option(help="The right answer to --prompt.")] = "",
    verifier: Annotated[str, typer.Option(help="How answers are judged.", show_default="math, with a gold")] = "",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    min_p: MinPOption = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    max_tokens: Annotated[int, typer.Option(min=0, help="Over all branches; 0: the engine's own.")] = 0,
    max_branch_tokens: Annotated[int, typer.Option(min=0, help="Of one branch; 0: the engine's own.")] = 0,
    branch_share: Annotated[
        BranchShare, typer.Option(help="How branches share what is left.")
    ] = BranchShare.FIRST_COME,
    on_exhausted: Annotated[Exhaustion, typer.Option(help="At a branch's end of budget.")] = Exhaustion.CLOSE,
    takeaway_reserve_tokens: Annotated[int, typer.Option(min=0, help="Kept for what follows a block's join.")] = 0,
    raw_log_probs: Annotated[bool, typer.Option("--raw-log-probs", help="Record the model's own ones too.")] = False,
    sequential: Annotated[bool, typer.Option("--sequential", help="Plain causal decoding: no forks.")] = False,
    job_id: Annotated[str | None, typer.Option(help="Name of the job; a repeat changes nothing.")] = None,
    watch_it: Annotated[bool, typer.Option("--watch", help="Watch it to its end.")] = False,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Queues prompts to be decoded and judged; prints the job's id."""
    out = Output(as_json)
    prompts = _prompts(prompt, file, gold, verifier)
    decoding = DecodingOptions(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        max_branch_tokens=max_branch_tokens,
        sequential=sequential,
        raw_log_probs=raw_log_probs,
        budget=BudgetOptions(branch_share, on_exhausted, takeaway_reserve_tokens),
    )

    async def work(client: NprClient) -> None:
        chosen = await chosen_policy(client, model, policy, state_dir)
        submitted = await client.jobs.submit(
            prompts, decoding, samples_per_prompt=samples, job_id=job_id, policy=chosen
        )
        out.result({"job_id": submitted}, Text(submitted))
        if watch_it:
            await _watch_job(client, submitted, out)

    with_client(state_dir, work)


def _prompts(text: str | None, file: str | None, gold: str, verifier: str) -> list[prompt_pb2.Prompt]:
    if (text is None) == (file is None):
        raise InvalidArgumentError("give either --prompt TEXT or --file FILE.jsonl")
    if file is not None:
        if gold:
            raise InvalidArgumentError("--gold belongs to --prompt; in a file, write a `gold` beside each prompt")
        return prompts_from_jsonl(_path(file), verifier=verifier)
    return [text_prompt(text or "", gold=gold, verifier=verifier)]


def _path(file: str) -> Path:
    return Path(resolve_reference(file) if file.startswith(PACKAGE_PREFIX) else file)


def watch(
    name: Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or a run's.")],
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Follows a job, or a run, to its end."""
    out = Output(as_json)

    async def work(client: NprClient) -> None:
        try:
            await client.jobs.get(name)
        except NotFoundError as error:
            if not await _is_run(client, name):
                raise NotFoundError(f"no job and no run {name!r}: `npr jobs` and `npr runs` list them") from error
            await follow(client, name, out)
        else:
            await _watch_job(client, name, out)

    with_client(state_dir, work)


async def _is_run(client: NprClient, name: str) -> bool:
    return name in {run.run_id for run in await client.runs.list()}


async def _watch_job(client: NprClient, job_id: str, out: Output) -> None:
    """Follow a job to its end. Ends the command with exit code 1 if a sample was refused."""
    job = await client.jobs.get(job_id)
    with Live(console=out.talk, transient=True, refresh_per_second=8) as live:
        condition = Text(style="yellow")

        def draw() -> None:
            live.update(Group(jobs_table([job]), condition) if condition else jobs_table([job]))

        async with _background(_follow_condition(client, condition, draw)):
            async for change in client.jobs.watch(job_id, with_trajectories=True):
                job = change.job
                draw()
                for scored in change.trajectories:
                    out.result({"trajectory": scored}, trajectory_line(scored))
    out.result({"job": job}, jobs_table([job]))
    if job.outcomes.get("refused"):
        raise typer.Exit(REFUSED)


@contextlib.asynccontextmanager
async def _background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Work that goes on beside the block, and ends with it."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _follow_condition(client: NprClient, condition: Text, draw: Callable[[], None]) -> None:
    """Keep `condition` at what the rollout service says of a policy that it can't serve yet."""
    while True:
        with contextlib.suppress(NprError):  # what is wrong with the service, the watch itself tells
            condition.plain = (await client.engine_status()).condition
            draw()
        await asyncio.sleep(_CONDITION_SECONDS)


def trajectory_line(scored: trajectory_pb2.ScoredTrajectory) -> Text:
    """One line about one trajectory."""
    trajectory, score = scored.trajectory, scored.score
    ledger = trajectory.ledger
    verdict = words.verdict(score.verdict)
    unscorable = score.verdict == trajectory_pb2.VERDICT_KIND_UNSCORABLE
    style = {"correct": "green", "incorrect": "red"}.get(verdict, "yellow")
    return Text.assemble(
        (trajectory.trajectory_id, "cyan"),
        f"  {words.ending(trajectory)}  ",
        (verdict, style),
        f"  {ledger.total_tokens} tokens, critical path {ledger.critical_path_tokens}",
        f"  answer {score.answer}" if score.answer else "",
        f"  {score.reason}" if unscorable else "",
    )


def jobs(
    limit: Annotated[int, typer.Option(min=1)] = 20, state_dir: StateDirOption = None, as_json: JsonOption = False
) -> None:
    """Lists jobs, newest first."""
    _show_jobs(with_client(state_dir, lambda client: client.jobs.list(limit)), Output(as_json))


def cancel(
    job_id: Annotated[str, typer.Argument(metavar="JOB")], state_dir: StateDirOption = None, as_json: JsonOption = False
) -> None:
    """Discards what of a job has not been rolled out."""
    _show_jobs([with_client(state_dir, lambda client: client.jobs.cancel(job_id))], Output(as_json))


def _show_jobs(found: list[rollout_pb2.Job], out: Output) -> None:
    if out.as_json:
        for job in found:
            out.json_line(job)
    else:
        out.results.print(jobs_table(found) if found else Text("no jobs"))
