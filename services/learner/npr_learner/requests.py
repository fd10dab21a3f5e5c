"""Requests, checked and turned into the learner's own types."""

import re
from collections.abc import Sequence

from npr.learner.v1 import learner_pb2
from npr.types.v1 import sampling_pb2
from npr_common.dialects import DialectError, load_dialect
from npr_common.errors import InvalidArgumentError
from npr_learner.options import Schedule, StageOptions, parse_options
from npr_learner.records import StageKey, StageSpec

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DEFAULT_DIALECT = "npr"


def stage_key(run_id: str, stage: str) -> StageKey:
    """The stage's name. Raises InvalidArgumentError for one that makes no folder name."""
    return StageKey(run_id=require_name("run_id", run_id), stage=require_name("stage", stage))


def require_name(field: str, name: str) -> str:
    """`name` itself. Raises InvalidArgumentError unless it is letters, digits, `_`, `-` and `.` inside."""
    if not _NAME.fullmatch(name):
        message = f"{field} is {name!r}: use up to 128 letters, digits, `_`, `-` and `.`, not starting with `-` or `.`"
        raise InvalidArgumentError(message, field_violations={field: message})
    return name


def stage_spec(request: learner_pb2.StartStageRequest) -> StageSpec:
    """What the stage is to be.

    Raises:
        InvalidArgumentError: a field is missing or out of range, or options contradict the objective.
    """
    key = stage_key(request.run_id, request.stage)
    _require_known("objective", request.objective, learner_pb2.Objective.values())
    _require_known("visibility", request.visibility, sampling_pb2.Visibility.values())
    options = parse_options(request.options_json)
    _require_schedule(options, request.objective)
    dialect = request.dialect or _DEFAULT_DIALECT
    try:
        load_dialect(dialect)
    except DialectError as error:
        raise InvalidArgumentError(str(error), field_violations={"dialect": str(error)}) from error
    return StageSpec(
        key=key,
        objective=request.objective,
        visibility=request.visibility,
        dialect=dialect,
        add_tag_tokens=request.add_tag_tokens,
        options=options,
    )


def _require_known(field: str, value: int, known: Sequence[int]) -> None:
    """An enum that is set, and whose number this release knows."""
    if not value:
        raise InvalidArgumentError(f"a stage needs its {field}", field_violations={field: "not set"})
    if value not in known:
        raise InvalidArgumentError(f"this learner knows no {field} {value}", field_violations={field: "unknown"})


def _require_schedule(options: StageOptions, objective: int) -> None:
    """Fine-tuning counts its own steps; a reinforcement-learning stage can't know how many there will be."""
    if objective == learner_pb2.OBJECTIVE_SFT or options.total_steps is not None:
        return
    if options.schedule is Schedule.COSINE or options.warmup_fraction is not None:
        message = "schedule cosine and warmup_fraction need total_steps in a reinforcement-learning stage"
        raise InvalidArgumentError(message, field_violations={"options.total_steps": message})
