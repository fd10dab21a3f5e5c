"""Policies as commands name them: `--policy LINE[@VERSION]`, `--model MODEL`; and the commands about them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.text import Text

from npr.types.v1 import policy_pb2
from npr_client.cli.options import DialectOption, JsonOption, StateDirOption, absolute_dialect, with_client
from npr_client.cli.output import Output
from npr_client.sdk import NprClient
from npr_client.sdk.policies import InFlight, published_policy
from npr_client.stack.layout import StateDir
from npr_common.config import Addresses
from npr_common.errors import FailedPreconditionError, InvalidArgumentError
from npr_common.policy_store import PolicyMetadata, PolicyStore
from npr_common.references import absolute_reference

ModelOption = Annotated[
    str | None, typer.Option(help="A model: a folder, a URL, `bundled:NAME` or `package:MODULE/FILE`.")
]
PolicyOption = Annotated[str | None, typer.Option(help="RUN or RUN@VERSION: a published policy.")]


def publish(
    model: Annotated[str, typer.Argument(help="A folder, a URL, `bundled:NAME` or `package:MODULE/FILE`.")],
    line: Annotated[str | None, typer.Option(help="Name of the policy line.", show_default="from the model")] = None,
    dialect: DialectOption = "npr",
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publishes a model as a policy, so that jobs can name it; prints LINE@VERSION."""
    source, tags = absolute_reference(model), absolute_dialect(dialect)
    published = with_client(state_dir, lambda client: client.policies.publish_model(source, line=line, dialect=tags))
    Output(as_json).result(published, Text(f"{published.line}@{published.version}"))


def export(
    policy: Annotated[str, typer.Argument(help="RUN or RUN@VERSION: a published policy.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; must not exist.")],
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Writes a policy as a Hugging Face folder: weights, config, tokenizer with the tags, chat template."""
    if folder.exists():
        raise InvalidArgumentError(f"{folder} exists: name a folder that doesn't, nothing is overwritten")
    stack = StateDir.at(state_dir)
    found = find_policy(policy, stack)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as staging:
        _policy_store(stack, Path(staging)).materialize(found).rename(folder)
    Output(as_json).result({"policy": f"{found.line}@{found.version}", "folder": str(folder)}, Text(str(folder)))


def serve_policy(
    policy: Annotated[str, typer.Argument(metavar="LINE[@VERSION]", help="A published policy, such as a run's.")],
    in_flight: Annotated[
        InFlight,
        typer.Option(help="What is being decoded: finish it first, end it, or finish it beside the new policy."),
    ] = InFlight.DRAIN,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Changes the policy that the engine serves; returns once it does."""
    found = find_policy(policy, StateDir.at(state_dir))
    swapped = with_client(state_dir, lambda client: client.serve_policy(found, in_flight))
    before = swapped.previous
    told = f"serving {found.line}@{found.version}"
    told += f", before it {before.line}@{before.version}" if swapped.HasField("previous") else ""
    told += f"; {swapped.aborted} requests aborted" if swapped.aborted else ""
    Output(as_json).result({"policy": found, "previous": before, "aborted": swapped.aborted}, Text(told))


def find_policy(name: str, state_dir: StateDir) -> policy_pb2.PolicyRef:
    """The published policy of that name, in the environment's policy store or the local stack's."""
    return published_policy(_policy_store(state_dir, state_dir.cache_folder), name)


def policy_metadata(name: str, state_dir: StateDir) -> PolicyMetadata:
    """What the published policy of that name says of itself."""
    return _policy_store(state_dir, state_dir.cache_folder).manifest(find_policy(name, state_dir)).metadata


def _policy_store(state_dir: StateDir, cache_folder: Path) -> PolicyStore:
    settings = Addresses()
    named = "policy_store_url" in settings.model_fields_set
    url = settings.policy_store_url if named else state_dir.policy_store_url
    return PolicyStore(url, cache_folder)


async def chosen_policy(
    client: NprClient, model: str | None, policy: str | None, state_dir: Path | None
) -> policy_pb2.PolicyRef | None:
    """What a job shall be decoded by: a model, a policy, or None for whichever is being served.

    Raises:
        FailedPreconditionError: neither is named, and nothing is being served: the job would wait for ever.
    """
    if model is not None and policy is not None:
        raise InvalidArgumentError("give --model or --policy, not both")
    if model is not None:
        return await client.policies.publish_model(absolute_reference(model))
    if policy is not None:
        return find_policy(policy, StateDir.at(state_dir))
    if not (await client.engine_status()).HasField("policy"):
        message = "no policy is being served: name one with --policy RUN, or a model with --model MODEL"
        raise FailedPreconditionError(message, reason="NO_POLICY")
    return None
