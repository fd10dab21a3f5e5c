"""AuditRun: recounts a run from its raw keys.

One script compares the groups with every structure and count derived from them, at one instant. The trajectories' bytes
are read afterwards: they never change once appended, so the answer is consistent although it takes a while.
"""

from collections.abc import AsyncIterator

from google.protobuf.message import DecodeError

from npr.buffer.v1 import buffer_pb2
from npr.types.v1 import trajectory_pb2
from npr_buffer.store import keys
from npr_buffer.store.gateway import RedisGateway
from npr_buffer.store.run_index import pairs
from npr_buffer.store.run_store import counts_message


async def audit_run(gateway: RedisGateway, run_id: str) -> buffer_pb2.AuditRunResponse:
    """Counts, consumers and problems of the run; a run that is not there is sound and empty."""
    problems, states, consumers, trajectories, expected = await gateway.run_script("audit", run_id, [])
    counts = {state.decode(): number for state, number in pairs(states)}
    counts |= {"trajectories": trajectories, "expected": expected}
    found = [problem.decode() for problem in problems]
    found += [problem async for problem in _check_trajectories(gateway, run_id)]
    return buffer_pb2.AuditRunResponse(
        counts=counts_message(counts),
        consumed_by={consumer.decode(): number for consumer, number in pairs(consumers)},
        problems=found,
    )


async def _check_trajectories(gateway: RedisGateway, run_id: str) -> AsyncIterator[str]:
    """Every stored trajectory parses, belongs to a group that is there, and has the id of its place."""
    prefix = keys.run_prefix(run_id)
    stored = f"{prefix}trajectories:"
    for key in await gateway.scan(f"{_escaped(stored)}*"):
        group_id = key.decode().removeprefix(stored)
        exists, by_index = await gateway.pipeline([("EXISTS", f"{prefix}group:{group_id}"), ("HGETALL", key)])
        if by_index and not exists:
            yield f"{len(by_index)} trajectories of group {group_id}, which is not there"
        for index, scored in by_index.items():
            place = f"{group_id}/{int(index)}"
            try:
                trajectory_id = trajectory_pb2.ScoredTrajectory.FromString(scored).trajectory.trajectory_id
            except DecodeError:
                yield f"the bytes of trajectory {place} are not a trajectory"
                continue
            if trajectory_id != place:
                yield f"trajectory {trajectory_id} is stored as {place}"


def _escaped(pattern: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in pattern)
