"""One stage in memory: its policy, its frontier, and how both become a checkpoint and come back from it.

Invariants:
- Weights, optimiser, RNG and frontier are those of one moment. A step that fails halfway leaves a stage that must be
  dropped and loaded again.
- A restored stage goes on exactly as one that was never stopped: same numbers, bit for bit on one machine.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from npr.types.v1 import policy_pb2
from npr_common.dialects import load_dialect
from npr_common.policy_store import PolicyMetadata, PolicyStore
from npr_common.tags import TagIds
from npr_common.tokenizers import load_tokenizer
from npr_learner.checkpoint import Checkpoint
from npr_learner.forward import TokenScorer
from npr_learner.optim import make_optimizer
from npr_learner.options import StageOptions
from npr_learner.policy import Policy, empty_model
from npr_learner.publisher import base_files, policy_files
from npr_learner.records import StageRecord, StageSpec
from npr_learner.sharding import shard, wholes
from npr_learner.sources import Loaded
from npr_learner.special_tokens import add_tags
from npr_learner.world import World

_MODEL, _OPTIMIZER, _RNG = "model.", "optimizer.", "rng."


@dataclass
class Stage:
    """A policy under training and its frontier; `record` is replaced as a whole after each step."""

    policy: Policy
    base: dict[str, bytes]
    record: StageRecord
    world: World

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that training changes, by name; weights and moments may be split over the world."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.policy.model.named_parameters():
            found[f"{_MODEL}{name}"] = parameter.detach()
            for key, value in self.policy.optimizer.state.get(parameter, {}).items():
                found[f"{_OPTIMIZER}{name}/{key}"] = value
        return {**found, **{f"{_RNG}{name}": state for name, state in _rng_states().items()}}

    def whole_model(self) -> Any:
        """The model with all of its weights, on the first process; None on the others, who must call it too."""
        if self.world.size == 1:
            return self.policy.model
        weights = wholes(((n, p.detach()) for n, p in self.policy.model.named_parameters()), self.world)
        if not self.world.is_first:
            return None
        model = empty_model(self.policy.model.config, torch.device("cpu"))
        model.generation_config = self.policy.model.generation_config
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[name])
        return model

    def publish(self, whole_model: Any, store: PolicyStore) -> policy_pb2.PolicyRef:
        """Publishes the weights, of `whole_model()`, under the record's version; a repeat gives the same reference."""
        spec, record = self.record.spec, self.record
        files, canary = policy_files(whole_model, self.base, spec.options.published_precision)
        metadata = PolicyMetadata(
            dialect=self.policy.dialect.name,
            has_tag_tokens=self.policy.tags is not None,
            stage=spec.key.stage,
            step=record.next_step,
            parent_digest=record.parent_digest,
            canary=canary,
        )
        return store.publish(spec.key.run_id, record.policy_version, files, metadata)


def start_stage(spec: StageSpec, loaded: Loaded, policy_version: int, parent_digest: str, world: World) -> Stage:
    """A stage at its first frontier, from a model that was just loaded."""
    torch.manual_seed(spec.options.seed)
    dialect = load_dialect(spec.dialect)
    model, tokenizer = loaded
    if spec.add_tag_tokens:
        tokenizer = add_tags(model, tokenizer, dialect)
    base = base_files(model, tokenizer)
    record = StageRecord(spec=spec, serial=0, next_step=0, policy_version=policy_version, parent_digest=parent_digest)
    return Stage(_policy(model, tokenizer, spec, world), base, record, world)


def restore_stage(checkpoint: Checkpoint, world: World) -> Stage:
    """The stage that a checkpoint was made of, by however many processes."""
    spec = checkpoint.record.spec
    with tempfile.TemporaryDirectory() as name:
        for file_name, content in checkpoint.base_files.items():
            (Path(name) / file_name).write_bytes(content)
        model = empty_model(AutoConfig.from_pretrained(name, local_files_only=True), torch.device("cpu"))
        tokenizer = load_tokenizer(name)
    policy = _policy(model, tokenizer, spec, world)
    stage = Stage(policy, dict(checkpoint.base_files), checkpoint.record, world)
    _make_moments(policy, checkpoint.shapes)
    tensors = stage.tensors()
    # A machine with a GPU goes on from one without: that generator stays as it is. All else must be there.
    there = {n: tensor for n, tensor in tensors.items() if n in checkpoint.shapes or not n.startswith(_RNG)}
    checkpoint.read_into(there)
    _set_rng_states(tensors)
    return stage


def _policy(model: Any, tokenizer: Any, spec: StageSpec, world: World) -> Policy:
    dialect = load_dialect(spec.dialect)
    _prepare(model, spec.options)
    scorer = TokenScorer(model, spec.options.dtype)
    shard(scorer, world, spec.options)
    if world.mesh is None:
        scorer.to(world.device)
    optimizer = make_optimizer(model, spec.options)
    return Policy(scorer, optimizer, tokenizer, dialect, TagIds.from_tokenizer(tokenizer, dialect))


def _prepare(model: Any, options: StageOptions) -> None:
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _make_moments(policy: Policy, shapes: Mapping[str, torch.Size]) -> None:
    """The optimiser's state as a checkpoint has it, of zeros: moments lie as their parameters do."""
    parameters = dict(policy.model.named_parameters())
    for full_name, shape in shapes.items():
        if not full_name.startswith(_OPTIMIZER):
            continue
        name, _, key = full_name.removeprefix(_OPTIMIZER).rpartition("/")
        parameter = parameters[name]
        is_moment = shape == parameter.shape
        value = torch.zeros_like(parameter.detach()) if is_moment else torch.zeros(shape, device=parameter.device)
        policy.optimizer.state[parameter][key] = value


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_rng_states(tensors: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(tensors[f"{_RNG}cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[f"{_RNG}cuda"])
