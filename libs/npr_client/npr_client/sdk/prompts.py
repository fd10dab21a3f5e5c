"""Prompts from text and from files.

The field names are those that public problem sets use, so that most files need no conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from npr.types.v1 import prompt_pb2
from npr_client.sdk.jsonl import Record, read_records
from npr_common.errors import InvalidArgumentError

PROMPT_FIELDS = ("prompt", "problem", "question")
GOLD_FIELDS = ("gold", "expected_answer", "answer")
ID_FIELDS = ("prompt_id", "id", "unique_id")


def text_prompt(
    text: str,
    *,
    gold: str = "",
    verifier: str = "",
    prompt_id: str = "prompt-0",
    metadata: Mapping[str, str] | None = None,
) -> prompt_pb2.Prompt:
    """One user turn. With a gold answer it is judged, by the math verifier unless another is named."""
    return prompt_pb2.Prompt(
        prompt_id=prompt_id,
        messages=[prompt_pb2.ChatMessage(role="user", content=text)],
        gold=gold,
        verifier=verifier or ("math" if gold else ""),
        metadata=metadata or {},
    )


def prompts_from_jsonl(path: Path, *, verifier: str = "") -> list[prompt_pb2.Prompt]:
    """One prompt a line: `prompt` (or `problem`, `question`, or chat `messages`), and maybe `gold` (or
    `expected_answer`, `answer`), `verifier`, `prompt_id` (or `id`).

    Raises:
        NotFoundError: there is no such file.
        InvalidArgumentError: a line can't be read, or the file holds no prompt.
    """
    prompts = [_prompt(record, verifier) for record in read_records(path)]
    if not prompts:
        raise InvalidArgumentError(f"{path} holds no prompt: one JSON object a line")
    return prompts


def _prompt(record: Record, verifier: str) -> prompt_pb2.Prompt:
    gold = record.text(*GOLD_FIELDS, default="")
    prompt_id = record.text(*ID_FIELDS, default=f"{record.path.stem}-{record.line}")
    named = record.text("verifier", default=verifier)
    if "messages" not in record.fields:
        return text_prompt(record.text(*PROMPT_FIELDS), gold=gold, verifier=named, prompt_id=prompt_id)
    prompt = text_prompt("", gold=gold, verifier=named, prompt_id=prompt_id)
    del prompt.messages[:]
    prompt.messages.extend(_messages(record))
    return prompt


def _messages(record: Record) -> list[prompt_pb2.ChatMessage]:
    messages = record.fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise record.fault("field 'messages' must be a list of objects with 'role' and 'content'")
    return [_message(record, message) for message in messages]


def _message(record: Record, message: object) -> prompt_pb2.ChatMessage:
    match message:
        case {"role": str(role), "content": str(content)}:
            return prompt_pb2.ChatMessage(role=role, content=content)
    raise record.fault("each of 'messages' needs a 'role' and a 'content'")
