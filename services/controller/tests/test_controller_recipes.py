"""Recipes: those that are shipped validate, and what is wrong with others is said in one line."""

from pathlib import Path

import pytest
import yaml

from npr.learner.v1 import learner_pb2
from npr.types.v1 import sampling_pb2
from npr_common.rpc import InvalidArgumentError
from npr_controller.recipe import Recipe, parse_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
SHIPPED = [
    "tiny",
    "qwen3-4b-instruct",
    "qwen3-4b-base-nonthinking",
    "sequential-baseline",
    "multiverse-style",
    "smollm2-135m",
]
MINIMAL = """
name: minimal
model: bundled:tiny
data:
  train: {kind: multipart, split: train, count: 10}
  test: {multipart: {kind: multipart, split: test, count: 10}}
stages:
  - {kind: zero, steps: 1, prompts_per_step: 2, samples_per_prompt: 4, learning: {learning_rate: 0.001}}
"""


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_validate(name: str) -> None:
    recipe = parse_recipe((RECIPES / f"{name}.yaml").read_text())
    assert recipe.name == name
    assert recipe.stages


def test_the_reference_runs_values_are_those_of_the_paper() -> None:
    recipe = parse_recipe((RECIPES / "qwen3-4b-instruct.yaml").read_text())
    zero, beta, npr = recipe.stages
    assert (zero.prompts_per_step, zero.samples_per_prompt) == (32, 16)
    wanted = {"learning_rate": 1e-6, "warmup_steps": 10, "schedule": "cosine", "weight_decay": 0.1, "dual_clip": 10.0}
    assert zero.learning.options().items() >= wanted.items()
    assert (beta.tries, beta.learning.epochs, beta.learning.warmup_fraction) == (8, 1, 0.05)
    assert (npr.prompts_per_step, npr.samples_per_prompt, npr.learning.learning_rate) == (16, 16, 1e-7)
    assert recipe.decoding.max_tokens == 30_000


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"stagez": []}, "stagez: unknown key; did you mean 'stages'?"),
        ({"nonsense": 1}, "nonsense: unknown key; docs/recipes.md lists the keys"),
        ({"decoding": {"max_token": 9}}, "decoding.max_token: unknown key; did you mean 'max_tokens'?"),
        ({"data": {"test": {"own": {"kind": "multipart", "splits": "test"}}}}, "did you mean 'split'?"),
        (
            {"stages": [{"kind": "beta", "problems": 1, "tries": 1, "learning": {"learning_rate": 1, "epoch": 2}}]},
            "stages.0.beta.learning.epoch: unknown key; did you mean 'epochs'?",
        ),
        ({"decoding": {"min_p": 1.0}}, "decoding.min_p: Input should be less than 1"),
        ({"decoding": {"budget": {"share": "all"}}}, "decoding.budget.share: Input should be 'first_come' or 'fair'"),
        ({"decoding": {"budget": {"early_stop": {"quorum": 1}}}}, "quorum needs a straggler_factor of at least 1"),
        ({"decoding": {"budget": {"early_stop": {"straggler_factor": 2}}}}, "straggler_factor needs a quorum"),
        ({"decoding": {"max_tokens": 9, "budget": {"takeaway_reserve_tokens": 9}}}, "leaves branches nothing"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"model": None}, "name either a model or a policy"),
        ({"prompt": {"user": "no place"}}, "prompt.user: must hold {problem}"),
        ({"evaluation": {"pass_at": [4]}}, "k can't exceed samples_per_problem"),
        (
            {"data": {"test": {"m": {"kind": "multipart", "split": "test", "count": 1}}}},
            "data.train: name the problems",
        ),
        ({"data": {"test": {"m": {"kind": "csv"}}}}, "data.test.m: Input tag 'csv'"),
        ({"stages": [{"kind": "zero", "name": "seed"}]}, "stages.0.zero.steps: Field required"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(change: dict[str, object], told: str) -> None:
    text = yaml.safe_dump(yaml.safe_load(MINIMAL) | change)
    with pytest.raises(InvalidArgumentError) as caught:
        parse_recipe(text)
    assert told in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.field_violations


@pytest.mark.parametrize("text", ["a: [", "- 1", ""])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="not"):
        parse_recipe(text)


def test_two_stages_of_one_kind_need_names() -> None:
    content = yaml.safe_load(MINIMAL)
    content["stages"] *= 2
    with pytest.raises(InvalidArgumentError, match=r"names must differ, and `seed` is taken: zero"):
        parse_recipe(yaml.safe_dump(content))
    content["stages"][1] = content["stages"][0] | {"name": "zero-again"}
    assert len(parse_recipe(yaml.safe_dump(content)).stages) == 2


def test_decoding_travels_whole_to_the_engine() -> None:
    recipe = _with(decoding={"temperature": 0.7, "max_tokens": 9, "max_branches": 3, "fork_refusal": "serialize"})
    spec = recipe.decoding.to_proto(sampling_pb2.VISIBILITY_PARALLEL, seed=5)
    assert spec.sampling.temperature == pytest.approx(0.7)
    assert (spec.sampling.seed, spec.limits.max_tokens, spec.limits.max_branches) == (5, 9, 3)
    assert spec.limits.max_blocks == 0, "what a recipe leaves out is the engine's own"
    assert spec.fork_refusal == sampling_pb2.FORK_REFUSAL_POLICY_SERIALIZE
    assert spec.visibility == sampling_pb2.VISIBILITY_PARALLEL


def test_min_p_and_the_budget_policy_travel_to_the_engine() -> None:
    budget = {
        "share": "fair",
        "on_exhausted": "truncate",
        "takeaway_reserve_tokens": 40,
        "early_stop": {"quorum": 2, "straggler_factor": 1.5, "min_mean_log_prob": -3},
    }
    recipe = _with(decoding={"min_p": 0.25, "raw_log_probs": True, "budget": budget})
    spec = recipe.decoding.to_proto(sampling_pb2.VISIBILITY_PARALLEL, seed=5)
    assert (spec.sampling.min_p, spec.sampling.raw_log_probs) == (0.25, True)
    assert spec.budget == sampling_pb2.BudgetPolicy(
        share=sampling_pb2.BRANCH_SHARE_FAIR,
        on_exhausted=sampling_pb2.EXHAUSTION_TRUNCATE,
        takeaway_reserve_tokens=40,
        early_stop=sampling_pb2.EarlyStop(quorum=2, straggler_factor=1.5, min_mean_log_prob=-3),
    )


def test_a_problems_own_braces_survive_the_template() -> None:
    recipe = _with(prompt={"system": "Be brief.", "user": "Solve: {problem}"})
    system, user = recipe.prompt.messages("\\frac{1}{2} {problem}")
    assert (system.role, system.content) == ("system", "Be brief.")
    assert user.content == "Solve: \\frac{1}{2} {problem}"


def test_worked_examples_are_turns_before_the_problem() -> None:
    example = {"problem": "1 + 1", "response": "\\boxed{2}"}
    recipe = _with(prompt={"system": "Be brief.", "examples": [example], "user": "Solve: {problem}"})
    turns = [(message.role, message.content) for message in recipe.prompt.messages("3 + 4")]
    assert turns == [
        ("system", "Be brief."),
        ("user", "Solve: 1 + 1"),
        ("assistant", "\\boxed{2}"),
        ("user", "Solve: 3 + 4"),
    ]


@pytest.mark.parametrize(("loss", "objective"), [("dapo", "OBJECTIVE_DAPO"), ("grpo", "OBJECTIVE_GRPO")])
def test_the_sequential_baseline_has_the_loss_that_it_names(loss: str, objective: str) -> None:
    stage = {"kind": "sequential", "steps": 1, "prompts_per_step": 1, "samples_per_prompt": 2, "loss": loss}
    [sequential] = _with(stages=[stage | {"learning": {"learning_rate": 1e-3}}]).stages
    assert learner_pb2.Objective.Name(sequential.objective) == objective


def test_learning_options_are_only_those_that_are_set() -> None:
    [stage] = _with().stages
    assert stage.learning.options(seed=3) == {"learning_rate": 0.001, "seed": 3}


def _with(**changes: object) -> Recipe:
    return parse_recipe(yaml.safe_dump(yaml.safe_load(MINIMAL) | changes))
