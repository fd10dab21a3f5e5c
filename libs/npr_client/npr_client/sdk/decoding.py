"""How a caller says what the engine shall do."""

from __future__ import annotations

from dataclasses import dataclass

from npr.types.v1 import sampling_pb2


@dataclass(frozen=True)
class DecodingOptions:
    """Sampling and limits of one request or job. A limit of 0 means the engine's own default."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 0
    max_critical_tokens: int = 0
    max_branch_tokens: int = 0
    max_branches: int = 0
    max_blocks: int = 0
    sequential: bool = False
    reject_refused_forks: bool = False

    def to_proto(self) -> sampling_pb2.DecodingSpec:
        """The same as a message."""
        return sampling_pb2.DecodingSpec(
            sampling=self._sampling(),
            limits=self._limits(),
            visibility=sampling_pb2.VISIBILITY_SEQUENTIAL if self.sequential else sampling_pb2.VISIBILITY_PARALLEL,
            fork_refusal=(
                sampling_pb2.FORK_REFUSAL_POLICY_REJECT
                if self.reject_refused_forks
                else sampling_pb2.FORK_REFUSAL_POLICY_SERIALIZE
            ),
        )

    def _sampling(self) -> sampling_pb2.Sampling:
        return sampling_pb2.Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )

    def _limits(self) -> sampling_pb2.Limits:
        return sampling_pb2.Limits(
            max_tokens=self.max_tokens,
            max_critical_tokens=self.max_critical_tokens,
            max_branch_tokens=self.max_branch_tokens,
            max_branches=self.max_branches,
            max_blocks=self.max_blocks,
        )
