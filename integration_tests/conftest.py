"""One local stack for a module's tests: real processes, real Valkey, gRPC on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from npr_client.testing import NprCommand

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def recipes() -> Path:
    """The folder of the recipes."""
    return REPOSITORY / "recipes"


@pytest.fixture(scope="module")
def npr(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NprCommand]:
    """`npr` with a stack that is up."""
    command = NprCommand(tmp_path_factory.mktemp("stack"))
    command("up")
    yield command
    command("down")
