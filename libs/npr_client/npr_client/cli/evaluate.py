"""`npr eval`: one model or policy, measured on problems, as a run without stages."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from npr_client.cli.options import JsonOption, StateDirOption, with_client
from npr_client.cli.output import Output
from npr_client.cli.policies import ModelOption, PolicyOption, find_policy, policy_metadata
from npr_client.cli.recipes import to_yaml
from npr_client.cli.runs import RunsDirOption, ensure_stack, finish, going_on
from npr_client.render.tables import stages_table
from npr_client.sdk import NprClient
from npr_client.stack.layout import StateDir
from npr_common.errors import InvalidArgumentError
from npr_common.references import absolute_reference

GENERATED_COUNT = 200


def evaluate(
    *,
    data: Annotated[list[str], typer.Option(help="[NAME=]SOURCE: a file, `multipart`, `reasoning_gym:FAMILY`.")],
    model: ModelOption = None,
    policy: PolicyOption = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Samples a problem.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Problems of each source.", show_default="all")] = None,
    verifier: Annotated[str | None, typer.Option(help="How answers are judged.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Over all branches.")] = None,
    sequential: Annotated[bool, typer.Option("--sequential", help="Plain causal decoding: no forks.")] = False,
    run_id: Annotated[str | None, typer.Option(help="Name of the run.", show_default="model and time")] = None,
    runs_dir: RunsDirOption = Path("runs"),
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measures a model or a published policy on problems: avg@k, pass@k, parallel rate, tokens."""
    out = Output(as_json)
    ensure_stack(state_dir, out)
    place = StateDir.at(state_dir)
    recipe = {
        "name": "evaluation",
        **_weights(model, policy, place),
        "data": {"test": dict(_source(text, limit, verifier) for text in data)},
        "decoding": _decoding(temperature, max_tokens),
        "evaluation": {
            "samples_per_problem": samples,
            "pass_at": sorted({1, samples}),
            "visibility": "sequential" if sequential else "parallel",
        },
    }

    if sequential and policy is not None and policy_metadata(policy, place).has_tag_tokens:
        out.say(f"warning: {policy} was trained to decode in parallel; --sequential measures it without forks")
    name = run_id or _fresh_id(model or policy or "")

    async def work(client: NprClient) -> Path:
        await client.runs.evaluate(name, to_yaml(recipe))
        return await finish(client, name, runs_dir.absolute(), out)

    with going_on(name, out):
        report = with_client(state_dir, work)
    if not as_json:
        out.results.print(stages_table(json.loads(report.read_bytes())["stages"]))
    out.line(str(report))


def _weights(model: str | None, policy: str | None, state_dir: StateDir) -> dict[str, Any]:
    if (model is None) == (policy is None):
        raise InvalidArgumentError("give either --model or --policy")
    if policy is None:
        return {"model": absolute_reference(model or "")}
    found = find_policy(policy, state_dir)
    reference = {"line": found.line, "version": found.version}
    return {"policy": {**reference, "manifest_url": found.manifest_url, "digest": found.digest}}


def _source(text: str, limit: int | None, verifier: str | None) -> tuple[str, dict[str, Any]]:
    """Name and recipe form of a data source."""
    name, equals, where = text.partition("=")
    if not equals:
        where = text
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(text.rpartition(":")[2]).stem) or "data"
    judged = {"verifier": verifier} if verifier else {}
    if where == "multipart":
        return name, {"kind": "multipart", "split": "test", "count": limit or GENERATED_COUNT, **judged}
    if where.startswith("reasoning_gym:"):
        family = where.removeprefix("reasoning_gym:")
        return name, {"kind": "reasoning_gym", "family": family, "count": limit or GENERATED_COUNT, **judged}
    limited = {"limit": limit} if limit else {}
    return name, {"kind": "file", "url": absolute_reference(where), **judged, **limited}


def _decoding(temperature: float, max_tokens: int | None) -> dict[str, Any]:
    limits = {"max_tokens": max_tokens} if max_tokens else {}
    return {"temperature": temperature, "fork_refusal": "serialize", **limits}


def _fresh_id(weights: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(weights).name)[:32].strip("-")
    return f"eval-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
