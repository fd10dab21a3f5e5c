"""`npr generate`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.live import Live

from npr.types.v1 import trajectory_pb2
from npr_client.cli.options import DialectOption, JsonOption, MinPOption, StateDirOption, dialect_named, with_client
from npr_client.cli.output import Output
from npr_client.render.live import LiveTrajectory
from npr_client.render.tree import trajectory_tree
from npr_client.sdk import DecodingOptions, NprClient, text_prompt
from npr_common.errors import InternalError


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt's text.")],
    *,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    min_p: MinPOption = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    max_tokens: Annotated[int, typer.Option(min=0, help="Over all branches; 0: the engine's own.")] = 0,
    sequential: Annotated[bool, typer.Option("--sequential", help="Plain causal decoding: no forks.")] = False,
    deadline_seconds: Annotated[float | None, typer.Option(min=0.1, help="The trajectory's deadline.")] = None,
    dialect: DialectOption = "npr",
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decodes one prompt as you watch, branches side by side; then shows the trajectory as a tree."""
    out = Output(as_json)
    table = dialect_named(dialect)
    decoding = DecodingOptions(
        temperature=temperature, top_p=top_p, min_p=min_p, seed=seed, max_tokens=max_tokens, sequential=sequential
    )

    async def work(client: NprClient) -> trajectory_pb2.Trajectory:
        drawn = LiveTrajectory()
        with Live(console=out.talk, transient=True, refresh_per_second=12, vertical_overflow="visible") as live:
            responses = client.generate(text_prompt(prompt), decoding, deadline_seconds=deadline_seconds)
            async for response in responses:
                if as_json:
                    out.json_line(response)
                if response.HasField("trajectory"):
                    return response.trajectory
                drawn.add(response.tokens)
                live.update(drawn.render())
        raise InternalError("the stream ended without a trajectory; the rollout service's log may say why")

    trajectory = with_client(state_dir, work)
    if not as_json:
        out.results.print(trajectory_tree(trajectory_pb2.ScoredTrajectory(trajectory=trajectory), table))
