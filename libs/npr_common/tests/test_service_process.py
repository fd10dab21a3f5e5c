"""A service process is healthy when `start` returns, keeps its address, and says where to look when it fails."""

import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from npr_common.config import WRONG_SETTINGS_EXIT_CODE
from npr_common.rpc.server import is_loopback
from npr_common.testing.processes import ServiceProcess, service_process

SERVICE = """
import os
from pathlib import Path
import grpc
from pydantic_settings import SettingsConfigDict
from npr_common.config import Settings
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


class IdleSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="NPR_IDLE_", extra="ignore")

    seconds: float = 1.0
    names: tuple[str, ...] = ()


def make() -> Idle:
    IdleSettings()
    return Idle()


run(make)
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


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"NPR_IDLE_SECONDS": "soon", "NPR_MAX_MESSAGE_MIB": "0", "NPR_DRAIN_SECONDS": "-1"},
            [
                "NPR_MAX_MESSAGE_MIB: Input should be greater than or equal to 1",
                "NPR_DRAIN_SECONDS: Input should be greater than or equal to 0",
                "NPR_IDLE_SECONDS: Input should be a valid number, unable to parse string as a number",
            ],
        ),
        ({"NPR_IDLE_NAMES": "a,b"}, ["NPR_IDLE_NAMES: Input should be JSON"]),
        ({"NPR_IDLE_NAMES": "[1, 2]"}, ["NPR_IDLE_NAMES: Input should be a valid string"]),
        ({"NPR_LOG_LEVEL": "loud"}, ["NPR_LOG_LEVEL: Input should be CRITICAL, FATAL, ERROR, WARN, WARNING, INFO"]),
    ],
)
def test_wrong_settings_end_it_with_a_line_each(
    environment: dict[str, str], settings: dict[str, str], told: list[str]
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "idle_service"],
        env={**os.environ, **environment, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == WRONG_SETTINGS_EXIT_CODE
    lines = ended.stderr.splitlines()
    assert len(lines) == len(told)
    assert all(line.startswith(start) for line, start in zip(lines, told, strict=True)), lines
