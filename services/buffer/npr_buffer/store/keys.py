"""Names of keys, and the one text form of a policy.

A run's keys share the prefix `npr:run:{<run id>}:` whose braces are Redis' hash tag: a run lives in one slot, and a
script touches one run. The index of runs with open work has a slot of its own; it is a hint that heals (see
`run_index.py`), never a truth.
"""

from npr.types.v1 import policy_pb2

INDEX = "npr:index:{runs}:open"
INDEX_GENERATION = "npr:index:{runs}:generation"
INDEX_EXPIRED_LEASES = "npr:index:{runs}:expired_leases"
WORK_CHANNEL = "npr:work"
CHANGED_PATTERN = "npr:run:{*}:changed"
META_PATTERN = "npr:run:{*}:meta"

ANY_POLICY = "*"
NO_POLICY = ""


def run_prefix(run_id: str) -> str:
    """What every key of the run starts with."""
    return f"npr:run:{{{run_id}}}:"


def changed_channel(run_id: str) -> str:
    """Pub/sub channel that names the run's channels as they change."""
    return f"{run_prefix(run_id)}changed"


def run_of_meta_key(key: bytes) -> str:
    """The run id in a key that matches `META_PATTERN`."""
    return key.decode().removeprefix("npr:run:{").removesuffix("}:meta")


def policy_key(policy: policy_pb2.PolicyRef) -> str:
    """`line@version`: two references with equal keys are the same policy. Never `ANY_POLICY` or `NO_POLICY`."""
    return f"{policy.line}@{policy.version}"
