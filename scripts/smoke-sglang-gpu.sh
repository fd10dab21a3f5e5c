#!/usr/bin/env bash
# Checks on a machine with a GPU what `make test-sglang` checks on a CPU: smoke-sglang-gpu.sh PYTHON
# PYTHON is that of an environment with SGLang and the plug-in (docs/sglang.md). The checkout needs `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
export NPR_SGLANG_PYTHON=${1:?"give the Python that has SGLang: $0 /path/to/its/bin/python"}
export NPR_SGLANG_DEVICE=cuda
tests=(services/rollout/tests/test_rollout_conformance.py services/rollout/tests/test_rollout_sglang_pool.py)

"$NPR_SGLANG_PYTHON" -c 'import sglang, torch; print("SGLang", sglang.__version__, "torch", torch.__version__,
    "CUDA", torch.version.cuda, "on", torch.cuda.get_device_name())'

echo "== float32, Triton attention: log-probabilities within 1e-4 of the dense mask, equal draws"
NVIDIA_TF32_OVERRIDE=0 NPR_SGLANG_DTYPE=float32 NPR_SGLANG_ATTENTION_BACKEND=triton \
    .venv/bin/pytest -q -m sglang "${tests[@]}"

echo "== bfloat16, the attention that SGLang chooses, CUDA graphs: structure, and log-probabilities within rounding"
NPR_SGLANG_DTYPE=bfloat16 .venv/bin/pytest -q -m sglang -k 'not draws_are_the_same' "${tests[@]}"
