"""What the plug-in counts on in every release that it knows."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any

MEMORY = "sglang.srt.mem_cache"
UNIFIED = f"{MEMORY}.unified_radix_cache.UnifiedRadixCache"
_MANAGERS = "sglang.srt.managers"
_SAMPLER = "sglang.srt.layers.sampler.Sampler"
_FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_REQUEST = f"{_MANAGERS}.schedule_batch.Req"


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of ours around one of the server's, or (`after`) behind it.

    Attributes:
        target: the server's function.
        name: of ours; it is not imported before the server has been looked at.
    """

    target: str
    name: str
    after: bool = False

    def function(self) -> Any:
        """Ours."""
        return pkgutil.resolve_name(self.name)


COMMON_HOOKS = (
    Hook(f"{_FORWARD_BATCH}.init_new", "npr_sglang.hooks:after_init_forward_batch", after=True),
    Hook(f"{_REQUEST}.update_finish_state", "npr_sglang.hooks:around_update_finish_state"),
    Hook(
        f"{_MANAGERS}.scheduler.Scheduler.get_internal_state", "npr_sglang.hooks:after_get_internal_state", after=True
    ),
    Hook(f"{_SAMPLER}.forward", "npr_sglang.sampler:around_sample"),
)

COMMON_TARGETS: dict[str, tuple[str, ...]] = {
    # Hooked.
    f"{_FORWARD_BATCH}.init_new": ("batch", "model_runner"),
    f"{_REQUEST}.update_finish_state": ("self", "new_accepted_len"),
    f"{_MANAGERS}.scheduler.Scheduler.get_internal_state": ("self", "recv_req"),
    f"{_SAMPLER}.forward": (
        "self",
        "logits_output",
        "sampling_info",
        "return_logprob",
        "top_logprobs_nums",
        "token_ids_logprobs",
    ),
    # Overridden.
    f"{UNIFIED}.reset": ("self",),
    f"{UNIFIED}.match_prefix": ("self", "params"),
    f"{UNIFIED}.inc_lock_ref": ("self", "node_id", "skip_lock_components"),
    f"{UNIFIED}.dec_lock_ref": ("self", "node_id", "params", "skip_swa"),
    f"{MEMORY}.base_prefix_cache.DecLockRefParams": (),
    f"{MEMORY}.base_prefix_cache.IncLockRefResult": (),
    f"{MEMORY}.base_prefix_cache.IncLockRefResult.to_dec_params": ("self",),
    # Called, made or read.
    f"{MEMORY}.registry.register_radix_cache_backend": ("name", "factory"),
    f"{MEMORY}.registry.TreeCacheBuildContext": (
        "params",
        "is_hybrid_swa",
        "is_hybrid_ssm",
        "enable_hierarchical_cache",
        "disable_radix_cache",
    ),
    f"{UNIFIED}.insert": ("self", "params"),
    f"{UNIFIED}.evictable_size": ("self",),
    f"{UNIFIED}.protected_size": ("self",),
    f"{MEMORY}.base_prefix_cache.MatchPrefixParams": ("key", "req"),
    f"{MEMORY}.base_prefix_cache.InsertParams": ("key", "value", "prev_prefix_len"),
    f"{MEMORY}.radix_cache.RadixKey": ("token_ids", "extra_key", "limit", "cache_salt"),
    f"{_REQUEST}.set_finish_with_abort": ("self", "error_msg", "status_code", "err_type"),
    f"{_REQUEST}.finished": ("self",),
    _REQUEST: ("vocab_size", "return_logprob", "sampling_params"),
    "sglang.srt.sampling.sampling_params.SamplingParams": ("custom_params", "max_new_tokens", "n"),
    f"{_MANAGERS}.schedule_batch.ReqKvInfo": ("req_pool_idx", "cache_protected_len"),
    _FORWARD_BATCH: ("forward_mode", "seq_lens", "seq_lens_cpu", "positions", "extend_seq_lens", "sampling_info"),
    f"{_SAMPLER}._sync_token_ids_across_tp": ("self", "batch_next_token_ids", "sampling_info"),
    "sglang.srt.layers.logits_processor.LogitsProcessorOutput": (
        "next_token_logits",
        "next_token_logprobs",
        "customized_info",
    ),
    "sglang.srt.plugins.hook_registry.HookRegistry.register": ("target", "hook", "hook_type"),
}
