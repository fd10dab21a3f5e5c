"""One local stack for a module's tests: real processes, real Valkey, gRPC on loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from npr_client.testing import NprCommand, npr_with_stack

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def recipes() -> Path:
    """The folder of the recipes."""
    return REPOSITORY / "recipes"


@pytest.fixture(scope="module")
def npr(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NprCommand]:
    """`npr` with a stack that is up."""
    with npr_with_stack(tmp_path_factory.mktemp("stack")) as command:
        yield command
