"""The gRPC face of the reward service: npr.reward.v1.RewardService."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from npr.reward.v1 import reward_pb2, reward_pb2_grpc
from npr.types.v1 import trajectory_pb2
from npr_common.dialects import Dialect, bundled_dialects, load_dialect
from npr_common.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from npr_reward.sandbox import SandboxPool
from npr_reward.sandbox.worker import WorkerFailure
from npr_reward.scoring import Response, Rule, Score, Scorer
from npr_reward.settings import RewardSettings
from npr_reward.verdict import VerdictKind
from npr_reward.verifiers import BUILT_IN, Verifier, load_verifiers

if TYPE_CHECKING:  # grpc's classes are generic in their stubs only
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

MAX_BATCH = 1024
"""Responses that one call may hold."""

_DEFAULT_DIALECT = "npr"
_RULES = {
    reward_pb2.REWARD_RULE_UNSPECIFIED: Rule.ACCURACY,
    reward_pb2.REWARD_RULE_ACCURACY: Rule.ACCURACY,
    reward_pb2.REWARD_RULE_FORMAT_GATED: Rule.FORMAT_GATED,
}
_KINDS = {
    VerdictKind.CORRECT: trajectory_pb2.VERDICT_KIND_CORRECT,
    VerdictKind.INCORRECT: trajectory_pb2.VERDICT_KIND_INCORRECT,
    VerdictKind.UNSCORABLE: trajectory_pb2.VERDICT_KIND_UNSCORABLE,
}


class RewardService(reward_pb2_grpc.RewardServiceServicer):
    """Judges batches of responses; holds no state beyond its sandbox."""

    name = "reward"
    grpc_names = (reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name,)

    def __init__(self, settings: RewardSettings | None = None) -> None:
        """Loads the verifiers. Raises FailedPreconditionError when one of the settings' can't be loaded."""
        settings = settings or RewardSettings()
        paths = (*BUILT_IN, *settings.extra_verifiers)
        self._verifiers = _load(paths)
        self._pool = SandboxPool(
            size=settings.workers, limits=settings.limits, max_waiting=settings.max_waiting, verifier_paths=paths
        )
        self._scorer = Scorer(self._verifiers, self._pool)
        self._draining = False

    @property
    def pool(self) -> SandboxPool:
        """The sandbox."""
        return self._pool

    def register(self, server: grpc.aio.Server) -> None:
        """Adds this servicer."""
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server)

    async def start(self) -> None:
        """Starts the sandbox. Raises FailedPreconditionError when its processes can't run."""
        try:
            await self._pool.start()
        except WorkerFailure as error:
            raise FailedPreconditionError(
                f"the sandbox can't start ({error}); its processes' errors are above; "
                "check NPR_REWARD_MEMORY_MIB and NPR_REWARD_EXTRA_VERIFIERS",
                reason="SANDBOX_BROKEN",
            ) from error

    async def drain(self) -> None:
        """Takes no more batches, finishes those admitted, ends the sandbox."""
        self._draining = True
        try:
            await self._pool.emptied()
        finally:
            self._pool.close()

    async def Score(self, request: reward_pb2.ScoreRequest, context: Context) -> reward_pb2.ScoreResponse:  # noqa: N802
        """See reward.proto."""
        if self._draining:
            raise UnavailableError("this reward service is shutting down; call another", reason="DRAINING")
        responses = self._responses(request)
        rule = _RULES.get(request.rule)
        if rule is None:
            raise InvalidArgumentError(f"unknown reward rule {request.rule}", reason="UNKNOWN_RULE")
        scores = await self._scorer.score(responses, rule, _dialect(request.dialect or _DEFAULT_DIALECT))
        return reward_pb2.ScoreResponse(scores=[_to_proto(score) for score in scores])

    async def ListVerifiers(  # noqa: N802
        self, request: reward_pb2.ListVerifiersRequest, context: Context
    ) -> reward_pb2.ListVerifiersResponse:
        """See reward.proto."""
        return reward_pb2.ListVerifiersResponse(
            verifiers=[
                reward_pb2.Verifier(name=name, description=verifier.description)
                for name, verifier in self._verifiers.items()
            ]
        )

    def _responses(self, request: reward_pb2.ScoreRequest) -> list[Response]:
        """The batch, checked. Raises InvalidArgumentError."""
        if len(request.items) > MAX_BATCH:
            raise InvalidArgumentError(
                f"{len(request.items)} responses in one batch; send at most {MAX_BATCH}", reason="BATCH_TOO_LONG"
            )
        unknown = {
            f"items[{index}].verifier": f"no verifier is named {item.verifier!r}"
            for index, item in enumerate(request.items)
            if item.verifier not in self._verifiers
        }
        if unknown:
            raise InvalidArgumentError(
                f"{next(iter(unknown.values()))}; choose one of {', '.join(self._verifiers)}",
                reason="UNKNOWN_VERIFIER",
                field_violations=unknown,
            )
        return [Response(item.response_text, item.gold, item.verifier, dict(item.metadata)) for item in request.items]


def _load(paths: tuple[str, ...]) -> dict[str, Verifier]:
    try:
        return dict(load_verifiers(paths))
    except (ValueError, ImportError) as error:
        raise FailedPreconditionError(
            f"can't load the verifiers: {error}; check NPR_REWARD_EXTRA_VERIFIERS", reason="VERIFIER_NOT_LOADED"
        ) from error


@cache
def _dialect(name: str) -> Dialect:
    """A bundled dialect; a caller's text never becomes a path. Raises InvalidArgumentError."""
    if name not in bundled_dialects():
        raise InvalidArgumentError(
            f"no dialect is named {name!r}; choose one of {', '.join(bundled_dialects())}", reason="UNKNOWN_DIALECT"
        )
    return load_dialect(name)


def _to_proto(score: Score) -> trajectory_pb2.Score:
    verdict = score.judgement.verdict
    return trajectory_pb2.Score(
        verdict=_KINDS[verdict.kind],
        reason=verdict.reason,
        answer=score.answer,
        format_penalty=score.grade.penalty,
        violations=[
            trajectory_pb2.Violation(code=fault.code, position=fault.position, message=fault.message)
            for fault in score.grade.faults
        ],
        reward=score.reward,
        seconds=score.judgement.seconds,
    )
