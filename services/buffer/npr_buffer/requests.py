"""What a request must be before Redis hears of it: ids, sizes, ranges. Violations name their fields."""

import re
from collections.abc import Iterable, Sequence

from npr.buffer.v1 import buffer_pb2
from npr.types.v1 import trajectory_pb2
from npr_buffer.leasing import LeaseAsk
from npr_buffer.store import keys
from npr_common.errors import InvalidArgumentError

MAX_GROUPS_PER_ENQUEUE = 4096
MAX_AVOIDED_POLICIES = 256
MAX_TRAJECTORIES_PER_APPEND = 256
MAX_SAMPLES_PER_GROUP = 4096
LEASE_SECONDS = (1.0, 3600.0)
WAIT_SECONDS = (0.0, 60.0)
DEFAULT_PAGE_SIZE = 10_000

# Braces delimit the run's hash slot, the rest would be read as patterns.
_RUN_ID = re.compile(r"[^\s{}*?\[\]\\^]{1,200}")
_ID = re.compile(r"[^\s\x00-\x1f]{1,400}")


def check(violations: dict[str, str]) -> None:
    """Raises `InvalidArgumentError` naming the fields, if any."""
    if violations:
        field, first = next(iter(violations.items()))
        raise InvalidArgumentError(f"{field}: {first}", field_violations=violations)


def check_run(run_id: str) -> None:
    """A run id of 1 to 200 characters without white space, braces and pattern characters."""
    check(_run_violation("run_id", run_id))


def check_ids(run_id: str, group_ids: Sequence[str], **named: str) -> None:
    """A run, at least one group, and further required strings by field name."""
    empty = {} if group_ids else {"group_ids": "name at least one group"}
    check({**_run_violation("run_id", run_id), **empty, **_required(**named)})


def check_enqueue(request: buffer_pb2.EnqueueGroupsRequest) -> str:
    """The one run of the request's groups."""
    violations = _required(request_id=request.request_id)
    if not 1 <= len(request.groups) <= MAX_GROUPS_PER_ENQUEUE:
        violations["groups"] = f"give 1 to {MAX_GROUPS_PER_ENQUEUE} groups, not {len(request.groups)}"
    if len({group.run_id for group in request.groups}) > 1:
        violations["groups"] = "all groups of one call must belong to one run"
    for index, group in enumerate(request.groups):
        violations.update(_group_violations(f"groups[{index}]", group))
    check(violations)
    return request.groups[0].run_id


def lease_ask(request: buffer_pb2.LeaseGroupsRequest) -> LeaseAsk:
    """The request in the scripts' terms."""
    violations = _required(request_id=request.request_id, worker_id=request.worker_id)
    violations |= _out_of_range("lease_seconds", request.lease_seconds, LEASE_SECONDS)
    violations |= _out_of_range("wait_seconds", request.wait_seconds, WAIT_SECONDS)
    if request.max_groups < 1:
        violations["max_groups"] = "ask for at least 1 group"
    if len(request.avoid_policies) > MAX_AVOIDED_POLICIES:
        violations["avoid_policies"] = f"name at most {MAX_AVOIDED_POLICIES}, not {len(request.avoid_policies)}"
    check(violations)
    known = request.HasField("prefer_policy")
    return LeaseAsk(
        request_id=request.request_id,
        worker_id=request.worker_id,
        max_groups=request.max_groups,
        lease_ms=int(request.lease_seconds * 1000),
        prefer=keys.policy_key(request.prefer_policy) if known else keys.ANY_POLICY,
        only_preferred=request.only_preferred,
        avoid=tuple(keys.policy_key(ref) if ref.line else keys.NO_POLICY for ref in request.avoid_policies),
    )


def check_renew(request: buffer_pb2.RenewLeasesRequest) -> dict[str, list[str]]:
    """Group ids by run."""
    check(_required(worker_id=request.worker_id) | _out_of_range("lease_seconds", request.lease_seconds, LEASE_SECONDS))
    return _by_run(request.groups)


def check_return(request: buffer_pb2.ReturnGroupsRequest) -> dict[str, list[str]]:
    """Group ids by run."""
    check(_required(worker_id=request.worker_id))
    return _by_run(request.groups)


def check_append(request: buffer_pb2.AppendTrajectoriesRequest) -> None:
    """Ids that agree with each other."""
    violations = _run_violation("run_id", request.run_id)
    if not 1 <= len(request.trajectories) <= MAX_TRAJECTORIES_PER_APPEND:
        violations["trajectories"] = f"give 1 to {MAX_TRAJECTORIES_PER_APPEND}, not {len(request.trajectories)}"
    for index, scored in enumerate(request.trajectories):
        violations.update(_trajectory_violations(f"trajectories[{index}].trajectory", scored.trajectory))
    check(violations)


def check_list(request: buffer_pb2.ListGroupsRequest) -> tuple[int, int]:
    """The sequence number to go on from, and the page size."""
    check(_run_violation("run_id", request.run_id))
    if request.page_token and not request.page_token.isdecimal():
        check({"page_token": "not one of ours: pass next_page_token of the last answer"})
    return int(request.page_token or 0), request.page_size or DEFAULT_PAGE_SIZE


def _group_violations(where: str, group: buffer_pb2.Group) -> dict[str, str]:
    violations = _run_violation(f"{where}.run_id", group.run_id)
    for field, value in (("group_id", group.group_id), ("channel", group.channel)):
        if not _ID.fullmatch(value):
            violations[f"{where}.{field}"] = "1 to 400 characters without white space"
    if not 1 <= group.sample_count <= MAX_SAMPLES_PER_GROUP:
        violations[f"{where}.sample_count"] = f"1 to {MAX_SAMPLES_PER_GROUP}"
    if bool(group.prompt.messages) == bool(group.prompt.token_ids):
        violations[f"{where}.prompt"] = "set exactly one of messages and token_ids"
    return violations


def _trajectory_violations(where: str, trajectory: trajectory_pb2.Trajectory) -> dict[str, str]:
    violations = {}
    if not _ID.fullmatch(trajectory.group_id):
        violations[f"{where}.group_id"] = "1 to 400 characters without white space"
    expected = f"{trajectory.group_id}/{trajectory.sample_index}"
    if trajectory.trajectory_id != expected:
        violations[f"{where}.trajectory_id"] = f"must be <group_id>/<sample_index>, here {expected}"
    return violations


def _run_violation(field: str, run_id: str) -> dict[str, str]:
    if _RUN_ID.fullmatch(run_id):
        return {}
    return {field: "1 to 200 characters without white space, braces and pattern characters"}


def _required(**values: str) -> dict[str, str]:
    return {field: "required" for field, value in values.items() if not value}


def _out_of_range(field: str, value: float, bounds: tuple[float, float]) -> dict[str, str]:
    low, high = bounds
    return {} if low <= value <= high else {field: f"{low:g} to {high:g} seconds, not {value:g}"}


def _by_run(groups: Iterable[buffer_pb2.GroupKey]) -> dict[str, list[str]]:
    by_run: dict[str, list[str]] = {}
    for group in groups:
        check_run(group.run_id)
        by_run.setdefault(group.run_id, []).append(group.group_id)
    return by_run
