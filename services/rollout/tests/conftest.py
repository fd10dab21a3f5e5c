"""Real peers for the service's tests: Valkey, buffer and reward processes, a policy store with tiny policies."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from npr.types.v1 import policy_pb2
from npr_common.canary import Canary, canary_prompt
from npr_common.config import Addresses
from npr_common.policy_store import PolicyMetadata, PolicyStore
from npr_common.testing.processes import ServiceProcess, service_process
from npr_common.testing.valkey import valkey_server
from npr_rollout.sglang.transport import Transport
from npr_rollout.testing.conformance import model_server
from npr_rollout.testing.models import tagged_tokenizer, tiny_model

torch.set_num_threads(1)  # tests share their cores
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}\n"


@dataclass(frozen=True)
class Peers:
    buffer: ServiceProcess
    reward: ServiceProcess
    addresses: Addresses
    store: PolicyStore
    folder: Path

    def rollout_process(self, environment: dict[str, str]) -> ServiceProcess:
        """The service under test as a process; not started."""
        addresses = {f"NPR_{name.upper()}": str(value) for name, value in self.addresses.model_dump().items()}
        return ServiceProcess("npr_rollout", self.folder, {**addresses, **environment})


@pytest.fixture(scope="session")
def peers() -> Iterator[Peers]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            valkey_server(folder / "valkey") as valkey,
            service_process("npr_buffer", folder, {"NPR_BUFFER_REDIS_URL": valkey.url}) as buffer,
            service_process("npr_reward", folder, {}) as reward,
        ):
            addresses = Addresses(
                buffer_address=buffer.address,
                reward_address=reward.address,
                policy_store_url=f"file://{folder}/policies",
                cache_dir=folder / "cache",
            )
            store = PolicyStore(addresses.policy_store_url, folder / "publisher")
            yield Peers(buffer, reward, addresses, store, folder)


def publish(
    store: PolicyStore, line: str, version: int, *, seed: int = 0, canary_of: int | None = None, canary: bool = True
) -> policy_pb2.PolicyRef:
    """A tiny random policy with tag tokens; with the canary of its own seed, of another one, or with none."""
    tokenizer = tagged_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    model = tiny_model("qwen3", tokenizer, seed, hidden=32, layers=2)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    says = tiny_model("qwen3", tokenizer, seed if canary_of is None else canary_of, hidden=32, layers=2)
    metadata = PolicyMetadata(
        dialect="npr", has_tag_tokens=True, stage="test", step=version, canary=make_canary(says) if canary else None
    )
    return store.publish(line, version, _files(model, tokenizer), metadata)


def make_canary(model: Any) -> Canary:
    """What the library's own forward pass says."""
    token_ids = canary_prompt(model)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0, -1]
    return Canary.of(token_ids, logits.log_softmax(dim=-1).numpy())


def _files(*parts: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        for part in parts:
            part.save_pretrained(name)
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


@pytest.fixture(name="publish")
def _publish(peers: Peers) -> Any:
    return lambda line, version=0, **kwargs: publish(peers.store, line, version, **kwargs)


@pytest.fixture(scope="session")
def server() -> Iterator[Transport]:
    """An SGLang server with the model of the conformance tests."""
    python = os.environ.get("NPR_SGLANG_PYTHON")
    if python is None:
        pytest.skip("NPR_SGLANG_PYTHON names no Python with SGLang")
    with model_server(python) as transport:
        yield transport
