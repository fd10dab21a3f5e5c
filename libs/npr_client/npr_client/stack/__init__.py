"""The local stack: Valkey and the five services on one machine, kept alive by one supervisor process.

Invariants:
- one supervisor a state directory (a file lock that it holds for its life);
- nothing is signalled unless its pid *and* its start time are those that were recorded, or it carries the stack's mark;
- addresses stay valid: a component that comes back listens where it listened before;
- the supervisor is the only writer of the state file while it lives.
"""

from npr_client.stack.control import down, status, up
from npr_client.stack.layout import StateDir, default_state_dir
from npr_client.stack.state import StackState

__all__ = ["StackState", "StateDir", "default_state_dir", "down", "status", "up"]
