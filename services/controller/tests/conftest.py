"""A real Valkey and a real buffer process, shared by the controller's tests."""

from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from npr_common.rpc import connect
from npr_common.testing.processes import service_process
from npr_common.testing.valkey import ValkeyProcess, valkey_server


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    """One Valkey for all tests; runs have ids of their own."""
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def buffer_address(valkey: ValkeyProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The buffer service as its own process."""
    environment = {"NPR_BUFFER_REDIS_URL": valkey.url}
    with service_process("npr_buffer", tmp_path_factory.mktemp("buffer"), environment) as process:
        yield process.address


@pytest.fixture
async def buffer_channel(buffer_address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the buffer."""
    async with connect(buffer_address) as channel:
        await channel.channel_ready()
        yield channel
