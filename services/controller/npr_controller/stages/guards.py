"""Guard rails: a run that goes wrong stops with a sentence instead of going on in vain."""

from npr_common.rpc import FailedPreconditionError
from npr_controller.recipe import AnyReinforcement, NprStage
from npr_controller.stages.context import RunContext
from npr_controller.stages.records import EvaluationRecord, SelectionRecord


def check_malformed_rate(ctx: RunContext, stage: AnyReinforcement, step: int) -> None:
    """Stops an NPR stage whose form drifts: PAPO as published has no gradient against malformed responses.

    Raises `FailedPreconditionError` when the last `guard.malformed_steps` batches were all past the bound.
    """
    guard = ctx.recipe.guard
    if not isinstance(stage, NprStage) or step + 1 < guard.malformed_steps:
        return
    recent = [
        ctx.journal.fact(f"{stage.name}/groups/{earlier}", SelectionRecord)
        for earlier in range(step + 1 - guard.malformed_steps, step + 1)
    ]
    rates = [selection.measures.malformed_rate for selection in recent if selection is not None]
    if len(rates) == guard.malformed_steps and min(rates) > guard.max_malformed_rate:
        raise FailedPreconditionError(
            f"{stage.name} step {step}: {rates[-1]:.0%} of the responses are malformed, past guard.max_malformed_rate "
            f"({guard.max_malformed_rate:.0%}); lower the learning rate or set `malformed: incorrect`",
            reason="MALFORMED_RATE",
        )


def check_forks(ctx: RunContext, stage: AnyReinforcement, before: EvaluationRecord | None) -> None:
    """Refuses stage 3 on a policy that seldom forks: nearly nothing would be kept.

    `before` is the evaluation of the parallel stage just before it, if there is one.
    Raises `FailedPreconditionError`.
    """
    bound = ctx.recipe.guard.min_forked_rate
    if not isinstance(stage, NprStage) or before is None:
        return
    rate = before.overall.measures.parallel_rate
    if rate < bound:
        raise FailedPreconditionError(
            f"{before.stage} forks in {rate:.1%} of its responses and {stage.name} needs {bound:.0%} "
            "(guard.min_forked_rate); give stage 2 more updates, or lower the bound, in a new run",
            reason="FORKED_RATE",
        )
