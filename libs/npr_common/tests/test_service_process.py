"""A service process is healthy when `start` returns, keeps its address, and says where to look when it fails."""

from pathlib import Path

import grpc
import pytest

from npr_common.rpc.server import is_loopback
from npr_common.testing.processes import ServiceProcess, service_process

SERVICE = """
import os
from pathlib import Path
import grpc
from npr_common.rpc.server import run


class Idle:
    name = "idle"
    grpc_names = ("npr.test.v1.IdleService",)

    def register(self, server: grpc.aio.Server) -> None:
        pass

    async def start(self) -> None:
        if os.environ.get("IDLE_FAILS"):
            raise SystemExit("it was told to fail")

    async def drain(self) -> None:
        Path(os.environ["IDLE_DRAINED"]).touch()


run(Idle)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which `python -m idle_service` is a service."""
    (tmp_path / "idle_service.py").write_text(SERVICE, encoding="utf-8")
    return {"PYTHONPATH": str(tmp_path), "IDLE_DRAINED": str(tmp_path / "drained")}


def test_it_keeps_its_address_over_death_and_drains_on_sigterm(tmp_path: Path, environment: dict[str, str]) -> None:
    with service_process("idle_service", tmp_path / "state", environment) as process:
        address, pid = process.address, process.pid
        assert is_loopback(address.rpartition(":")[0])
        process.kill()
        assert not (tmp_path / "drained").exists()
        process.start()
        assert process.address == address
        assert process.pid != pid
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=10)
        assert process.stop() == 0
    assert (tmp_path / "drained").exists()


def test_one_that_fails_names_its_log(tmp_path: Path, environment: dict[str, str]) -> None:
    process = ServiceProcess("idle_service", tmp_path / "state", {**environment, "IDLE_FAILS": "1"})
    with pytest.raises(RuntimeError, match=r"idle_service\.log"):
        process.start()
    assert "told to fail" in (tmp_path / "state" / "idle_service.log").read_text("utf-8")
    with pytest.raises(RuntimeError, match="start it first"):
        process.stop()
