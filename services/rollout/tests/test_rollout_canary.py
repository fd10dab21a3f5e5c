"""The canary forward, through the engine: it passes what is right, and finds what is wrong, on pages of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from npr.types.v1 import policy_pb2
from npr_common.canary import Canary, canary_prompt
from npr_common.dialects import load_dialect
from npr_common.errors import DataLossError, FailedPreconditionError
from npr_rollout.canary import CanaryCheck
from npr_rollout.engine import model_runner
from npr_rollout.engine.config import AttentionKind, EngineConfig, KvDtype
from npr_rollout.engine.engine import Engine
from npr_rollout.policy_loader import LoadedPolicy
from npr_rollout.record.outcomes import Visibility
from npr_rollout.record.request import FinishedEvent, Limits, Request, SamplingParams
from npr_rollout.testing.models import tagged_tokenizer, tiny_model

TOKENIZER = tagged_tokenizer()
DIALECT = load_dialect("npr")


def canary_of(model: Any) -> Canary:
    token_ids = canary_prompt(model)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0, -1]
    return Canary.of(token_ids, logits.log_softmax(dim=-1).numpy())


def policy(
    family: str = "qwen3", spoil: Callable[[Any], Any] = lambda model: None, dtype: torch.dtype = torch.float32
) -> LoadedPolicy:
    """A policy whose canary is of the float32 values of its weights before they are spoilt."""
    model = tiny_model(family, TOKENIZER, 5).to(dtype)
    canary = canary_of(tiny_model(family, TOKENIZER, 5).to(dtype).float())
    with torch.no_grad():
        spoil(model)
    return LoadedPolicy(policy_pb2.PolicyRef(line="bird", version=3), model, TOKENIZER, DIALECT, canary)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("attention", [AttentionKind.AUTO, AttentionKind.SDPA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_what_is_right_passes(family: str, attention: AttentionKind, dtype: torch.dtype, page_size: int) -> None:
    kinds = {torch.bfloat16: KvDtype.BFLOAT16}
    config = EngineConfig(attention=attention, page_size=page_size, kv_dtype=kinds.get(dtype, KvDtype.AUTO))
    CanaryCheck(policy(family, dtype=dtype), config).run()


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("swapped layers", lambda model: model.model.layers.insert(0, model.model.layers.pop(2))),
        ("a lost head", lambda model: model.model.layers[1].self_attn.o_proj.weight[:, :16].zero_()),
        ("a transposed weight", lambda model: model.model.layers[0].self_attn.q_proj.weight.t_()),
        ("one row shifted", lambda model: model.model.layers[2].mlp.down_proj.weight.copy_(
            model.model.layers[2].mlp.down_proj.weight.roll(1, 0)
        )),
        ("a forgotten norm", lambda model: model.model.norm.weight.mul_(1.05)),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(what: str, spoil: Callable[[Any], Any]) -> None:
    check = CanaryCheck(policy(spoil=spoil), EngineConfig())
    with pytest.raises(DataLossError, match=r"policy bird version 3 fails its canary forward.* off") as caught:
        check.run()
    assert caught.value.reason == "CANARY", what


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are right, the attention is not: keys of the last chunk are forgotten."""
    make_plan = model_runner.make_plan

    def forgetful(tables: Any, rows: Any, counts: Any, lengths: Any) -> Any:
        return make_plan(tables, rows, counts, (lengths - 8).clip(min=counts))

    monkeypatch.setattr(model_runner, "make_plan", forgetful)
    check = CanaryCheck(policy(), EngineConfig())
    with pytest.raises(DataLossError, match="fails its canary forward"):
        check.run()


@pytest.mark.parametrize("with_canary", [True, False])
def test_no_numbers_are_found_without_a_canary_too(with_canary: bool) -> None:
    spoilt = policy(spoil=lambda model: model.model.layers[1].mlp.up_proj.weight[3].fill_(float("nan")))
    plain = LoadedPolicy(spoilt.ref, spoilt.model, TOKENIZER, DIALECT, spoilt.canary if with_canary else None)
    with pytest.raises(DataLossError, match="no numbers"):
        CanaryCheck(plain, EngineConfig()).run()


def test_a_kind_of_model_that_is_not_served_is_no_loss_of_data() -> None:
    odd = policy()
    odd.model.config.layer_types = ["sliding_attention"] * 3
    with pytest.raises(FailedPreconditionError, match="full attention"):
        CanaryCheck(odd, EngineConfig())


def test_a_checked_model_is_served_as_if_it_had_not_been_checked() -> None:
    """The check packs the weights; a second and a third engine of the same model object give the same bits."""
    checked = policy()
    config = EngineConfig(pages=200)
    CanaryCheck(checked, config).run()
    results = [decode(model, config) for model in (policy().model, checked.model, checked.model)]
    assert results[0] == results[1] == results[2]


def decode(model: Any, config: EngineConfig) -> tuple[Any, ...]:
    engine = Engine(model, TOKENIZER, DIALECT, config)
    prompt = tuple(TOKENIZER.encode("a b c", add_special_tokens=False))
    for index in range(3):
        params = SamplingParams(seed=index)
        engine.submit(Request(str(index), prompt, params, Limits(max_tokens=40), Visibility.SEQUENTIAL))
    found = {}
    while not engine.idle:
        for event in engine.step():
            assert isinstance(event, FinishedEvent)
            found[event.result.request_id] = (event.result.token_ids, event.result.log_probs)
    return tuple(sorted(found.items()))
