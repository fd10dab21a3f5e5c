"""Real peers for the service's tests: Valkey, buffer and reward processes, a policy store with tiny policies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from npr.types.v1 import policy_pb2
from npr_common.config import Addresses
from npr_common.policy_store import PolicyMetadata, PolicyStore
from npr_common.testing.valkey import valkey_server
from npr_rollout.testing.models import tagged_tokenizer, tiny_model

START_SECONDS = 60.0

torch.set_num_threads(1)  # tests share their cores
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}\n"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class PeerProcess:
    """A service of the system as a process of its own, which can be killed and started again at its address."""

    module: str
    environment: dict[str, str]
    folder: Path
    port: int = field(default_factory=_free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {**os.environ, **self.environment, "NPR_LISTEN": self.address, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{self.module}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module], env=environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.module} did not become healthy; see {self.folder}")
            time.sleep(0.05)

    def _healthy(self) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            try:
                status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            except grpc.RpcError:
                return False
        return bool(status.status == health_pb2.HealthCheckResponse.SERVING)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=30)


@dataclass(frozen=True)
class Peers:
    buffer: PeerProcess
    reward: PeerProcess
    addresses: Addresses
    store: PolicyStore
    folder: Path

    def rollout_process(self, environment: dict[str, str]) -> PeerProcess:
        """The service under test as a process; not started."""
        addresses = {f"NPR_{name.upper()}": str(value) for name, value in self.addresses.model_dump().items()}
        return PeerProcess("npr_rollout", {**addresses, **environment}, self.folder)


@pytest.fixture(scope="session")
def peers() -> Iterator[Peers]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with valkey_server(folder / "valkey") as valkey:
            buffer = PeerProcess("npr_buffer", {"NPR_BUFFER_REDIS_URL": valkey.url}, folder)
            reward = PeerProcess("npr_reward", {}, folder)
            buffer.start()
            reward.start()
            addresses = Addresses(
                buffer_address=buffer.address,
                reward_address=reward.address,
                policy_store_url=f"file://{folder}/policies",
                cache_dir=folder / "cache",
            )
            yield Peers(
                buffer, reward, addresses, PolicyStore(addresses.policy_store_url, folder / "publisher"), folder
            )
            buffer.stop()
            reward.stop()


def publish(store: PolicyStore, line: str, version: int, *, seed: int = 0) -> policy_pb2.PolicyRef:
    """A tiny random policy with tag tokens."""
    tokenizer = tagged_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    model = tiny_model("qwen3", tokenizer, seed, hidden=32, layers=2)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    metadata = PolicyMetadata(dialect="npr", has_tag_tokens=True, stage="test", step=version)
    return store.publish(line, version, _files(model, tokenizer), metadata)


def _files(*parts: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        for part in parts:
            part.save_pretrained(name)
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


@pytest.fixture(name="publish")
def _publish(peers: Peers) -> Any:
    return lambda line, version=0, **kwargs: publish(peers.store, line, version, **kwargs)
