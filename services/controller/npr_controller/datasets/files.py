"""Problems from JSONL, JSON and Parquet files, wherever fsspec or an installed package has them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from npr_common.references import resolve_reference
from npr_common.rpc import InvalidArgumentError, NotFoundError
from npr_controller.datasets.fields import IDS, Reading, read_record
from npr_controller.datasets.problem import Problem
from npr_controller.recipe import FileSource

_PARQUET_MAGIC = b"PAR1"


def open_file(source: FileSource) -> Sequence[Problem]:
    """All problems of a file, in its order.

    Raises `NotFoundError` when the file is not there, and `InvalidArgumentError` naming the record that can't be read.
    """
    records = _records(source.url)[: source.limit]
    if not records:
        raise InvalidArgumentError(f"{source.url} holds no problem", reason="EMPTY_DATA")
    return [_problem(source, index, record) for index, record in enumerate(records)]


def _problem(source: FileSource, index: int, record: Mapping[str, Any]) -> Problem:
    try:
        reading = read_record(record, source.question_field, source.answer_field)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{source.url}, record {index}: {error.message}", reason=error.reason) from error
    name = PurePosixPath(source.url).parent.name or "file"
    problem_id = next((str(record[key]) for key in IDS if record.get(key) is not None), f"{name}-{index}")
    return Problem(problem_id, reading.question, reading.gold, source.verifier or reading.verifier, _labels(reading))


def _labels(reading: Reading) -> dict[str, str]:
    return {"choices": json.dumps(list(reading.choices))} if reading.choices else {}


def _records(url: str) -> list[Mapping[str, Any]]:
    try:
        with fsspec.open(resolve_reference(url), "rb", compression="infer") as file:
            content: bytes = file.read()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFoundError(f"no data set at {url}: check the path", reason="DATA_NOT_FOUND") from error
    except (ValueError, ImportError) as error:  # fsspec: unknown protocol, or one whose package is absent
        raise InvalidArgumentError(f"can't open {url}: {error}", reason="BAD_DATA_URL") from error
    if content.startswith(_PARQUET_MAGIC):
        return _parquet(content)
    return _json(url, content)


def _parquet(content: bytes) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = pq.read_table(pa.BufferReader(content)).to_pylist()
    return rows


def _json(url: str, content: bytes) -> list[Mapping[str, Any]]:
    """A JSON array, or one JSON object a line."""
    try:
        text = content.decode("utf-8-sig")
        if text.lstrip().startswith("["):
            rows: list[Mapping[str, Any]] = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{url} is neither Parquet nor JSON lines: {error}", reason="BAD_DATA") from error
    if not all(isinstance(row, dict) for row in rows):
        raise InvalidArgumentError(f"{url}: every record must be a JSON object", reason="BAD_DATA")
    return rows
