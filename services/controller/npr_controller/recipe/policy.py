"""A published policy, as recipes name it and runs remember it."""

from typing import Self

from pydantic import Field

from npr.types.v1 import policy_pb2
from npr_controller.recipe.base import RecipePart


class PublishedPolicy(RecipePart):
    """The durable form of `npr.types.v1.PolicyRef`."""

    line: str
    version: int = Field(ge=0)
    manifest_url: str
    digest: str

    @classmethod
    def from_proto(cls, policy: policy_pb2.PolicyRef) -> Self:
        """From the wire form."""
        return cls(line=policy.line, version=policy.version, manifest_url=policy.manifest_url, digest=policy.digest)

    def to_proto(self) -> policy_pb2.PolicyRef:
        """The wire form."""
        return policy_pb2.PolicyRef(**self.model_dump())
