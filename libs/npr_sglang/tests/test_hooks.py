"""What the plug-in notes for the sampler: rows of the batch that is computed, and of no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from npr_sglang.contract import KEY
from npr_sglang.hooks import after_init_forward_batch
from npr_sglang.sampler import SAMPLING_ROWS


def request(custom_params: dict[str, Any] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom_params, n=1, max_new_tokens=4),
        origin_input_ids=[1, 2, 3],
        extra_key=None,
        vocab_size=50,
        return_logprob=True,
        logprob_start_len=-1,
    )


def prepared(sampling_info: SimpleNamespace, *requests: SimpleNamespace) -> Any:
    """The note that the sampler finds when this batch is computed."""
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True, is_extend=lambda: False)
    lengths = torch.full((len(requests),), 5)
    made = SimpleNamespace(
        sampling_info=sampling_info, forward_mode=mode, positions=None, seq_lens=lengths, seq_lens_cpu=lengths
    )
    after_init_forward_batch(made, None, SimpleNamespace(reqs=list(requests)))
    return getattr(sampling_info, SAMPLING_ROWS)


def test_rows_of_ours_that_have_ended_do_not_stay() -> None:
    """The server keeps one sampling info while requests come and go."""
    info, theirs = SimpleNamespace(), request()
    rows = prepared(info, request({KEY: {}}), theirs)
    assert [state is not None for state in rows.states] == [True, False]
    assert prepared(info, theirs, request()) is None
