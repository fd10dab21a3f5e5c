"""The entry point: `register` is called by the server in each of its processes, before anything else of it is made.

Invariant: a server that asks for our radix-cache backend either has the whole plug-in or does not start. SGLang only
logs what goes wrong in a plug-in or its hooks. So the backend is registered last, and looks, when it is made, whether
all the rest is in place.
"""

from __future__ import annotations

from typing import Any

from npr_sglang.check import check_release, check_server
from npr_sglang.contract import BACKEND
from npr_sglang.releases import installed


def register() -> None:
    """Registers the radix-cache backend and the hooks.

    Raises:
        PluginError: this release of SGLang is not one that the plug-in knows, or not as the plug-in knows it.
    """
    release = check_release()
    from sglang.srt.mem_cache.registry import register_radix_cache_backend  # noqa: PLC0415 - not before the release is known
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    for hook in release.hooks:
        HookRegistry.register(hook.target, hook.function(), HookType.AFTER if hook.after else HookType.AROUND)
    register_radix_cache_backend(BACKEND, _make_cache)


def _make_cache(context: Any) -> Any:
    from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: PLC0415

    check_server(context)
    context.params.tree_components = (ComponentType.FULL,)
    return installed().make_cache(context.params)
