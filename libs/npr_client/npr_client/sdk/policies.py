"""Policies: those that runs have published, and models that are published so that the engine can serve them."""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from pathlib import Path

from npr.learner.v1 import learner_pb2, learner_pb2_grpc
from npr.rollout.v1 import rollout_pb2
from npr.types.v1 import policy_pb2, sampling_pb2
from npr_client.sdk.channels import Channels
from npr_common.errors import InvalidArgumentError, NotFoundError
from npr_common.policy_store import PolicyStore

SERVICE = "learner"
# The learner asks every stage for a rate; this one takes no step.
NEVER_USED = '{"learning_rate": 1e-6}'
STAGE = "model"


class InFlight(StrEnum):
    """What becomes of what is being decoded when another policy is served."""

    DRAIN = "drain"
    ABORT = "abort"
    FINISH_ON_OLD = "finish-on-old"

    def to_proto(self) -> rollout_pb2.InFlight.ValueType:
        """The same in the contract."""
        return rollout_pb2.InFlight.Value(f"IN_FLIGHT_{self.name}")


class Policies:
    """Publishing calls of the learner."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    @property
    def _stub(self) -> learner_pb2_grpc.LearnerServiceAsyncStub:
        return learner_pb2_grpc.LearnerServiceStub(self._channels.to(SERVICE))

    async def publish_model(self, model: str, *, line: str | None = None, dialect: str = "npr") -> policy_pb2.PolicyRef:
        """Publishes a model (a folder, a URL, `bundled:NAME`, `package:MODULE/FILE`) as a policy line; once a line.

        Raises:
            NotFoundError: there is no such model, or it can't be loaded.
        """
        request = learner_pb2.StartStageRequest(
            run_id=line or model_line(model),
            stage=STAGE,
            source=learner_pb2.ModelSource(model=model),
            objective=learner_pb2.OBJECTIVE_DAPO,
            options_json=NEVER_USED,
            dialect=dialect,
            visibility=sampling_pb2.VISIBILITY_SEQUENTIAL,
        )
        return (await self._channels.call(SERVICE, lambda: self._stub.StartStage(request))).policy


def model_line(model: str) -> str:
    """The policy line of a model: its name, and a hash of where it is and, for local files, of which they are."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(model.rpartition(":")[2]).stem).strip("-")
    fingerprint = hashlib.sha256("\n".join([model, *_local_files(Path(model))]).encode()).hexdigest()
    return f"model-{name[:40]}-{fingerprint[:8]}"


def _local_files(path: Path) -> list[str]:
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    return [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]


def published_policy(store: PolicyStore, name: str) -> policy_pb2.PolicyRef:
    """The policy that `LINE` (its newest version) or `LINE@VERSION` names. A run's policies are the line of its id.

    Raises:
        NotFoundError: the store has no such policy.
        InvalidArgumentError: the version is no number.
    """
    line, _, version = name.partition("@")
    if version and not version.isdigit():
        raise InvalidArgumentError(f"policy {name}: write LINE or LINE@VERSION, the version a number")
    found = store.find(line, int(version)) if version else store.latest(line)
    if found is None:
        raise NotFoundError(
            f"no policy {name} in {store.root_url}: `npr runs` lists the runs", reason="POLICY_NOT_FOUND"
        )
    return found
