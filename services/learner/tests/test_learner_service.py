"""The learner through real gRPC with a real buffer process."""

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

from npr.buffer.v1 import buffer_pb2
from npr.learner.v1 import learner_pb2
from npr.types.v1 import policy_pb2
from npr_common.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    rpc_errors,
)
from npr_common.policy_store import PolicyStore
from npr_common.tags import TagIds
from npr_learner.advantages import papo_advantages
from npr_learner.row import row_of_trajectory
from npr_learner.testing import DIALECT, make_world


def store_of(rig: Any) -> PolicyStore:
    return PolicyStore(rig.addresses.policy_store_url, rig.addresses.cache_dir)


def weights_of(rig: Any, ref: policy_pb2.PolicyRef) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(store_of(rig).materialize(ref) / "model.safetensors")
    return tensors


async def test_start_stage_adds_tags_publishes_and_is_idempotent(rig: Any) -> None:
    async with rig.running():
        first = await rig.start("beta", "SFT")
        assert (first.policy.line, first.policy.version, first.next_step) == (rig.run_id, 0, 0)
        assert await rig.start("beta", "SFT") == first
        manifest = store_of(rig).manifest(first.policy)
        assert manifest.metadata.has_tag_tokens
        folder = store_of(rig).materialize(first.policy)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert TagIds.from_tokenizer(tokenizer, DIALECT) is not None
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.get_input_embeddings().num_embeddings == len(tokenizer)
        assert tokenizer.chat_template
        with pytest.raises(FailedPreconditionError, match="other options") as refused:
            await rig.start("beta", "SFT", options_json='{"learning_rate": 2e-3}')
        assert refused.value.reason == "STAGE_DIFFERS"
    async with rig.running():  # a new process finds it
        assert await rig.start("beta", "SFT") == first


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"options_json": '{"learning_rat": 1}'}, InvalidArgumentError, "learning_rat"),
        ({"options_json": '{"learning_rate": -1}'}, InvalidArgumentError, "learning_rate"),
        ({"options_json": "nonsense"}, InvalidArgumentError, "JSON"),
        ({"options_json": '{"learning_rate": 1, "schedule": "cosine"}'}, InvalidArgumentError, "total_steps"),
        ({"source": learner_pb2.ModelSource(model="/nowhere/model")}, NotFoundError, "/nowhere/model"),
        ({"source": learner_pb2.ModelSource(model="bundled:nothing")}, NotFoundError, "bundled:tiny"),
        ({"source": learner_pb2.ModelSource()}, InvalidArgumentError, "source"),
        ({"dialect": "klingon"}, InvalidArgumentError, "klingon"),
        ({"stage": "../beta"}, InvalidArgumentError, "stage"),
        ({"visibility": 99}, InvalidArgumentError, "knows no visibility 99"),
    ],
)
async def test_bad_starts_say_what_to_do(rig: Any, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    stage = changes.pop("stage", "npr")
    async with rig.running():
        with pytest.raises(error, match=words):
            await rig.start(stage, "PAPO", **changes)
        if "/" not in stage:
            with pytest.raises(NotFoundError, match="StartStage"):
                await rig.stage(stage)


async def test_papo_step_is_adamw_on_the_formula(rig: Any) -> None:
    """Weights after one step equal plain AdamW on a gradient written from the formula, in float64."""
    options = {"learning_rate": 1e-3, "max_grad_norm": 1e9, "weight_decay": 0.0, "micro_batch_tokens": 150}
    async with rig.running():
        started = await rig.start("npr", "PAPO", options_json=json.dumps(options))
        group_ids = await rig.experience(started.policy, "g")
        *progress, last = await rig.train("npr", 0, group_ids)
        assert [event.progress.done for event in progress] == list(range(1, len(progress) + 1))
        assert len(progress) > 3
        groups = [group async for group in rig.buffer.ReadGroups(_read(rig, group_ids))]
        assert await rig.consumed_by() == {"npr/step/0": 3}
        state = await rig.stage("npr")
        assert (state.next_step, state.policy, last.result.policy.version) == (1, last.result.policy, 1)
        assert await rig.train("npr", 0, group_ids) == [last]  # a repeat answers, and trains nothing
        assert await rig.stage("npr") == state

    scored = [item for group in groups for item in group.trajectories]
    rewards = [1.0 if item.score.reward > 0 else -1.0 for item in scored]
    advantages = papo_advantages(rewards, [item.trajectory.group_id for item in scored], 1e-6)
    model = AutoModelForCausalLM.from_pretrained(store_of(rig).materialize(started.policy)).double()
    world = make_world()
    losses, count = [], 0
    for item, advantage in zip(scored, advantages, strict=True):
        row = row_of_trajectory(item.trajectory, world.tags, len(world.tokenizer))
        tree = row.topology
        mask = torch.from_numpy(tree.dense_mask())[None, None]
        ids, positions = torch.from_numpy(row.token_ids)[None], torch.tensor(tree.positions)[None]
        table = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[0].log_softmax(-1)
        losses.append(-advantage * table[row.trained - 1, row.token_ids[row.trained]].sum())
        count += len(row.trained)
    torch.stack(losses).sum().div(count).backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0).step()

    metrics = last.result.metrics
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["tokens"] == count
    assert metrics["kept_fraction"] == 1.0
    assert metrics["accuracy"] == pytest.approx(0.5)
    assert metrics["learning_rate"] == 1e-3
    expected = dict(model.named_parameters())
    for name, tensor in weights_of(rig, last.result.policy).items():
        # Adam's first step is lr * sign(gradient): where a gradient is next to 0, float32 may choose the other sign.
        close = torch.isclose(tensor.double(), expected[name], rtol=0, atol=1e-6)
        assert close.double().mean() > 0.995, name


def _read(rig: Any, group_ids: list[str]) -> buffer_pb2.ReadGroupsRequest:
    return buffer_pb2.ReadGroupsRequest(run_id=rig.run_id, group_ids=group_ids)


async def test_dapo_takes_one_step_a_mini_batch_and_moves_towards_what_was_right(rig: Any) -> None:
    options = {"learning_rate": 3e-3, "minibatches_per_step": 2, "weight_decay": 0.0}
    async with rig.running():
        started = await rig.start("zero", "DAPO", options_json=json.dumps(options))
        group_ids = await rig.experience(started.policy, "g", parallel=False)
        result = (await rig.train("zero", 0, group_ids))[-1].result
        assert result.metrics["optimizer_steps"] == 2
        assert result.policy.version == 1
        assert 0 <= result.metrics["clip_fraction"] <= 1
        assert not store_of(rig).manifest(result.policy).metadata.has_tag_tokens


async def test_steps_out_of_order_of_other_policies_or_without_a_survivor_are_refused(rig: Any) -> None:
    async with rig.running():
        started = await rig.start("npr", "PAPO")
        group_ids = await rig.experience(started.policy, "right")
        with pytest.raises(FailedPreconditionError) as early:
            await rig.train("npr", 4, group_ids)
        assert early.value.metadata["next_step"] == "0"
        other = policy_pb2.PolicyRef(line=rig.run_id, version=9, digest="x")
        with pytest.raises(FailedPreconditionError, match="version 9") as wrong:
            await rig.train("npr", 0, await rig.experience(other, "wrong"))
        assert wrong.value.reason == "WRONG_POLICY"
        with pytest.raises(FailedPreconditionError) as blind:
            await rig.train("npr", 0, await rig.experience(started.policy, "plain", parallel=False))
        assert blind.value.reason == "NOTHING_KEPT"
        assert blind.value.metadata == {"no_block": "12"}
        with pytest.raises(NotFoundError):
            await rig.train("npr", 0, ["no-such-group"])
        with pytest.raises(FailedPreconditionError, match="call TrainStep"):
            await rig.fine_tune("npr", group_ids)
        assert (await rig.stage("npr")).next_step == 0
        assert await rig.consumed_by() == {}
        await rig.train("npr", 0, group_ids)  # and the stage is none the worse


async def test_a_batch_that_another_policy_seems_to_have_drawn_is_not_learned(rig: Any) -> None:
    """The rig's behaviour log-probabilities are made up, so they are nats away."""
    async with rig.running():
        for stage, bound in (("strict", 0.1), ("lax", 100.0)):
            options = json.dumps({"learning_rate": 1e-3, "max_log_prob_drift_mean": bound})
            started = await rig.start(stage, "PAPO", options_json=options)
            group_ids = await rig.experience(started.policy, stage)
            if stage == "lax":
                metrics = (await rig.train(stage, 0, group_ids))[-1].result.metrics
                assert 0.1 < metrics["log_prob_drift_mean"] < metrics["log_prob_drift_max"]
                assert metrics["log_prob_drift_within_0.1"] < 0.5
                continue
            with pytest.raises(FailedPreconditionError, match="do not compute the same policy") as refused:
                await rig.train(stage, 0, group_ids)
            assert refused.value.reason == "LOG_PROB_DRIFT"
            assert float(refused.value.metadata["log_prob_drift_mean"]) > 0.1
            assert (await rig.stage(stage)).next_step == 0
            assert await rig.consumed_by() == {}


async def test_fine_tuning_lowers_the_loss_and_is_idempotent(rig: Any) -> None:
    options = {
        "learning_rate": 3e-3,
        "epochs": 8,
        "tokens_per_update": 150,
        "schedule": "cosine",
        "warmup_fraction": 0.1,
    }
    async with rig.running():
        started = await rig.start("beta", "SFT", options_json=json.dumps(options))
        group_ids = await rig.experience(started.policy, "g", groups=4, samples=2)
        *progress, last = await rig.fine_tune("beta", group_ids, samples=2)
        losses = [event.progress.metrics["loss"] for event in progress]
        assert np.mean(losses[-4:]) < 0.6 * np.mean(losses[:4])
        assert progress[-1].progress.done == progress[-1].progress.total
        assert await rig.fine_tune("beta", group_ids, samples=2) == [last]
        state = await rig.stage("beta")
        assert state.fine_tuned
        assert (state.next_step, state.policy.version) == (1, 1)
        assert await rig.consumed_by() == {"beta/fine_tune": 4}
        following = await rig.start("npr", "PAPO", source=learner_pb2.ModelSource(policy=state.policy))
        assert following.policy.version == 2  # versions of a line only grow
        before, after = weights_of(rig, state.policy), weights_of(rig, following.policy)
        assert all(torch.equal(before[name], after[name]) for name in before)


async def test_fine_tuning_on_a_data_set_skips_what_has_no_block(rig: Any, tmp_path: Path) -> None:
    good = "<guideline><plan>1: alpha</plan></guideline> <step>1: beta</step> <takeaway>gamma</takeaway>\\boxed{7}"
    lines = [{"prompt": "alpha", "response": good}, {"prompt": "alpha", "response": "\\boxed{7}"}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    async with rig.running():
        await rig.start("multiverse", "SFT")
        request = learner_pb2.FineTuneRequest(run_id=rig.run_id, stage="multiverse", dataset_url=str(path))
        answers = [answer async for answer in rig.learner.FineTune(request)]
        assert answers[-1].result.metrics["kept_fraction"] == 0.5
        path.write_text('{"prompt": 1}')
        await rig.start("broken", "SFT")
        request.stage = "broken"
        with pytest.raises(InvalidArgumentError, match="line 1"), rpc_errors():
            _ = [answer async for answer in rig.learner.FineTune(request)]


async def test_a_corrupt_checkpoint_is_named_and_the_one_before_can_be_used(rig: Any) -> None:
    async with rig.running():
        started = await rig.start("npr", "PAPO")
        group_ids = await rig.experience(started.policy, "g")
        result = (await rig.train("npr", 0, group_ids))[-1].result
    folder = rig.folder / "store" / "checkpoints" / rig.run_id / "npr"
    tensors = folder / "00000001" / "__0_0.distcp"
    content = bytearray(tensors.read_bytes())
    content[-5] ^= 1
    tensors.write_bytes(content)
    async with rig.running():
        with pytest.raises(DataLossError, match=r"00000001/__0_0\.distcp") as corrupt:
            await rig.train("npr", 1, group_ids)
        assert "delete" in str(corrupt.value)
        next(folder.glob("00000001-*.json")).unlink()
        assert (await rig.stage("npr")).next_step == 0
        again = (await rig.train("npr", 0, group_ids))[-1].result  # the same step, the same policy
        assert again.policy == result.policy


async def test_a_full_disk_loses_nothing(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with rig.running():
        started = await rig.start("npr", "PAPO")
        group_ids = await rig.experience(started.policy, "g")
        with monkeypatch.context() as patch:
            patch.setattr(FsspecWriter, "write_data", full)
            with pytest.raises(ResourceExhaustedError, match="no space left to write") as told:
                await rig.train("npr", 0, group_ids)
        assert told.value.reason == "DISK_FULL"
        assert (await rig.stage("npr")).next_step == 0
        await rig.train("npr", 0, group_ids)
        assert await rig.consumed_by() == {"npr/step/0": 3}


async def test_a_caller_that_leaves_stops_the_work_and_loses_nothing(rig: Any) -> None:
    options = {"learning_rate": 1e-3, "epochs": 5000, "tokens_per_update": 100, "checkpoint_every_steps": 5}
    async with rig.running():
        started = await rig.start("beta", "SFT", options_json=json.dumps(options))
        group_ids = await rig.experience(started.policy, "g")
        call = rig.learner.FineTune(rig.fine_tune_request("beta", group_ids))
        async for answer in call:
            if answer.progress.done >= 12:
                call.cancel()
                break
        state = await rig.stage("beta")
        assert not state.fine_tuned
        resumed = rig.learner.FineTune(rig.fine_tune_request("beta", group_ids))
        first = await anext(aiter(resumed))
        assert 5 < first.progress.done < 5000
        assert first.progress.done % 5 == 1  # right after a checkpoint
        resumed.cancel()


async def test_export_writes_a_folder_that_loads(rig: Any) -> None:
    async with rig.running():
        started = await rig.start("npr", "PAPO")
        request = learner_pb2.ExportPolicyRequest(policy=started.policy, name="mine")
        for _ in range(2):
            answer = await rig.learner.ExportPolicy(request)
        model = AutoModelForCausalLM.from_pretrained(answer.url.removeprefix("file://"))
        published = weights_of(rig, started.policy)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), published[name], rtol=0, atol=0)
        with pytest.raises(InvalidArgumentError, match="name"), rpc_errors():
            await rig.learner.ExportPolicy(learner_pb2.ExportPolicyRequest(policy=started.policy, name="../mine"))


@pytest.mark.parametrize(("field", "value"), [("top_p", 0.9), ("min_p", 0.1)])
async def test_distorted_sampling_is_refused(rig: Any, field: str, value: float) -> None:
    async with rig.running():
        started = await rig.start("npr", "PAPO")
        plain = rig.group

        def cut(group_id: str, samples: int) -> Any:
            group = plain(group_id, samples)
            setattr(group.decoding.sampling, field, value)
            return group

        rig.group = cut
        with pytest.raises(FailedPreconditionError, match=field) as refused:
            await rig.train("npr", 0, await rig.experience(started.policy, "cut"))
        assert refused.value.reason == "DISTORTED_SAMPLING"
