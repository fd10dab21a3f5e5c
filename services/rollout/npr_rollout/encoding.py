"""Prompts as tokens, made where nobody waits for it.

Invariant: encoding runs neither in the engine's thread, which would decode nothing meanwhile, nor in the event loop.
Only where the policy changes while a prompt is on its way is that encoded again, in the engine's thread.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from npr.types.v1 import prompt_pb2
from npr_common.prompts import encode_prompt
from npr_rollout.engine_thread import EngineThread

_encoding = threading.Lock()  # a tokenizer is not made for two threads at once


class EncodedPrompt:
    """A prompt, encoded for the policy that is served now."""

    def __init__(self, prompt: prompt_pb2.Prompt) -> None:
        self._prompt = prompt
        self._tokenizer: Any = None
        self._ids: list[int] = []

    @classmethod
    async def of(cls, prompt: prompt_pb2.Prompt, engine: EngineThread) -> EncodedPrompt:
        """Encode a prompt. What is wrong with it is told by `ids`."""
        made = cls(prompt)
        tokenizer = engine.tokenizer
        if tokenizer is not None and prompt.messages:
            await asyncio.to_thread(made._encode_ahead, tokenizer)
        return made

    def ids(self, tokenizer: Any) -> list[int]:
        """The prompt's ids by the tokenizer of the policy that will decode it.

        Raises:
            InvalidArgumentError: see `encode_prompt`.
        """
        if tokenizer is not self._tokenizer:
            with _encoding:
                self._ids = encode_prompt(tokenizer, self._prompt)
            self._tokenizer = tokenizer
        return self._ids

    def _encode_ahead(self, tokenizer: Any) -> None:
        try:
            self.ids(tokenizer)
        except Exception:  # noqa: BLE001 - it is raised again where it belongs, when the ids are wanted
            self._tokenizer = None
