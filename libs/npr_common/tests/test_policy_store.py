"""Policies are published whole, grow only, and are verified when read."""

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from npr.types.v1 import policy_pb2
from npr_common.canary import Canary
from npr_common.errors import AlreadyExistsError, DataLossError, InvalidArgumentError, NotFoundError
from npr_common.policy_store import Manifest, PolicyMetadata, PolicyStore

METADATA = PolicyMetadata(dialect="npr", has_tag_tokens=True, stage="zero", step=0)
FILES: dict[str, bytes | Path] = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def store(tmp_path: Path) -> PolicyStore:
    return PolicyStore(f"file://{tmp_path}/store", tmp_path / "cache")


def test_what_is_published_is_materialized(store: PolicyStore) -> None:
    ref = store.publish("run", 0, FILES, METADATA)
    folder = store.materialize(ref)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
    assert store.manifest(ref).metadata == METADATA
    assert store.latest("run") == ref


def test_any_version_of_a_line_is_found(store: PolicyStore) -> None:
    refs = [store.publish("run", version, {"config.json": str(version).encode()}, METADATA) for version in (0, 2)]
    assert [store.find("run", version) for version in range(4)] == [refs[0], None, refs[1], None]
    assert store.find("other", 0) is None


def test_publishing_twice_is_one_policy(store: PolicyStore) -> None:
    assert store.publish("run", 0, FILES, METADATA) == store.publish("run", 0, FILES, METADATA)
    with pytest.raises(AlreadyExistsError):
        store.publish("run", 0, {"config.json": b"other"}, METADATA)


def test_versions_only_grow(store: PolicyStore) -> None:
    store.publish("run", 3, FILES, METADATA)
    with pytest.raises(AlreadyExistsError, match="version 3"):
        store.publish("run", 2, FILES, METADATA)


def test_unchanged_files_are_stored_once(store: PolicyStore, tmp_path: Path) -> None:
    store.publish("run", 0, FILES, METADATA)
    store.publish("run", 1, {**FILES, "model.safetensors": b"new"}, METADATA)
    assert len(list((tmp_path / "store" / "blobs").iterdir())) == 3


def test_corruption_is_named(store: PolicyStore, tmp_path: Path) -> None:
    ref = store.publish("run", 0, FILES, METADATA)
    blob = next(path for path in (tmp_path / "store" / "blobs").iterdir() if path.read_bytes() == b"weights")
    blob.write_bytes(b"wEights")
    with pytest.raises(DataLossError, match=r"model\.safetensors is corrupt"):
        store.materialize(ref)
    blob.unlink()
    with pytest.raises(DataLossError, match=r"model\.safetensors is missing"):
        store.materialize(ref)
    assert not list((tmp_path / "cache").iterdir())


def test_a_changed_manifest_is_refused(store: PolicyStore, tmp_path: Path) -> None:
    ref = store.publish("run", 0, FILES, METADATA)
    path = tmp_path / "store" / "lines" / "run" / "00000000.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataLossError, match="manifest"):
        store.materialize(ref)


def test_a_missing_policy_is_not_found(store: PolicyStore) -> None:
    missing = policy_pb2.PolicyRef(line="x", version=1, manifest_url=f"{store.root_url}/lines/x/1.json", digest="0")
    with pytest.raises(NotFoundError):
        store.materialize(missing)
    assert store.latest("x") is None


def test_a_repeat_may_differ_in_its_canary_alone(tmp_path: Path) -> None:
    """Another machine computes other last digits of it, and what is older than canaries has none."""
    store = PolicyStore(f"file://{tmp_path}/store", tmp_path / "cache")
    canary = Canary.of((1, 2), np.log(np.asarray([0.2, 0.5, 0.3], np.float32)))
    first = store.publish("run", 0, FILES, METADATA)
    assert b"canary" not in (tmp_path / "store/lines/run/00000000.json").read_bytes()
    assert store.publish("run", 0, FILES, METADATA.model_copy(update={"canary": canary})) == first
    second = store.publish("run", 1, FILES, METADATA.model_copy(update={"canary": canary}))
    assert store.publish("run", 1, FILES, METADATA) == second
    assert store.manifest(second).metadata.canary == canary
    with pytest.raises(AlreadyExistsError):
        store.publish("run", 1, FILES, METADATA.model_copy(update={"step": 7, "canary": canary}))


@pytest.mark.parametrize("url", ["foo://bar", "", "{root}", "{root}/lines", "file:///no/such/manifest.json"])
def test_a_url_that_leads_to_no_policy_is_an_error_of_the_reference(store: PolicyStore, url: str) -> None:
    store.publish("run", 0, FILES, METADATA)
    ref = policy_pb2.PolicyRef(line="run", digest="0" * 64, manifest_url=url.format(root=store.root_url))
    with pytest.raises((NotFoundError, InvalidArgumentError), match="run"):
        store.materialize(ref)


@pytest.mark.parametrize("name", ["../escape", "a/b.txt", "/etc/motd", "..", ""])
def test_a_file_lies_in_its_policys_folder(store: PolicyStore, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="plain name"):
        store.publish("run", 0, {**FILES, name: b"x"}, METADATA)
    assert store.latest("run") is None
    with pytest.raises(ValidationError):
        Manifest(line="run", version=0, files={name: "0" * 64}, metadata=METADATA)


def test_a_canary_has_a_log_probability_for_each_token() -> None:
    with pytest.raises(ValidationError, match="log-probabilities"):
        Canary(token_ids=(1,), likeliest=(1, 2, 3), log_probs=(-0.1, -0.2))
