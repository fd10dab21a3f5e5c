"""The worker: lease groups, roll them out, have them scored and appended.

Invariants:
- A group is decoded with exactly the policy it names. The worker changes the policy only while it holds no group.
- Somebody else may change it at any time: samples that are decoded meanwhile are delivered as the old policy's, and
  groups of which a sample was ended by it, or would be decoded by the new one, are given back.
- Leases are renewed while their groups are worked on, or wait for their policy, which may take minutes to load. A lease
  that was lost ends its group's decoding at once.
- What is lost with a crash is decoding time: leases end, and the groups are rolled out again by someone.
- A policy that can't be served keeps nobody waiting but those who need it: a job that names one ends as REFUSED, and
  the work of a run waits until the policy is well again.
- No group, whatever is wrong with it, ends the worker.
- Draining stops leasing, aborts what is being decoded, delivers what is finished, and gives the rest back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Iterable, Sequence

from npr.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from npr_common.errors import AbortedError, FailedPreconditionError, InvalidArgumentError, NprError, rpc_errors
from npr_common.rpc import call_durably
from npr_rollout.encoding import EncodedPrompt
from npr_rollout.engine_thread import EngineThread
from npr_rollout.jobs import JOBS_RUN
from npr_rollout.messages import Decoding, Origin, trajectory_message
from npr_rollout.outbox import Outbox
from npr_rollout.policy_loader import LoadedPolicy, PolicyStamp
from npr_rollout.policy_switch import PolicySwitch
from npr_rollout.record.outcomes import ForkRefusal, Outcome
from npr_rollout.record.request import Request, Result
from npr_rollout.record.results import refused
from npr_rollout.settings import RolloutSettings
from npr_rollout.shunned import ShunnedPolicies, is_lasting
from npr_rollout.traces import record_trajectory

log = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_RENEWALS_PER_LEASE = 3

Key = tuple[str, str]


class Worker:
    """Keeps the engine busy with the buffer's work; `run` it as a task."""

    def __init__(
        self,
        engine: EngineThread,
        buffer: buffer_pb2_grpc.BufferServiceAsyncStub,
        outbox: Outbox,
        switch: PolicySwitch,
        settings: RolloutSettings,
    ) -> None:
        self.worker_id = f"rollout-{uuid.uuid4().hex[:12]}"
        self._engine = engine
        self._buffer = buffer
        self._outbox = outbox
        self._switch = switch
        self._settings = settings
        self._held: dict[Key, asyncio.Task[None]] = {}
        self._awaiting: dict[Key, buffer_pb2.LeasedGroup] = {}  # leased groups whose policy is being served
        self._undecoded: set[tuple[Key, int]] = set()  # samples of held groups that the engine has not finished
        self._shunned = ShunnedPolicies()
        self._trouble = False  # whether work was given back since the last lease call
        self._leasing: asyncio.Task[Sequence[buffer_pb2.LeasedGroup]] | None = None  # the lease call that waits
        self._progress = asyncio.Event()
        self._free = asyncio.Event()  # set while no group is held
        self._free.set()

    async def run(self) -> None:
        """Works until cancelled. A buffer that is away is waited for."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lease_forever())
            tasks.create_task(self._renew_forever())

    async def give_back(self) -> None:
        """Abort what is being decoded and give its groups back; call it after `run` was cancelled."""
        names = list(self._held)
        tasks = list(self._held.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if names:
            request = buffer_pb2.ReturnGroupsRequest(worker_id=self.worker_id, groups=_group_keys(names))
            with rpc_errors():
                await self._buffer.ReturnGroups(request)

    async def _lease_forever(self) -> None:
        while True:
            self._progress.clear()
            if len(self._undecoded) >= self._settings.max_running:
                await self._progress.wait()
                continue
            await self._switch.settled()  # whatever is leased now would be for the policy that is leaving
            try:
                await self._lease_once()
            except NprError as error:
                log.warning("leasing failed and is tried again: %s", error.message)
                self._trouble = True
            except Exception:
                log.exception("leasing failed and is tried again")
                self._trouble = True
            if self._trouble:  # nobody says when a policy or an engine is well again
                self._trouble = False
                await asyncio.sleep(_RETRY_SECONDS)

    async def _lease_once(self) -> None:
        """One lease call. While groups are held it asks for their policy only, so it ends with the last of them."""
        busy = bool(self._held)
        call = asyncio.create_task(self._lease(only_preferred=busy and self._engine.policy is not None))
        self._leasing = call
        try:
            await self._until_done(call, or_free=busy)
            if call.done() and not call.cancelled() and (groups := call.result()):
                await self._take(groups)
        finally:
            self._leasing = None
            call.cancel()  # a call that is dropped takes no groups: the buffer gives them back

    async def _until_done(self, call: asyncio.Task[Sequence[buffer_pb2.LeasedGroup]], *, or_free: bool) -> None:
        free = asyncio.create_task(self._free.wait())
        await asyncio.wait({call, free} if or_free else {call}, return_when=asyncio.FIRST_COMPLETED)
        free.cancel()

    async def _lease(self, *, only_preferred: bool) -> Sequence[buffer_pb2.LeasedGroup]:
        request = buffer_pb2.LeaseGroupsRequest(
            request_id=uuid.uuid4().hex,
            worker_id=self.worker_id,
            max_groups=self._settings.lease_groups,
            lease_seconds=self._settings.lease_seconds,
            wait_seconds=self._settings.lease_wait_seconds,
            prefer_policy=self._engine.policy,
            only_preferred=only_preferred,
            avoid_policies=self._shunned.now(),
        )
        response = await call_durably(
            lambda: self._buffer.LeaseGroups(request),
            whom="the buffer",
            deadline_seconds=self._settings.peer_wait_seconds,
        )
        return response.groups

    async def _take(self, leased: Sequence[buffer_pb2.LeasedGroup]) -> None:
        """Serve the policy that the groups need, then start on those whose leases are still ours."""
        policy = leased[0].group.policy
        self._awaiting = {_key(item): item for item in leased}
        try:
            await self._serve_policy_of(leased[0].group)
        except NprError as error:
            leased = list(self._awaiting.values())
            if not is_lasting(error):
                await self._return(leased)
                raise
            log.warning("work for %s@%d is passed over: %s", policy.line, policy.version, error.message)
            self._shunned.shun(policy)
            hopeless = [item for item in leased if item.group.run_id == JOBS_RUN and item.group.HasField("policy")]
            for item in hopeless:
                self._start(item, f"Its policy can't be served: {error.message}")
            await self._return([item for item in leased if item not in hopeless])
        except BaseException:
            await self._return(list(self._awaiting.values()))
            raise
        else:
            self._shunned.forgive(policy)
            for item in self._awaiting.values():
                self._start(item)
        finally:
            self._awaiting = {}

    def _start(self, leased: buffer_pb2.LeasedGroup, why_not: str = "") -> None:
        """Begin to roll a group out, or to refuse its samples, with `why_not`."""
        key = _key(leased)
        if key in self._held:
            return  # its lease had ended unnoticed, and is ours again
        task = asyncio.create_task(self._work(key, leased, why_not), name=f"group {key[1]}")
        self._held[key] = task
        self._undecoded.update((key, index) for index in leased.missing_sample_indices)
        self._free.clear()
        task.add_done_callback(lambda _: self._forget(key, leased.missing_sample_indices))

    def _forget(self, key: Key, indices: Sequence[int]) -> None:
        del self._held[key]
        self._undecoded.difference_update((key, index) for index in indices)
        self._progress.set()
        if not self._held:
            self._free.set()

    async def _serve_policy_of(self, group: buffer_pb2.Group) -> None:
        served = self._engine.policy
        if not group.HasField("policy"):
            if served is None:
                raise FailedPreconditionError(
                    f"group {group.group_id} names no policy and none is served: "
                    "name one, or set NPR_ROLLOUT_POLICY_LINE"
                )
        elif served is None or served.digest != group.policy.digest:
            if self._held and served is not None:
                raise FailedPreconditionError("The policy was changed while work was being leased; it is leased again.")
            await self._switch.serve(group.policy)

    async def _work(self, key: Key, leased: buffer_pb2.LeasedGroup, why_not: str) -> None:
        """Roll a group out. An error gives the group back: another worker, or this one, tries again.

        This one does so in a later call: one that waits now may be dropped with the group on its way to it.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in leased.missing_sample_indices:
                    tasks.create_task(self._roll_out(key, leased.group, index, why_not))
        except* NprError as errors:
            log.warning("group %s is given back: %s", key[1], errors.exceptions[0])
            await self._give_up(leased)
        except* Exception as errors:
            log.exception("group %s is given back", key[1], exc_info=errors)
            await self._give_up(leased)

    async def _give_up(self, leased: buffer_pb2.LeasedGroup) -> None:
        self._trouble = True
        if self._leasing is not None:
            self._leasing.cancel()
        await self._return([leased])

    async def _roll_out(self, key: Key, group: buffer_pb2.Group, index: int, why_not: str) -> None:
        if why_not:
            request = Request(f"{key[0]}/{key[1]}/{index}", ())
            result, policy = refused(request, group.policy.version, why_not), PolicyStamp(group.policy, None)
        else:
            result, policy = await self._decode(group, index)
        self._undecoded.discard((key, index))
        self._progress.set()
        origin = Origin.of(group, index)
        traceparent = record_trajectory(result, origin.trajectory_id, group.group_id, group.traceparent)
        message = trajectory_message(result, origin, policy.ref, policy.tokenizer, traceparent)
        await self._outbox.deliver(group, message)

    async def _decode(self, group: buffer_pb2.Group, index: int) -> tuple[Result, PolicyStamp]:
        """Decode one sample, and say by which policy; one that can't be right ends as REFUSED: its group completes.

        Raises:
            AbortedError: a swap of policies has ended it, or another policy than the group's would decode it.
            FailedPreconditionError: the engine is down.
            InternalError: the engine failed.
        """
        ids: list[int] = []
        decoded_by: list[PolicyStamp] = []
        request_id = f"{group.run_id}/{group.group_id}/{index}"
        prompt = await EncodedPrompt.of(group.prompt, self._engine)

        def make(loaded: LoadedPolicy) -> Request:
            if group.HasField("policy") and loaded.ref.digest != group.policy.digest:
                raise AbortedError("Another policy is served by now.")
            decoded_by.append(loaded.stamp)
            decoding = Decoding.parse(group.decoding, default_refusal=ForkRefusal.REJECT, seed_offset=index)
            ids.extend(prompt.ids(loaded.tokenizer))
            job = f"{group.run_id}/{group.channel}"
            return decoding.request(request_id, ids, job=job, priority=group.priority)

        try:
            result = await self._engine.decode(make)
        except InvalidArgumentError as error:
            result = refused(Request(request_id, tuple(ids)), decoded_by[0].ref.version, error.message)
        if result.outcome is Outcome.ABORTED:
            raise AbortedError(result.message)
        return result, decoded_by[0]

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.lease_seconds / _RENEWALS_PER_LEASE)
            if not (names := {**self._held, **self._awaiting}):
                continue
            request = buffer_pb2.RenewLeasesRequest(
                worker_id=self.worker_id, groups=_group_keys(names), lease_seconds=self._settings.lease_seconds
            )
            try:
                with rpc_errors():
                    response = await self._buffer.RenewLeases(request)
            except NprError as error:
                log.warning("renewing leases failed and is tried again: %s", error.message)
                continue
            for lost in response.lost_groups:
                self._awaiting.pop((lost.run_id, lost.group_id), None)
                task = self._held.get((lost.run_id, lost.group_id))
                if task is not None:
                    log.info("the lease of %s is lost: its decoding ends", lost.group_id)
                    task.cancel()

    async def _return(self, leased: Sequence[buffer_pb2.LeasedGroup]) -> None:
        if not leased:
            return
        request = buffer_pb2.ReturnGroupsRequest(worker_id=self.worker_id, groups=_group_keys(map(_key, leased)))
        with contextlib.suppress(NprError), rpc_errors():  # an unreturned lease ends by itself
            await self._buffer.ReturnGroups(request)


def _key(leased: buffer_pb2.LeasedGroup) -> Key:
    return leased.group.run_id, leased.group.group_id


def _group_keys(names: Iterable[Key]) -> list[buffer_pb2.GroupKey]:
    return [buffer_pb2.GroupKey(run_id=run_id, group_id=group_id) for run_id, group_id in names]
