"""The canary forward: a policy says what it must, through the engine that will serve it.

Invariants:
- It runs the engine's whole path (admission, chunked prefill, page tables, attention, packed weights) on a few pages of
  its own, beside whatever is served. So a wrong file, a wrongly packed weight and a wrong kernel are found before the
  good policy is given up.
- The weights are packed where the check is made; the forward runs where it is told to, in the engine's thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from npr_common.canary import canary_prompt
from npr_common.errors import DataLossError, FailedPreconditionError, InvalidArgumentError, NprError
from npr_rollout.engine.config import EngineConfig
from npr_rollout.engine.engine import Engine
from npr_rollout.engine.model_runner import kv_shape
from npr_rollout.engine.scripted import ScriptedSampler
from npr_rollout.policy_loader import LoadedPolicy
from npr_rollout.record.outcomes import Visibility
from npr_rollout.record.request import Limits, Request
from npr_rollout.record.script import Script

_NAME = "canary"
_PREFILL_TOKENS = 8  # several chunks, so that later ones read from pages what earlier ones wrote
_SPARE_PAGES = 4

# The reference is computed in float32 from the weights as published; what the engine may be off is its own rounding.
# Measured on small models: 1e-5 in float32, 0.13 in bfloat16. A bfloat16 has 8 bits, so a logit of 16 alone is rounded
# to a multiple of 1/8, and each layer adds its own; float16 has 3 bits more. An alarm for nothing would keep a good
# policy from being served, and what this is to find is off by nats.
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.15, torch.bfloat16: 1.0}


def tolerance(dtype: torch.dtype) -> float:
    """How far log-probabilities may be off, in nats, where a model computes in a type."""
    return _TOLERANCE.get(dtype, max(_TOLERANCE.values()))


class CanaryCheck:
    """A policy in a small engine of its own. Making it packs the policy's weights; `run` decodes."""

    def __init__(self, policy: LoadedPolicy, config: EngineConfig) -> None:
        """Get ready to check a policy that will be served with `config`.

        Raises:
            FailedPreconditionError: the engine can't serve this kind of model.
        """
        self._policy = policy
        self._prompt = policy.canary.token_ids if policy.canary is not None else canary_prompt(policy.model)
        dtypes = policy.model.get_input_embeddings().weight.dtype, kv_shape(policy.model, config.kv_dtype).dtype
        self._tolerance = max(map(tolerance, dtypes))
        script = Script.of([*self._prompt, 0], len(self._prompt), None)
        self._sampler = ScriptedSampler({_NAME: script}, keep_logits=True)
        self._engine = Engine(
            policy.model, policy.tokenizer, policy.dialect, _small(config, len(self._prompt)), sampler=self._sampler
        )

    def run(self) -> None:
        """Decode, and compare.

        Raises:
            DataLossError: the policy says something else than it must; the message says how far off it is.
            FailedPreconditionError: the engine can't decode with it.
        """
        log_probs = self._log_probs()
        name = f"policy {self._policy.ref.line} version {self._policy.ref.version}"
        if not np.isfinite(log_probs).all():
            raise DataLossError(f"{name} gives log-probabilities that are no numbers", reason="CANARY")
        canary = self._policy.canary
        if canary is not None and not (deviation := canary.deviation(log_probs)) <= self._tolerance:
            raise DataLossError(
                f"{name} fails its canary forward: log-probabilities are up to {deviation:.3g} off what was published "
                f"with it, {self._tolerance} is allowed; publish it again, or look for what changed its weights",
                reason="CANARY",
                metadata={"deviation": f"{deviation:.6g}", "tolerance": str(self._tolerance)},
            )

    def _log_probs(self) -> npt.NDArray[np.float32]:
        limits = Limits(max_tokens=1)
        try:
            self._engine.submit(Request(_NAME, self._prompt, limits=limits, visibility=Visibility.SEQUENTIAL))
            while not self._engine.idle:
                self._engine.step()
        except InvalidArgumentError as error:
            name = f"policy {self._policy.ref.line} version {self._policy.ref.version}"
            raise DataLossError(
                f"The canary of {name} is not of its model: {error.message}", reason="CANARY"
            ) from error
        except NprError:
            raise
        except Exception as error:
            raise FailedPreconditionError(
                f"The engine can't decode with this policy: {type(error).__name__}: {error}"
            ) from error
        logits = self._sampler.logits[_NAME][len(self._prompt)]
        log_probs: npt.NDArray[np.float32] = logits.log_softmax(dim=-1).cpu().numpy()
        return log_probs


def _small(config: EngineConfig, tokens: int) -> EngineConfig:
    """The same engine with room for so many tokens, and one more."""
    pages = -(-tokens // config.page_size) + _SPARE_PAGES
    return config.model_copy(update={"pages": pages, "max_running": 1, "prefill_tokens": _PREFILL_TOKENS})
