"""Whether a request fits, and what it may use.

Invariant: a request that passes fits into the pool when it is alone there, so it will be decoded some day.
"""

from __future__ import annotations

from npr_rollout.engine.config import EngineConfig
from npr_rollout.record.ledger import ResolvedLimits
from npr_rollout.record.request import Request

_SPARE_PAGES = 2  # the partly filled pages behind the shared prompt and at the end


def resolve_limits(request: Request, config: EngineConfig, context: int) -> tuple[ResolvedLimits, str]:
    """Limits with defaults filled in, and why they can never be granted (empty when they can)."""
    asked, room = request.limits, context - len(request.prompt_ids)
    free_pages = config.pages - -(-(len(request.prompt_ids) - 1) // config.page_size) - _SPARE_PAGES
    fits = max(free_pages, 0) * config.page_size
    wanted = asked.max_tokens if asked.max_tokens is not None else _default_tokens(free_pages, config)
    obstacle = ""
    if wanted > fits or fits == 0:
        obstacle = (
            f"{len(request.prompt_ids)} prompt tokens and {max(wanted, 1)} new ones never fit into {config.pages} KV "
            f"pages of {config.page_size}: lower max_tokens to {fits}, or serve with more pages."
        )
    return ResolvedLimits.of(asked, wanted, room, config.max_branches, config.max_blocks), obstacle


def _default_tokens(free_pages: int, config: EngineConfig) -> int:
    """As much as the pool holds beside the partly filled pages that forks leave, or half of it if these are many."""
    fork_waste = config.max_blocks * (config.max_branches + 1)
    return max(free_pages - fork_waste, free_pages // 2, min(free_pages, 1), 0) * config.page_size
