"""Whether a server can be trusted with fork and join: its release, what is hooked in it, and how it was started.

Invariant: what is not known to work is refused, with a sentence that says what to do.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib.metadata import version
from typing import Any

SUPPORTED = ("0.5.20",)
"""Releases of SGLang that the plug-in has been tested with."""

FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
FINISH_STATE = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
SAMPLE = "sglang.srt.layers.sampler.Sampler.forward"
INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"

_TARGETS = {
    FORWARD_BATCH: ("batch", "model_runner"),
    FINISH_STATE: ("self", "new_accepted_len"),
    INTERNAL_STATE: ("self", "recv_req"),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.match_prefix": ("self", "params"),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert": ("self", "params"),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.inc_lock_ref": ("self", "node_id"),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.dec_lock_ref": ("self", "node_id", "params"),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.cache_finished_req": (
        "self",
        "req",
        "is_insert",
        "kv_len_to_handle",
    ),
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.cache_unfinished_req": ("self", "req", "chunked"),
    "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort": ("self", "error_msg", "status_code", "err_type"),
    "sglang.srt.managers.schedule_batch.Req._refresh_fill_ids": ("self",),
    SAMPLE: ("self", "logits_output", "sampling_info", "return_logprob"),
    "sglang.srt.layers.sampler.Sampler._sync_token_ids_across_tp": ("self", "batch_next_token_ids", "sampling_info"),
}
"""What the plug-in changes, overrides or calls, and the parameters that it counts on."""

_HOOKED = (FORWARD_BATCH, FINISH_STATE, SAMPLE, INTERNAL_STATE)


class PluginError(RuntimeError):
    """The plug-in can't work in this server; the message says why, and what to do."""


def check_version() -> None:
    """Raises PluginError when the installed SGLang is not a release that the plug-in knows."""
    installed = version("sglang")
    if installed.split("+", maxsplit=1)[0] not in SUPPORTED:
        raise PluginError(
            f"npr_sglang knows SGLang {' and '.join(SUPPORTED)}, but {installed} is installed: install one of these, "
            "or serve without the plug-in, whose joins are not native then"
        )


def check_targets() -> None:
    """Raises PluginError naming all that the plug-in counts on and does not find in the server."""
    missing = [problem for target, parameters in _TARGETS.items() if (problem := _problem(target, parameters))]
    if missing:
        raise PluginError("SGLang is not as npr_sglang knows it: " + "; ".join(missing))


def _problem(target: str, parameters: tuple[str, ...]) -> str:
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        return f"{target} is gone ({error})"
    known = inspect.signature(inspect.unwrap(function)).parameters
    lacking = [name for name in parameters if name not in known]
    return f"{target} has no parameter {', '.join(lacking)}" if lacking else ""


def check_server(context: Any) -> None:
    """Whether a server, whose cache is about to be made, has all of the plug-in and nothing that it can't work with.

    Args:
        context: the server's `TreeCacheBuildContext`.

    Raises:
        PluginError: naming what is wrong.
    """
    problems = [*_unhooked(), *_unsuitable(context)]
    if problems:
        raise PluginError("npr_sglang can't serve: " + "; ".join(problems))


def _unhooked() -> list[str]:
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415

    return [f"its hook on {target} was not applied" for target in _HOOKED if target not in HookRegistry._patched]


def _unsuitable(context: Any) -> list[str]:
    from sglang.srt.runtime_context import get_spec  # noqa: PLC0415

    params = context.params
    found = {
        "a page size other than 1 (--page-size 1)": params.page_size != 1,
        "a disabled radix cache": context.disable_radix_cache,
        "sliding-window or hybrid models": context.is_hybrid_swa or context.is_hybrid_ssm,
        "a hierarchical cache": context.enable_hierarchical_cache,
        "speculative decoding": get_spec().speculative_algorithm is not None,
        "pipeline parallelism": params.pp_size > 1,
    }
    return [f"it does not work with {what}" for what, is_so in found.items() if is_so]
