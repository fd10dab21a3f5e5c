"""The NPR engine: continuous batching with fork and join.

The life of a request: `submit` checks it and puts it in line; the scheduler admits it; each `step` feeds what the
records of all running trajectories ask for in one forward pass, samples, and takes the samples into the records, which
fork, join and end by the rules of `record`; an end gives back every page and makes a `Result`.

Invariants:
- One thread calls it. One policy at a time; every token of a trajectory is of one policy version.
- After `step` returns, every page is held by a trajectory that runs, or free.
- No part refers back to the engine: its memory goes with the last reference to it, not when a collector runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from npr_common.dialects import Dialect
from npr_common.errors import InternalError
from npr_common.tokenizers import eos_ids
from npr_rollout.engine.admission import resolve_limits
from npr_rollout.engine.audit import audit
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.feeding import Feeder
from npr_rollout.engine.kv_pool import KvPool
from npr_rollout.engine.model_runner import ModelRunner, kv_shape
from npr_rollout.engine.page_table import PageTables
from npr_rollout.engine.prompts import SharedPrompts
from npr_rollout.engine.sampling import RandomSampler, Sampler
from npr_rollout.engine.scheduler import Scheduler
from npr_rollout.engine.stopwatch import Stopwatch
from npr_rollout.record.admission import check_request
from npr_rollout.record.growth import Growth
from npr_rollout.record.live import LiveTrajectories
from npr_rollout.record.request import Event, Request
from npr_rollout.record.trajectory import Trajectory
from npr_rollout.record.validation import fork_validator
from npr_rollout.status import EngineStatus


class Engine:
    """Decodes requests with one policy. See the module's docstring."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        dialect: Dialect,
        config: EngineConfig | None = None,
        *,
        policy_version: int = 0,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve a model.

        Args:
            model: a `transformers` causal language model; its attention function is replaced, and on a CPU its linear
                layers are.
            tokenizer: its tokenizer. Without single-token tags (before stage 2) nothing ever forks.
            sampler: how tokens are chosen, if not at random.
            clock: what deadlines are compared with, in seconds.
        """
        self.config = config or EngineConfig()
        self.policy_version = policy_version
        self.context = int(model.config.max_position_embeddings)
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._pool = KvPool(kv_shape(model, self.config.kv_dtype), self.config.pages, self.config.page_size)
        self._tables = PageTables(self._pool)
        self._prompts = SharedPrompts(self._tables)
        self._feeder = Feeder(self._tables, self._prompts)
        self._runner = ModelRunner(model, self._pool, self._tables, self.config.attention)
        self._scheduler = Scheduler(
            self._pool, self._prompts, self._feeder, self.config.max_running, self.config.prefill_tokens
        )
        self._sampler = sampler or RandomSampler()
        validator = fork_validator(tokenizer, dialect, partial(_can_ever_pay, self._pool))
        cues = validator.cues if validator is not None else None
        self._live = LiveTrajectories(dialect, cues, policy_version, clock, self._feeder.release)
        eos = eos_ids(tokenizer, getattr(model, "generation_config", None))
        self._growth = Growth(self._live, eos, validator, partial(_new_body, self._pool, self._vocab_size))
        self._resolve_limits = partial(resolve_limits, config=self.config, context=self.context)
        self._counts: Counter[str] = Counter()
        self._seconds = Stopwatch()

    # --- what callers use ---

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self._live

    def submit(self, request: Request) -> str:
        """Put a request in line; its id. One that can never fit ends as REFUSED in the next step's events.

        Raises:
            InvalidArgumentError: the prompt is empty, too long for the context, or has ids that the model lacks; or a
                sampling parameter or limit makes no sense.
            AlreadyExistsError: a request with this id is on its way.
        """
        check_request(request, self.context, self._vocab_size)
        trajectory = self._live.accept(request, self._resolve_limits)
        if trajectory is not None:
            self._scheduler.add(trajectory)
        return request.request_id

    def step(self) -> list[Event]:
        """One forward pass over everything that runs, and what came of it. Cheap when there is nothing to do."""
        self._seconds.start()
        if self._live.expire():
            self._scheduler.remove_finished()
        admitted, preempted = self._scheduler.schedule()
        now = time.time()
        for trajectory in admitted:
            trajectory.started_at = trajectory.started_at or now
        self._counts["preemptions"] += len(preempted)
        if self._scheduler.running:
            self._decode()
        self._seconds.lap("scheduling")
        if self.config.audit_every_step and (problems := self.audit()):
            raise InternalError("The KV audit failed: " + " ".join(problems), reason="KV_AUDIT")
        return self._live.take_events()

    def abort(self, request_id: str, message: str = "The client left.") -> bool:
        """End a request with all its branches, at any moment; whether it was on its way. `message` says why."""
        was_on_its_way = self._live.abort(request_id, message)
        self._scheduler.remove_finished()
        return was_on_its_way

    def status(self) -> EngineStatus:
        """What the engine is doing."""
        return EngineStatus(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages_total=self._pool.pages,
            pages_used=self._pool.pages - self._pool.free_pages - self._prompts.idle_pages,
            steps=self._counts["steps"],
            tokens=self._counts["tokens"],
            forks=self._growth.forks,
            joins=self._growth.joins,
            preemptions=self._counts["preemptions"],
            fork_refusals=dict(self._growth.refusals),
            pages_cached=self._prompts.idle_pages,
            evictions=self._prompts.evictions,
            scheduling_seconds=self._seconds.of["scheduling"],
            forward_seconds=self._seconds.of["forward"],
            sampling_seconds=self._seconds.of["sampling"],
            kv_tokens_read=self._counts["kv_tokens_read"],
            kv_tokens_attended=self._counts["kv_tokens_attended"],
        )

    def audit(self) -> tuple[str, ...]:
        """Problems between the page allocator and the live tables, each a sentence; none in a sound engine."""
        return audit(self._tables, self._prompts, self._live)

    # --- one step ---

    def _decode(self) -> None:
        planned = self._runner.plan(*self._scheduler.plan())
        self._seconds.lap("scheduling")
        logits = self._runner.forward(planned)
        self._seconds.lap("forward")
        samples = self._sampler.sample(logits, planned.spans) if planned.spans else None
        self._seconds.lap("sampling")
        self._tables.recycle()
        for trajectory in self._scheduler.running:
            trajectory.engine_steps += 1
        self._counts.update(
            steps=1,
            tokens=len(planned.spans),
            kv_tokens_read=planned.attention.tokens_read,
            kv_tokens_attended=planned.attention.tokens_attended,
        )
        if samples is not None:
            self._growth.take(planned.spans, samples.rows())
        self._live.stream(self._scheduler.running)
        self._scheduler.remove_finished()


def _can_ever_pay(pool: KvPool, trajectory: Trajectory, branches: int) -> bool:
    """Whether the rest of a trajectory fits if it has the pool to itself, each branch on fresh pages.

    This keeps the scheduler's promise that a trajectory alone fits.
    """
    rest = -(-trajectory.ledger.remaining // pool.page_size)
    return trajectory.pages + rest + branches + 1 <= pool.pages


def _new_body(pool: KvPool, vocab_size: int) -> torch.Tensor:
    return pool.keys[0].new_zeros(vocab_size, dtype=torch.bool)
