"""What a hybrid model takes, gives and refuses beside the matrix."""

import pytest
import torch
import torch._dynamo.testing
from transformers import DynamicCache, TextStreamer

import hybridize as hz
from conftest import BASES, index_parameters, make_base, make_hybrid, make_plan
from hybridize.conversion import hybrid_config, memory_estimate
from hybridize.families import family_of


def hybrid_of(operator="window", family="llama", **more):
    base = make_base(family, **more)
    return make_hybrid(base, operator)


# -- prompt_len: what a query sees depends on its position, never on the length of a call -------------------------


def test_full_decode_depends_on_prompt_len_only(ids):
    model = hybrid_of("window_full_decode")
    with torch.no_grad():
        outputs = []
        for split in ([40], [30, 10], [29, 1, 10], [30, *[1] * 10], [5, 20, 15]):
            cache, start, parts = model.new_cache(), 0, []
            cache.start_prompt(torch.tensor([30, 12]))
            for size in split:
                parts.append(model(ids[:, start : start + size], past_key_values=cache).logits)
                start += size
            outputs.append(torch.cat(parts, 1))
        for out in outputs[1:]:
            torch.testing.assert_close(out, outputs[0], rtol=1e-4, atol=2e-5)
        windowed = model(ids).logits
        # rows differ from the all-prefill run from their own prompt_len on, and not before
        assert torch.allclose(outputs[0][0, :30], windowed[0, :30], atol=2e-5)
        assert torch.allclose(outputs[0][1, :12], windowed[1, :12], atol=2e-5)
        assert not torch.allclose(outputs[0][0, 30:], windowed[0, 30:], atol=1e-3)
        assert not torch.allclose(outputs[0][1, 12:30], windowed[1, 12:30], atol=1e-3)


def test_full_decode_sees_everything_behind_the_prompt(ids):
    """All queries decoding (prompt_len 0) is the base."""
    base = make_base("llama")
    model = hz.convert(base, make_plan(base, "window_full_decode"))
    with torch.no_grad():
        out = model(ids, prompt_len=torch.zeros(2, dtype=torch.long)).logits
        torch.testing.assert_close(out, base(ids).logits, rtol=1e-4, atol=2e-5)


# -- several turns, streaming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["window", "window_rebased", "window_full_decode"])
def test_second_turn_reuses_the_cache(ids, operator):
    model, options = hybrid_of(operator), dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    cache = model.new_cache()
    first = model.generate(ids[:1, :20], past_key_values=cache, **options)
    held = cache.get_seq_length()
    assert held == 25  # the last token was never fed
    prompt = torch.cat([first, ids[:1, 20:30]], dim=1)
    second = model.generate(prompt, past_key_values=cache, **options)
    assert second.shape[1] == 42
    if not model.plan.phased:  # an answer that was decoded with full attention keeps what it saw then
        assert torch.equal(second, model.generate(prompt, **options))


def test_a_second_prompt_after_eviction_is_refused(ids):
    model, options = hybrid_of("snapkv"), dict(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    cache = model.new_cache()
    first = model.generate(ids[:1, :20], past_key_values=cache, **options)
    with pytest.raises(hz.HybridizeError, match="SnapKV has dropped tokens"):
        model.generate(torch.cat([first, ids[:1, 20:30]], dim=1), past_key_values=cache, **options)


def test_text_streamer(tokenizer, capsys):
    model = hybrid_of()
    inputs = tokenizer("a needle", return_tensors="pt")
    model.generate(inputs["input_ids"], streamer=TextStreamer(tokenizer), max_new_tokens=4, do_sample=False)
    assert capsys.readouterr().out.startswith("a needle")


def test_hidden_states_and_loss(ids):
    base = make_base("qwen3")
    model = hz.convert(base, hz.AttentionPlan.base(hz.geometry_of(base.config)))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    with torch.no_grad():
        mine = model(ids, attention_mask=mask, labels=ids, output_hidden_states=True)
        theirs = base(ids, attention_mask=mask, labels=ids, output_hidden_states=True)
    torch.testing.assert_close(mine.loss, model(ids, attention_mask=mask, labels=ids).loss)
    assert len(mine.hidden_states) == len(theirs.hidden_states)
    for a, b in zip(mine.hidden_states, theirs.hidden_states):  # real columns, in the caller's order
        torch.testing.assert_close(a[1, 9:], b[1, 9:], rtol=1e-4, atol=1e-4)


def test_a_training_step_moves_every_weight(ids):
    model = hybrid_of("mixed").train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    still = {name for name in before if "k_proj.bias" in name} | index_parameters(model)
    assert moved | still == set(before) and not moved & index_parameters(model)


def test_compiled_static_decode_has_one_graph(ids):
    """A decode step over the static cache traces without a break and is never traced again."""
    model = hybrid_of("mixed")
    cache, eager = model.new_cache(48), model.new_cache(48)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for c in (cache, eager):
            c.start_prompt(torch.tensor([20, 20]))
            model(ids[:, :20], past_key_values=c)
        for i in range(20, 30):
            mine = step(ids[:, i : i + 1], past_key_values=cache).logits
            theirs = model(ids[:, i : i + 1], past_key_values=eager).logits
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)
    assert counter.frame_count == 1


# -- bases with a window of their own -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("mistral", dict(sliding_window=7)),
        ("qwen2", dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)),
        ("qwen3", dict(use_sliding_window=True, sliding_window=7, max_window_layers=2)),
    ],
)
def test_sliding_base_is_respected(family, more, ids):
    base = make_base(family, **more)
    geometry = hz.geometry_of(base.config)
    assert 7 in geometry.windows
    model = hz.convert(base, hz.AttentionPlan.base(geometry))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, base(ids).logits, rtol=1e-4, atol=2e-5)
    with pytest.raises(hz.HybridizeError, match="base's own window"):
        hz.AttentionPlan(geometry, {"full": hz.Full()}, [["full"] * 3] * 3)
    with pytest.raises(hz.HybridizeError, match="base's own window"):
        hz.AttentionPlan.from_layers(geometry, [], hz.Window(8))


# -- refusals -----------------------------------------------------------------------------------------------------


def test_assisted_decoding_is_refused(ids):
    model = hybrid_of()
    with pytest.raises(hz.HybridizeError, match="assistant_model"):
        model.generate(ids, assistant_model=make_base("llama"))
    with pytest.raises(hz.HybridizeError, match="prompt_lookup_num_tokens"):
        model.generate(ids, prompt_lookup_num_tokens=3)
    with pytest.raises(hz.HybridizeError, match="crop"):
        model.new_cache().crop(1)


@pytest.mark.parametrize("kind", ["quantized", "offloaded"])
def test_other_caches_are_refused(ids, kind):
    with pytest.raises(hz.HybridizeError, match="cache_implementation"):
        hybrid_of().generate(ids, cache_implementation=kind, max_new_tokens=2)


def test_foreign_caches_are_refused(ids):
    model = hybrid_of()
    with pytest.raises(hz.HybridizeError, match="HybridCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(hz.HybridizeError, match="HybridCache"):
        model.generate(ids, past_key_values=DynamicCache(), max_new_tokens=2)
    with pytest.raises(hz.HybridizeError, match="another plan"):
        model(ids, past_key_values=hybrid_of("full").new_cache())
    with pytest.raises(hz.HybridizeError, match="max_tokens"):
        model(ids, past_key_values=model.new_cache(16))
    cache = model.new_cache()
    model(ids, past_key_values=cache)
    with pytest.raises(hz.HybridizeError, match="batch"):
        model(ids[:1], past_key_values=cache)


def test_bad_inputs_are_refused(ids):
    model = hybrid_of()
    for kwargs, field in (
        (dict(attention_mask=torch.ones(2, 1, 40, 40)), "attention_mask"),
        (dict(attention_mask=torch.ones(2, 39)), "attention_mask"),
        (dict(output_attentions=True), "output_attentions"),
        (dict(cu_seq_lens_q=torch.tensor([0, 40])), "cu_seq_lens"),
        (dict(inputs_embeds=torch.zeros(2, 40, 48)), "input_ids"),
    ):
        with pytest.raises(hz.HybridizeError, match=field):
            model(ids, **kwargs)


def test_prompt_beyond_the_trained_context():
    long = torch.randint(3, 300, (1, 65), generator=torch.Generator().manual_seed(0))
    with pytest.raises(hz.HybridizeError, match="trained context"):
        hybrid_of("window", max_position_embeddings=64).generate(long, max_new_tokens=1)
    hybrid_of("window_rebased", max_position_embeddings=64).generate(long, max_new_tokens=1)


def test_rebased_sinks_bound_every_distance(ids):
    """Moving a row far along changes nothing: all distances are relative or held."""
    model = hybrid_of("window_rebased")
    with torch.no_grad():
        here = model(ids).logits
        there = model(ids, position_ids=torch.arange(40)[None] + 1000).logits
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3)


def test_rebased_sinks_need_a_fixed_rope():
    base = make_base("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(hz.HybridizeError, match="sink_positions"):
        hz.convert(base, make_plan(base, "window_rebased"))


def test_unknown_family_and_foreign_plans():
    with pytest.raises(hz.HybridizeError, match="model_type"):
        family_of("gpt2")
    base = make_base("llama")
    other = make_base("llama", intermediate_size=56)
    with pytest.raises(hz.HybridizeError, match=r"geometry\.identity"):
        hz.convert(other, make_plan(base, "window"))
    with pytest.raises(hz.HybridizeError, match=r"geometry\.model_type"):
        hz.convert(make_base("qwen3"), make_plan(base, "window"))
    with pytest.raises(hz.HybridizeError, match="a base model"):
        hz.convert(hybrid_of(), make_plan(base, "window"))


def test_quantized_weights_need_plans_of_whole_layers():
    base = make_base("llama")
    base.hf_quantizer = object()
    hz.convert(base, make_plan(base, "window"))
    with pytest.raises(hz.HybridizeError, match="quantization"):
        hz.convert(base, make_plan(base, "mixed"))


@pytest.mark.parametrize("family", BASES)
def test_config_round_trip_and_identity(family):
    base = make_base(family)
    plan = make_plan(base, "mixed")
    config = hybrid_config(base.config, plan)
    assert hz.geometry_of(config) == hz.geometry_of(base.config)
    assert config.model_type == f"hybridize_{family}"
    again = type(config).from_dict(config.to_dict())
    assert hz.AttentionPlan.from_dict(again.hybrid_plan) == plan


def test_broken_plan_in_a_config():
    config = hybrid_config(make_base("llama").config, make_plan(make_base("llama"), "window"))
    config.num_hidden_layers = 2
    with pytest.raises(hz.HybridizeError, match=r"plan\.geometry"):
        family_of("llama").model(config)
    config.hybrid_plan = None
    with pytest.raises(hz.HybridizeError, match="hybrid_plan"):
        family_of("llama").model(config)


def test_recut_is_lossless(ids):
    base = make_base("llama")
    model = hz.convert(base, make_plan(base, "window"))
    with torch.no_grad():
        before = model(ids).logits
        torch.manual_seed(0)  # what the groups learn begins at random
        with model.temporary_plan(make_plan(base, "mixed")):
            mixed = model(ids).logits
        assert torch.equal(model(ids).logits, before)
        torch.manual_seed(0)
        assert torch.equal(mixed, hz.convert(base, make_plan(base, "mixed"))(ids).logits)


def test_memory_estimate():
    base = make_base("llama")
    plan = make_plan(base, "window")
    estimate = memory_estimate(base.config, plan, 100, 2, "float32")
    assert estimate["weights"] == 4 * sum(p.numel() for p in base.parameters())
    assert estimate["cache"] == plan.cache_bytes(100, 2, "float32") < estimate["base_cache"]
