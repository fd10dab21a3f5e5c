"""One leader among the controller's replicas, by a lease in Redis.

Invariants: at most one token is in the lease at a time; whoever holds it renews it three times in its life; a holder
that can't renew stops driving before the lease can end, and even a late write of it is refused by the store's fence.
"""

import asyncio
import uuid
from importlib import resources

from npr_controller.state import keys
from npr_controller.state.store import RunStore, redis_errors


class LeaderLease:
    """A replica's claim to lead."""

    def __init__(self, store: RunStore, seconds: float) -> None:
        self._store = store
        self._milliseconds = int(seconds * 1000)
        self._lease = store.redis.register_script(resources.files(__package__).joinpath("lease.lua").read_text())
        self.token = uuid.uuid4().hex

    async def acquire(self) -> None:
        """Waits until this replica leads: woken by a release, or when the other's lease must have ended."""
        async with self._store.listen(keys.NOTICES) as notices:
            while not await self._claimed():
                with redis_errors():
                    left = await self._store.redis.pttl(keys.LEADER)
                await notices.wait(max(left, 1) / 1000)

    async def keep(self) -> None:
        """Renews until the lease is another's, then returns. Raises `StoreUnavailableError` when Redis is gone."""
        while await self._extend(self._milliseconds):  # noqa: ASYNC110 - time is the condition
            await asyncio.sleep(self._milliseconds / 3000)

    async def release(self) -> None:
        """Gives the lease up at once, when it is still this replica's."""
        await self._extend(0)

    async def _claimed(self) -> bool:
        with redis_errors():
            made = await self._store.redis.set(keys.LEADER, self.token, nx=True, px=self._milliseconds)
        return bool(made) or await self._extend(self._milliseconds)

    async def _extend(self, milliseconds: int) -> bool:
        with redis_errors():
            return bool(await self._lease(keys=[keys.LEADER], args=[self.token, milliseconds, keys.NOTICES]))
