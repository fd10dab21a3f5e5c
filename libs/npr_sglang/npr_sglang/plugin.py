"""The entry point: `register` is called by the server in each of its processes, before anything else of it is made.

Invariant: a server that asks for our radix-cache backend either has the whole plug-in or does not start. SGLang only
logs what goes wrong in a plug-in or its hooks. So the backend is registered last, and looks, when it is made, whether
all the rest is in place.
"""

from __future__ import annotations

from typing import Any

from npr_sglang.check import check_server, check_targets, check_version
from npr_sglang.contract import BACKEND


def register() -> None:
    """Registers the radix-cache backend and the hooks.

    Raises:
        PluginError: this release of SGLang is not one that the plug-in knows.
    """
    check_version()
    check_targets()
    from sglang.srt.mem_cache.registry import register_radix_cache_backend  # noqa: PLC0415 - not before the version is known
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    from npr_sglang import hooks  # noqa: PLC0415
    from npr_sglang.check import FINISH_STATE, FORWARD_BATCH, INTERNAL_STATE, SAMPLE  # noqa: PLC0415
    from npr_sglang.sampler import around_sample  # noqa: PLC0415

    HookRegistry.register(FORWARD_BATCH, hooks.after_init_forward_batch, HookType.AFTER)
    HookRegistry.register(FINISH_STATE, hooks.around_update_finish_state, HookType.AROUND)
    HookRegistry.register(INTERNAL_STATE, hooks.after_get_internal_state, HookType.AFTER)
    HookRegistry.register(SAMPLE, around_sample, HookType.AROUND)
    register_radix_cache_backend(BACKEND, _make_cache)


def _make_cache(context: Any) -> Any:
    from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: PLC0415

    from npr_sglang.cache import ForkJoinCache  # noqa: PLC0415

    check_server(context)
    context.params.tree_components = (ComponentType.FULL,)
    return ForkJoinCache(context.params)
