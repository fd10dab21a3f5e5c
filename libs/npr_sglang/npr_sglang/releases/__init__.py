"""Which releases of SGLang the plug-in works with, and what is different in each: a table.

What is the same in all of them is in the modules beside this folder. A release has an entry in `RELEASES`, and a module
here with its radix cache (`v0_5_20.py`) and the hooks that only it needs.

To add a release: copy the entry of the one before it, and run `npr_sglang.check` in an environment that has the new one
(`scripts/setup-sglang.sh PYTHON RELEASE`): it names all that is gone. Then read how the server calls what it finds, and
run `make test-sglang SGLANG=RELEASE`: names that are still there say nothing of what they do.

Nothing here imports SGLang: an unknown release is refused before anything of it is.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from npr_sglang.errors import PluginError
from npr_sglang.releases.common import COMMON_HOOKS, COMMON_TARGETS, MEMORY, UNIFIED, Hook

_REQUEST = "sglang.srt.managers.schedule_batch.Req"


@dataclass(frozen=True, slots=True)
class Release:
    """What differs in one release.

    Attributes:
        targets: what is changed, overridden, called or called by, and the parameters or fields that are counted on.
        hooks: what is put around functions of the server.
        cache: name of the radix cache's class.
        refresh_input: name of the method by which a request takes note that its tokens have changed.
    """

    targets: Mapping[str, tuple[str, ...]]
    hooks: tuple[Hook, ...]
    cache: str
    refresh_input: str

    def make_cache(self, params: Any) -> Any:
        """Its radix cache, from the server's `CacheInitParams`."""
        return pkgutil.resolve_name(self.cache)(params)


RELEASES: Mapping[str, Release] = {
    "0.5.20": Release(
        targets=COMMON_TARGETS
        | {
            f"{UNIFIED}.cache_finished_req": ("self", "req", "is_insert", "kv_len_to_handle"),
            f"{UNIFIED}.cache_unfinished_req": ("self", "req", "chunked"),
            f"{MEMORY}.base_prefix_cache.MatchResult": ("device_indices", "last_device_node", "cache_protected_len"),
            f"{MEMORY}.common.release_kv_cache": ("req", "tree_cache", "is_insert"),
            f"{_REQUEST}._refresh_fill_ids": ("self",),
        },
        hooks=COMMON_HOOKS,
        cache="npr_sglang.releases.v0_5_20:Cache",
        refresh_input="_refresh_fill_ids",
    ),
    "0.5.23": Release(
        targets=COMMON_TARGETS
        | {
            f"{UNIFIED}.checkpoint": ("self", "req", "up_to"),
            f"{UNIFIED}.prefix_device_indices": ("self", "req"),
            f"{UNIFIED}.path_device_indices": ("self", "node"),
            f"{UNIFIED}.lock": ("self", "node_id"),
            f"{UNIFIED}.unlock": ("self", "lock"),
            f"{MEMORY}.base_prefix_cache.MatchResult": ("device_prefix_len", "last_device_node", "cache_protected_len"),
            f"{MEMORY}.base_prefix_cache.TreeLock": ("node", "receipt"),
            f"{MEMORY}.common.match_kv_cache": ("req", "tree_cache"),
            f"{MEMORY}.common.release_kv_cache": ("req", "tree_cache", "checkpoint"),
            f"{_REQUEST}.refresh_fill_ids": ("self",),
            f"{_REQUEST}.next_output_finishes_by_length": ("self",),
        },
        hooks=(
            *COMMON_HOOKS,
            Hook(f"{_REQUEST}.next_output_finishes_by_length", "npr_sglang.releases.v0_5_23:around_finishes_by_length"),
        ),
        cache="npr_sglang.releases.v0_5_23:Cache",
        refresh_input="refresh_fill_ids",
    ),
}


@cache
def installed() -> Release:
    """The entry of the installed SGLang.

    Raises:
        PluginError: it has none, or there is no SGLang.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "none"
    return release_of(found)


def release_of(found: str) -> Release:
    """The entry of a version, such as `0.5.20` or `0.5.20+cpu`. Raises PluginError when it has none."""
    release = RELEASES.get(found.split("+", maxsplit=1)[0])
    if release is None:
        raise PluginError(
            f"npr_sglang knows SGLang {' and '.join(RELEASES)}, but {found} is installed: install one of these, "
            "or serve without the plug-in, whose joins are not native then"
        )
    return release
