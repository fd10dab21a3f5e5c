"""What a policy's weights go through on their way to a server, as far as that needs no server."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from npr_common.errors import DataLossError, FailedPreconditionError
from npr_rollout.sglang import weights

KIB = 256  # float32 values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files: six tensors of 1 KiB and one of 5 KiB."""
    save_file({f"a{i}": torch.full((KIB,), float(i)) for i in range(4)}, tmp_path / "model-00001-of-00002.safetensors")
    last = {"b0": torch.zeros(5, KIB), "b1": torch.ones(KIB), "b2": torch.ones(KIB)}
    save_file(last, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def test_a_model_is_read_in_parts(folder: Path) -> None:
    parts = list(weights.read_parts(folder, part_bytes=3 << 10))
    assert [[name for name, _ in part] for part in parts] == [["a0", "a1", "a2"], ["a3"], ["b0"], ["b1", "b2"]]
    tensors = {name: tensor for part in parts for name, tensor in part}
    assert torch.equal(tensors["a2"], torch.full((KIB,), 2.0))
    assert tensors["b0"].shape == (5, KIB)


def test_no_weights_are_a_policy_that_can_not_be_served(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="no safetensors files"):
        next(weights.read_parts(tmp_path, part_bytes=1))


@pytest.mark.parametrize("keep", [5, 2000])
def test_a_file_that_was_cut_short_is_a_loss(folder: Path, keep: int) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DataLossError, match="00002-of-00002"):
        list(weights.read_parts(folder, part_bytes=1 << 20))


def test_a_full_shared_memory_is_told() -> None:
    """The limit of the size of a file is what a small /dev/shm comes to."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(FailedPreconditionError, match="8 MiB of weights don't fit into shared memory"):
            weights._handles([("large", torch.zeros(2 << 20))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_group_meets_at_its_address_only() -> None:
    before = _listening()
    store = weights._store("127.0.0.1", 2)
    assert _listening() - before == {("127.0.0.1", store.port)}


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(FailedPreconditionError, match=r"NPR_SGLANG_GROUP_ADDRESS is '192\.0\.2\.1'"):
        weights._store("192.0.2.1", 2)


def _listening() -> set[tuple[str, int]]:
    connections = psutil.Process(os.getpid()).net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}
