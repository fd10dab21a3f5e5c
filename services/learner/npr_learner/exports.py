"""Policies as plain Hugging Face folders, for people and other programs."""

from typing import Any

import fsspec

from npr.types.v1 import policy_pb2
from npr_common.policy_store import PolicyStore


class PolicyExporter:
    """Writes below `exports/` of the policy store."""

    def __init__(self, store: PolicyStore) -> None:
        self._store = store
        self._fs: Any
        self._fs, self._root = fsspec.core.url_to_fs(store.root_url)

    def export(self, policy: policy_pb2.PolicyRef, name: str) -> str:
        """Writes the policy's files to `exports/<name>`, over what is there.

        Returns:
            The folder's fsspec URL.

        Raises:
            NotFoundError: there is no such policy.
            DataLossError: its bytes are not what they were.
        """
        source = self._store.materialize(policy)
        target = f"{self._root}/exports/{name}"
        self._fs.makedirs(target, exist_ok=True)
        for file in sorted(source.iterdir()):
            self._fs.put_file(str(file), f"{target}/{file.name}")
        url: str = self._fs.unstrip_protocol(target)
        return url
