"""Redis keys of the controller. One hash tag: a transition touches several keys in one script."""

PREFIX = "npr:{controller}:"
LEADER = PREFIX + "leader"
RUNS = PREFIX + "runs"
NOTICES = PREFIX + "notices"


def run_key(run_id: str) -> str:
    """Hash of the run's record."""
    return f"{PREFIX}run:{run_id}"


def facts_key(run_id: str) -> str:
    """Hash of the run's facts, JSON by name."""
    return f"{PREFIX}facts:{run_id}"


def events_key(run_id: str) -> str:
    """List of the run's events; an event's sequence number is its index plus one."""
    return f"{PREFIX}events:{run_id}"


def event_channel(run_id: str) -> str:
    """Pub/sub channel that tells of new events; a hint, never the truth."""
    return f"{PREFIX}events-of:{run_id}"
