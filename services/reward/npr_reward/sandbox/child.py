"""The sandbox's side: one process, one job at a time, until the pipe closes.

An exception in a verifier ends the process with its traceback on stderr. That is deliberate: after a MemoryError or a
fault in a parser nothing in the process can be relied on, and the fork server makes another in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

from npr_reward.sandbox.job import Job, encode_verdict
from npr_reward.sandbox.limits import Limits
from npr_reward.verifiers import load_verifiers

READY = b"ready"


def serve(connection: Connection, limits: Limits, verifier_paths: Sequence[str]) -> None:
    """Loads the verifiers, says READY, then answers every job with a verdict."""
    verifiers = load_verifiers(verifier_paths)
    limits.confine()
    connection.send_bytes(READY)
    while True:
        try:
            job = Job.decode(connection.recv_bytes())
        except EOFError:
            return
        limits.grant_cpu()
        verdict = verifiers[job.verifier].judge(job.answer, job.gold, job.metadata)
        connection.send_bytes(encode_verdict(verdict))
