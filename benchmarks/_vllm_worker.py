"""Decodes with vLLM for `engine_autoregressive.py`, in the environment that has it.

    python _vllm_worker.py '{"model": FOLDER, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 32}'

A line of JSON in, a line of JSON out: first `{"version", "threads"}` once the model is loaded, then for
each `{"prompts": [[id]], "new_tokens"}` the `{"seconds", "tokens": [[id]]}` that it took. The end of input ends it.
Threads are those of OMP_NUM_THREADS, the room for keys and values is VLLM_CPU_KVCACHE_SPACE, in GiB.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: no hop, no second set of threads
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    """Serve standard input until its end."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not look like an answer
    settings = json.loads(sys.argv[1])
    import torch  # noqa: PLC0415
    import vllm  # type: ignore[import-not-found]  # noqa: PLC0415 - once standard output is safe

    engine = vllm.LLM(**settings, skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=True)
    ready = {"version": vllm.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_decode(vllm, engine, json.loads(line))), file=answers, flush=True)


def _decode(vllm: Any, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    count = asked["new_tokens"]
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    begin = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return {
        "seconds": time.perf_counter() - begin,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


if __name__ == "__main__":
    main()
