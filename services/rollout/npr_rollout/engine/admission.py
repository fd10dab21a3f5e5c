"""Whether a request fits, and what it may use.

Invariant: a request that passes fits into the pool when it is alone there, so it will be decoded some day.
"""

from __future__ import annotations

from npr_rollout.engine.config import EngineConfig
from npr_rollout.record.ledger import ResolvedLimits
from npr_rollout.record.outcomes import LimitKind
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
    critical = room if asked.max_critical_tokens is None else min(room, asked.max_critical_tokens)
    kind = LimitKind.CONTEXT if critical == room else LimitKind.CRITICAL_TOKENS
    limits = ResolvedLimits(
        max_tokens=wanted,
        max_critical_tokens=critical,
        critical_kind=kind,
        max_branch_tokens=asked.max_branch_tokens if asked.max_branch_tokens is not None else room,
        max_branches=asked.max_branches if asked.max_branches is not None else config.max_branches,
        max_blocks=asked.max_blocks if asked.max_blocks is not None else config.max_blocks,
    )
    return limits, obstacle


def _default_tokens(free_pages: int, config: EngineConfig) -> int:
    """As much as the pool holds beside the partly filled pages that forks leave, or half of it if these are many."""
    fork_waste = config.max_blocks * (config.max_branches + 1)
    return max(free_pages - fork_waste, free_pages // 2, min(free_pages, 1), 0) * config.page_size
