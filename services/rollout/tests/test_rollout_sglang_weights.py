"""Each way that weights get into a running server: what it says then is what the model says in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from npr_common.errors import DataLossError, FailedPreconditionError
from npr_rollout.sglang.server import ServedModel
from npr_rollout.sglang.transport import Transport
from npr_rollout.sglang.weights import PARTIAL, FromDisk, FromGroup, FromTensors, Weights
from npr_rollout.testing.models import tagged_tokenizer, tiny_model
from npr_rollout.testing.sglang_servers import settings_for, sglang_server

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

TOKENIZER = tagged_tokenizer()
TOKENS = [5, 9, 11, 30, 7, 19, 22]
ALL = list(range(len(TOKENIZER)))
PART_BYTES = 8 << 10  # several parts of a tiny model

WAYS: dict[str, Callable[[Transport], Weights]] = {
    "disk": FromDisk,
    "tensors": lambda transport: FromTensors(transport, 1, PART_BYTES),
    "group": lambda transport: FromGroup(transport, 1, "gloo", "127.0.0.1", PART_BYTES),
}


@dataclass(frozen=True)
class Policy:
    """A model in float32, and its files."""

    model: Any
    folder: Path

    def log_probs(self) -> torch.Tensor:
        """Of all ids after TOKENS."""
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=torch.tensor([TOKENS])).logits[0, -1]
        return logits.log_softmax(dim=-1)


@dataclass(frozen=True)
class Place:
    """A server that computes in `dtype`, and two policies that it may serve."""

    transport: Transport
    dtype: str
    policies: tuple[Policy, Policy]

    def says(self) -> torch.Tensor:
        return torch.tensor(self.transport.ask(lambda client: client.log_probs(TOKENS, ALL)))

    def stamp(self) -> str:
        return self.transport.ask(lambda client: client.weight_version())


@pytest.fixture(
    scope="module", params=[("float32", True), ("bfloat16", False)], ids=["float32-tied", "bfloat16-untied"]
)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    python = os.environ.get("NPR_SGLANG_PYTHON")
    if python is None:
        pytest.skip("NPR_SGLANG_PYTHON names no Python with SGLang")
    dtype, tied = request.param
    first, second = (make_policy(tmp_path_factory.mktemp("policy"), seed, tied=tied) for seed in (0, 1))
    served = ServedModel(first.folder, first.model.config.max_position_embeddings, dtype, "first")
    with sglang_server(served, settings_for(python, 2048)) as transport:
        yield Place(transport, dtype, (first, second))


def make_policy(folder: Path, seed: int, *, tied: bool, hidden: int = 32) -> Policy:
    model = tiny_model("qwen3", TOKENIZER, seed, hidden=hidden, layers=2, tied=tied)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return Policy(model, folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_policy_says_the_same_by_each_way(place: Place, way: str) -> None:
    """Two swaps in a row, and back. Weights that the server rounds are rounded as from disk."""
    first, second = place.policies
    by_disk = {}
    for policy in place.policies:
        FromDisk(place.transport).load(policy.folder, "by disk")
        by_disk[policy.folder] = place.says()
        tolerance = {"float32": 1e-4, "bfloat16": 0.3}[place.dtype]
        torch.testing.assert_close(by_disk[policy.folder], policy.log_probs(), atol=tolerance, rtol=0)
    weights, ports = WAYS[way](place.transport), listening()
    for stamp, policy, other in (("one", first, second), ("two", second, first), ("three", first, second)):
        weights.load(policy.folder, stamp)
        assert place.stamp() == stamp
        said = place.says()
        torch.testing.assert_close(said, by_disk[policy.folder], atol=1e-4, rtol=0)
        assert (said - by_disk[other.folder]).abs().max() > 0.3
        assert listening() == ports  # a group leaves nothing behind


def listening() -> int:
    """How many ports this process listens at."""
    return sum(each.status == psutil.CONN_LISTEN for each in psutil.Process().net_connections("tcp"))


@pytest.mark.parametrize("way", ["tensors", "group"])
def test_files_that_can_not_be_read_leave_a_server_that_says_so(place: Place, way: str, tmp_path: Path) -> None:
    first, second = place.policies
    file = tmp_path / "model.safetensors"
    file.write_bytes((second.folder / "model.safetensors").read_bytes()[:-100])
    weights = WAYS[way](place.transport)
    with pytest.raises(DataLossError, match="can't be read"):
        weights.load(tmp_path, "cut short")
    assert place.stamp() == PARTIAL
    weights.load(first.folder, "whole")
    assert place.stamp() == "whole"
    FromDisk(place.transport).load(second.folder, "other")
    weights.load(first.folder, "whole again")
    said = place.says()
    FromDisk(place.transport).load(first.folder, "by disk")
    torch.testing.assert_close(said, place.says(), atol=1e-4, rtol=0)


def test_what_was_refused_is_not_served(place: Place, tmp_path: Path) -> None:
    """Tensors that have no place in the model: its wider brother's."""
    first, second = place.policies
    weights = WAYS["group"](place.transport)
    weights.load(second.folder, "fine")
    make_policy(tmp_path, 2, tied=True, hidden=64)
    with pytest.raises(FailedPreconditionError, match="refuses /update_weights_from_distributed"):
        weights.load(tmp_path, "wrong")
    assert place.stamp() == PARTIAL
    weights.load(first.folder, "right")
    said = place.says()
    FromDisk(place.transport).load(first.folder, "by disk")
    torch.testing.assert_close(said, place.says(), atol=1e-4, rtol=0)
