"""Which runs have open work: a hint kept beside the runs, in a hash slot of its own.

Invariants. A run whose work was made to wait is touched before the call is answered. An entry is removed only when the
run was seen idle *and* nobody touched it since its generation was read. An entry that is lost all the same (a crash
between two slots) comes back by `heal`, which compares the index with the runs themselves.
"""

from typing import TypeVar

from npr_buffer.store import keys
from npr_buffer.store.gateway import RedisGateway

T = TypeVar("T")


class RunIndex:
    """The index; every method is one round trip unless it says otherwise."""

    def __init__(self, gateway: RedisGateway) -> None:
        self._gateway = gateway

    async def touch(self, run_id: str) -> None:
        """Says that the run has waiting work, and wakes those who wait for work."""
        await self._gateway.index_script("touch_run", [keys.INDEX, keys.INDEX_GENERATION], [run_id])

    async def runs(self) -> dict[str, int]:
        """Runs with open work and the generation of each entry, least recently touched first."""
        flat = await self._gateway.command("ZRANGE", keys.INDEX, 0, -1, "WITHSCORES")
        return {run_id.decode(): int(float(generation)) for run_id, generation in pairs(flat)}

    async def forget_idle(self, run_id: str, generation: int) -> None:
        """Removes a run that was seen idle after `generation` was read."""
        await self._gateway.index_script("forget_run", [keys.INDEX], [run_id, generation])

    async def heal(self) -> list[str]:
        """Touches every run that has open work and no entry; returns them. Walks the key space."""
        known = await self.runs()
        lost = []
        for key in await self._gateway.scan(keys.META_PATTERN):
            run_id = keys.run_of_meta_key(key)
            if run_id not in known and await self._has_open_work(run_id):
                await self.touch(run_id)
                lost.append(run_id)
        return lost

    async def note_expired(self, expired: int) -> None:
        """Adds to the count of leases that ended unrenewed."""
        if expired:
            await self._gateway.command("INCRBY", keys.INDEX_EXPIRED_LEASES, expired)

    async def expired_leases(self) -> int:
        """Leases that ended unrenewed since the store was made."""
        return int(await self._gateway.command("GET", keys.INDEX_EXPIRED_LEASES) or 0)

    async def _has_open_work(self, run_id: str) -> bool:
        prefix = keys.run_prefix(run_id)
        waiting, leased = await self._gateway.pipeline([("ZCARD", f"{prefix}waiting"), ("ZCARD", f"{prefix}leases")])
        return bool(waiting or leased)


def pairs(flat: list[T]) -> list[tuple[T, T]]:
    """`[a, b, c, d]` as `[(a, b), (c, d)]`."""
    return list(zip(flat[::2], flat[1::2], strict=True))
