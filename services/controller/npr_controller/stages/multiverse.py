"""The Multiverse-style baseline: parallel SFT on trajectories that somebody else made."""

from npr_controller.recipe import MultiverseStage, PublishedPolicy
from npr_controller.stages.context import RunContext
from npr_controller.stages.fine_tuning import fine_tune


async def learn(ctx: RunContext, stage: MultiverseStage, previous: PublishedPolicy) -> PublishedPolicy:
    """Fine-tunes on the stage's file and returns the policy after it."""
    return await fine_tune(ctx, stage, previous, dataset_url=stage.dataset_url)
