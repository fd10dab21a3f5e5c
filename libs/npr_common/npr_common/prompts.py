"""Prompts as token ids: messages pass through the tokenizer's chat template, once.

Invariant: engine and learner encode the same prompt to the same ids, up to where the assistant's answer starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npr.types.v1 import prompt_pb2
from npr_common.errors import InvalidArgumentError


def encode_prompt(tokenizer: Any, prompt: prompt_pb2.Prompt) -> list[int]:
    """The prompt's ids: those that the caller gave, as they are, or its messages'.

    Raises:
        InvalidArgumentError: it has both or neither, or the tokenizer has no chat template.
    """
    if bool(prompt.messages) == bool(prompt.token_ids):
        raise InvalidArgumentError("Set exactly one of prompt.messages and prompt.token_ids.")
    return list(prompt.token_ids) or encode_messages(tokenizer, prompt.messages)


def encode_messages(tokenizer: Any, messages: Sequence[prompt_pb2.ChatMessage]) -> list[int]:
    """A conversation's ids.

    Raises:
        InvalidArgumentError: the tokenizer has no chat template, or it refuses the conversation.
    """
    if not tokenizer.chat_template:
        raise InvalidArgumentError(
            "The model's tokenizer has no chat template: add chat_template.jinja to its folder, or give token ids.",
            reason="NO_CHAT_TEMPLATE",
        )
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of the model's: it raises what it likes
        raise InvalidArgumentError(
            f"The model's chat template refuses these messages: {error}", reason="CHAT_TEMPLATE"
        ) from error
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
