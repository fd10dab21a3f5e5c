"""Leases and appends per second through the buffer, against plain redis-py writing the same bytes.

Both sides use the same Valkey with its append-only file, the same groups, the same serialized trajectories and the same
number of concurrent workers. The rival does the least that moves the bytes: `LMOVE` takes a group from a list, one
`HSET` stores its samples. It has no leases, no idempotency, no counts and no policy check: the ratio is their price,
gRPC included. The rival runs in one process beside Valkey, the buffer adds a second one; all share the machine's cores.

    python benchmarks/buffer_throughput.py [--quick] [--json]
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import redis.asyncio
from _harness import parser, tell

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr.types.v1 import trajectory_pb2
from npr_buffer.testing import make_group, make_scored
from npr_common.rpc import call_durably, connect
from npr_common.testing.processes import service_process
from npr_common.testing.valkey import valkey_server

RUN_ID = "benchmark"


@dataclass(frozen=True)
class Load:
    """What both sides carry."""

    groups: int
    samples: int
    tokens: int
    workers: int
    lease_groups: int = 4

    @property
    def operations(self) -> int:
        """Groups leased plus trajectories appended."""
        return self.groups * (1 + self.samples)


Samples = dict[str, list[trajectory_pb2.ScoredTrajectory]]


def samples_of(load: Load) -> Samples:
    """Every group's scored trajectories, made before the clock starts."""
    return {
        f"g{number}": [make_scored(f"g{number}", index, tokens=load.tokens) for index in range(load.samples)]
        for number in range(load.groups)
    }


async def through_the_buffer(address: str, load: Load, ready: Samples) -> float:
    """Seconds from the first lease to the last append."""
    async with connect(address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        groups = [make_group(RUN_ID, group_id, samples=load.samples) for group_id in ready]
        enqueue = buffer_pb2.EnqueueGroupsRequest(request_id="enqueue", groups=groups)
        await call_durably(lambda: stub.EnqueueGroups(enqueue), whom="the buffer", deadline_seconds=30)
        seconds = await timed(lambda number: buffer_worker(stub, f"w{number}", load, ready), load)
        audit = await stub.AuditRun(buffer_pb2.AuditRunRequest(run_id=RUN_ID))
    if audit.problems or audit.counts.ready != load.groups:
        raise SystemExit(f"the audit failed: {audit}")
    return seconds


async def buffer_worker(
    stub: "buffer_pb2_grpc.BufferServiceAsyncStub",
    name: str,
    load: Load,
    ready: Samples,
) -> None:
    """Leases and answers until nothing waits."""
    serial = 0
    while True:
        serial += 1
        lease = buffer_pb2.LeaseGroupsRequest(
            request_id=f"{name}/{serial}", worker_id=name, max_groups=load.lease_groups, lease_seconds=60
        )
        leased = (await stub.LeaseGroups(lease)).groups
        if not leased:
            return
        for one in leased:
            scored = ready[one.group.group_id]
            await stub.AppendTrajectories(buffer_pb2.AppendTrajectoriesRequest(run_id=RUN_ID, trajectories=scored))


async def through_plain_redis(url: str, load: Load, ready: Samples) -> float:
    """Seconds from the first LMOVE to the last HSET."""
    async with plain_redis(url) as store:
        await store.rpush("plain:queue", *ready)
        return await timed(lambda _: plain_worker(store, ready), load)


def plain_redis(url: str) -> Any:
    """The rival's client (redis-py's own types don't tell bytes from text)."""
    return redis.asyncio.Redis.from_url(url)


async def plain_worker(store: Any, ready: Samples) -> None:
    """Takes and stores until the list is empty."""
    while (taken := await store.lmove("plain:queue", "plain:taken", "LEFT", "RIGHT")) is not None:
        group_id = taken.decode()
        fields = {str(index): scored.SerializeToString() for index, scored in enumerate(ready[group_id])}
        await store.hset(f"plain:{group_id}", mapping=fields)


async def timed(worker: Callable[[int], Awaitable[None]], load: Load) -> float:
    """Seconds that `load.workers` of them take together."""
    started = time.perf_counter()
    await asyncio.gather(*(worker(number) for number in range(load.workers)))
    return time.perf_counter() - started


async def measure(load: Load, appendfsync: str, rounds: int) -> dict[str, float]:
    """Median operations per second of both sides under one durability setting, round by round in turn."""
    plain, served = [], []
    ready = samples_of(load)
    with tempfile.TemporaryDirectory() as name, valkey_server(Path(name)) as valkey:
        environment = {"NPR_BUFFER_REDIS_URL": valkey.url, "NPR_LOG_LEVEL": "WARNING"}
        async with redis.asyncio.Redis.from_url(valkey.url) as store:
            await store.config_set("appendfsync", appendfsync)
            for _ in range(rounds):
                plain.append(load.operations / await through_plain_redis(valkey.url, load, ready))
                await store.flushall()
                with service_process("npr_buffer", Path(name), environment) as process:
                    served.append(load.operations / await through_the_buffer(process.address, load, ready))
                await store.flushall()
    return {"buffer": statistics.median(served), "plain_redis_py": statistics.median(plain)}


def main() -> None:
    """Measures and tells."""
    arguments = parser(__doc__).parse_args()
    load = Load(groups=400 if arguments.quick else 2000, samples=16, tokens=512, workers=8)
    results = {policy: asyncio.run(measure(load, policy, rounds=3)) for policy in ("everysec", "always")}
    ratios = {
        f"buffer_vs_plain_redis_py_{policy}": result["buffer"] / result["plain_redis_py"]
        for policy, result in results.items()
    }
    figures = {"benchmark": "buffer_throughput", "load": asdict(load), "operations_per_second": results}
    tell({**figures, "ratios": ratios}, as_json=arguments.json)


if __name__ == "__main__":
    main()
