"""Recipes: one YAML file a run."""

from npr_controller.recipe.decoding import Decoding
from npr_controller.recipe.policy import PublishedPolicy
from npr_controller.recipe.recipe import SEED_STAGE, Evaluation, Guard, Recipe, parse_recipe
from npr_controller.recipe.sources import Data, FileSource, MultipartSource, ReasoningGymSource, Source
from npr_controller.recipe.stages import (
    AnyReinforcement,
    AnyStage,
    BetaStage,
    Keep,
    MultiverseStage,
    NprStage,
    ReinforcementStage,
    SequentialStage,
    StartFrom,
    ZeroStage,
)

__all__ = [
    "SEED_STAGE",
    "AnyReinforcement",
    "AnyStage",
    "BetaStage",
    "Data",
    "Decoding",
    "Evaluation",
    "FileSource",
    "Guard",
    "Keep",
    "MultipartSource",
    "MultiverseStage",
    "NprStage",
    "PublishedPolicy",
    "ReasoningGymSource",
    "Recipe",
    "ReinforcementStage",
    "SequentialStage",
    "Source",
    "StartFrom",
    "ZeroStage",
    "parse_recipe",
]
