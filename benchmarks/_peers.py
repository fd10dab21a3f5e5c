"""The peers of the autoregressive benchmark. All decode greedily, to the last token asked for.

Each takes prompts and a number of new tokens, and gives seconds and the new tokens. The clock runs from handing over
the prompts to having all answers, prefill included.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from _decoding import Decoding, EndlessSampler, decode
from _subjects import DIALECT, Subject
from transformers import ContinuousBatchingConfig, GenerationConfig

from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.record.outcomes import Visibility
from npr_rollout.record.request import Limits, Request, SamplingParams

Prompts = Sequence[Sequence[int]]
PAGE_SIZE = 16


class Peer(Protocol):
    """One way to decode."""

    name: str

    def generate(self, prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds, and the new tokens of each prompt."""
        ...

    def close(self) -> None:
        """End threads and processes."""
        ...


class EnginePeer:
    """This engine, as its service runs it.

    Attributes:
        rounds: what it did in every call of `generate`.
    """

    def __init__(self, subject: Subject, dtype: str, batch: int, length: int) -> None:
        self.model = subject.load(dtype)
        self.name = f"this engine, {_short(self.model.dtype)}"
        pages = batch * (-(-length // PAGE_SIZE) + 2)
        self._engine = Engine(
            self.model,
            subject.tokenizer,
            DIALECT,
            EngineConfig(page_size=PAGE_SIZE, pages=pages, max_running=batch),
            sampler=EndlessSampler([subject.tokenizer.eos_token_id]),
        )
        self._asked = itertools.count()
        self.rounds: list[Decoding] = []

    def generate(self, prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        """See `Peer`."""
        asked = next(self._asked)
        limits, greedy = Limits(max_tokens=new_tokens), SamplingParams(temperature=0.0)
        done = decode(
            self._engine,
            [
                Request(f"{asked}/{i}", tuple(ids), greedy, limits, Visibility.SEQUENTIAL)
                for i, ids in enumerate(prompts)
            ],
        )
        self.rounds.append(done)
        results = sorted(done.results, key=lambda result: int(result.request_id.partition("/")[2]))
        return done.seconds, [list(result.token_ids[result.prompt_length :]) for result in results]

    def close(self) -> None:
        """Nothing runs beside the caller."""


class GeneratePeer:
    """`transformers` generate: one static batch with its dynamic KV cache and SDPA."""

    def __init__(self, model: Any, pad: int) -> None:
        self.name = f"transformers generate, {_short(model.dtype)}"
        self._model, self._pad = model, pad

    def generate(self, prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        """See `Peer`."""
        ids = torch.tensor(prompts)
        begin = time.perf_counter()
        out = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=self._pad,
        )
        return time.perf_counter() - begin, out[:, ids.shape[1] :].tolist()

    def close(self) -> None:
        """Nothing runs beside the caller."""


class ContinuousPeer:
    """`transformers` continuous batching: a manager with a paged cache and a thread of its own.

    The manager lives for one turn, and neither its start nor a first short pass is timed. Between turns its thread's
    OpenMP threads would be one set too many for the cores, and OpenMP then lets all threads of the process sleep rather
    than spin at its barriers: that alone makes the other rivals up to twice as slow.
    """

    def __init__(self, model: Any, pad: int, batch: int, length: int) -> None:
        self.name = f"transformers continuous, {_short(model.dtype)}"
        self._model = model
        self._settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=pad)
        self._cache = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=batch * (-(-length // PAGE_SIZE) + 2),
            max_batch_tokens=max(2048, batch),
            allow_block_sharing=False,
        )

    def generate(self, prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        """See `Peer`."""
        manager = self._model.init_continuous_batching(self._settings, self._cache)
        manager.start()
        try:
            _collect(manager, prompts, 2)
            begin = time.perf_counter()
            answers = _collect(manager, prompts, new_tokens)
            return time.perf_counter() - begin, answers
        finally:
            manager.stop(block=True, timeout=60)

    def close(self) -> None:
        """Nothing runs between turns."""


def _collect(manager: Any, prompts: Prompts, new_tokens: int) -> list[list[int]]:
    names = manager.add_requests([list(ids) for ids in prompts], max_new_tokens=new_tokens)
    answers: dict[str, list[int]] = {}
    while len(answers) < len(prompts):
        output = manager.get_result(timeout=60)
        if output is None or output.error:
            raise RuntimeError(f"continuous batching: {output.error if output else 'no answer in 60 s'}")
        if output.is_finished():
            answers[output.request_id] = list(output.generated_tokens)
    return [answers[name] for name in names]


class VllmError(RuntimeError):
    """vLLM does not run this model on this machine."""


class VllmPeer:
    """vLLM in a process and environment of its own (`_vllm_worker.py`), which takes the time itself."""

    def __init__(self, python: Path, subject: Subject, dtype: torch.dtype, batch: int, length: int) -> None:
        threads = torch.get_num_threads()
        settings = {
            "model": str(subject.folder),
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": length,
            "max_num_seqs": batch,
        }
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("_vllm_worker.py")), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_clean_environment()
            | {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": str(_room(subject, dtype, batch * length))},
        )
        ready = self._answer()
        if ready["threads"] != threads:
            raise VllmError(f"it took {ready['threads']} threads and not {threads}")
        self.name = f"vllm {ready['version']}, {_short(dtype)}"

    def generate(self, prompts: Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        """See `Peer`."""
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None
        print(json.dumps({"prompts": [list(ids) for ids in prompts], "new_tokens": new_tokens}), file=stdin, flush=True)
        answer = self._answer()
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        """End its process, by the end of its input."""
        self._process.communicate(timeout=120)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise VllmError(f"vLLM's process ended with {self._process.wait()}; what it said is above")
        return json.loads(line)


def _room(subject: Subject, dtype: torch.dtype, tokens: int) -> int:
    """GiB for the keys and values of so many tokens, and one more for what its blocks round up."""
    return math.ceil(tokens * subject.kv_shape(dtype).bytes_per_token / 2**30) + 1


def _clean_environment() -> dict[str, str]:
    """Without this environment's own modules, which are not vLLM's."""
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))
