"""Policies as commands name them: `--policy LINE[@VERSION]`, `--model MODEL`, and `npr publish`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from npr.types.v1 import policy_pb2
from npr_client.cli.options import DialectOption, JsonOption, StateDirOption, absolute_dialect, with_client
from npr_client.cli.output import Output
from npr_client.sdk import NprClient
from npr_client.sdk.policies import published_policy
from npr_client.stack.layout import StateDir
from npr_common.config import Addresses
from npr_common.errors import FailedPreconditionError, InvalidArgumentError
from npr_common.policy_store import PolicyStore
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


def find_policy(name: str, state_dir: StateDir) -> policy_pb2.PolicyRef:
    """The published policy of that name, in the environment's policy store or the local stack's."""
    settings = Addresses()
    named = "policy_store_url" in settings.model_fields_set
    url = settings.policy_store_url if named else state_dir.policy_store_url
    return published_policy(PolicyStore(url, state_dir.cache_folder), name)


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
