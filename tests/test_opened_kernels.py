"""The Triton kernels of open queries against the reference, in Triton's interpreter."""

import pytest
import torch

import hybridize as hz
from conftest import make_base, make_hybrid
from hybridize.operators.gated import open_attention as reference
from hybridize.operators.gated import open_first

pytest.importorskip("triton")
from hybridize.kernels.opened import open_attention

pytestmark = pytest.mark.usefixtures("poison")
CASES = {  # b, g, r, t, offset, d, share of open tokens, ragged
    "one head": (1, 1, 1, 33, 0, 16, 0.5, False),
    "groups": (2, 2, 3, 70, 0, 16, 0.3, False),
    "behind earlier tokens": (1, 2, 2, 50, 77, 24, 0.4, False),
    "all open": (2, 1, 4, 90, 5, 16, 1.0, False),
    "none open": (2, 2, 2, 40, 0, 16, 0.0, False),
    "a shorter row": (3, 1, 7, 130, 0, 16, 0.6, True),
    "one token": (2, 2, 2, 1, 40, 16, 1.0, False),
}


@pytest.mark.parametrize("case", CASES)
def test_open_kernel_is_the_reference(case):
    b, g, r, t, offset, d, share, ragged = CASES[case]
    torch.manual_seed(0)
    is_open = torch.rand(b, t) < share
    if ragged:
        is_open[1] &= torch.arange(t) < t // 3
    index, counts = open_first(is_open, least=1), is_open.sum(1)
    n = index.shape[1]
    at, real = offset + index, (torch.arange(n) < counts[:, None])[:, None, :, None]
    q = torch.randn(b, n, g * r, d).transpose(1, 2).requires_grad_()  # as projections lie
    k, v = (torch.randn(b, g, offset + t, d, requires_grad=True) for _ in "kv")
    mine, theirs = open_attention(q, k, v, at, counts, 0.3), reference(q, k, v, at, counts, 0.3) * real
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert mine.transpose(1, 2).is_contiguous()
    weight = torch.randn_like(mine)
    given = torch.where(real, weight, float("nan"))  # what comes in for queries that are none is not looked at
    mine = torch.autograd.grad(mine, (q, k, v), given)
    theirs = torch.autograd.grad(theirs, (q, k, v), weight)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_refusals():
    at = torch.tensor([[0, 1]])
    for head_dim, scale, field in ((12, 1.0, "head_dim"), (16, 0.0, "scale")):
        x = torch.zeros(1, 1, 2, head_dim)
        with pytest.raises(hz.HybridizeError, match=field):
            open_attention(x, x, x, at, torch.tensor([2]), scale)


@pytest.mark.parametrize("static", [False, True])
def test_models_run_on_the_kernels(ids, static, monkeypatch):
    """A prompt, a padded one, and decoded tokens of which some are closed."""
    model = make_hybrid(make_base("llama"), "gated")
    mask = torch.ones_like(ids)
    mask[1, :9] = 0

    def run():
        with torch.no_grad():
            cache = model.new_cache(max_tokens=48 if static else None)
            outs = [model(ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache).logits]
            for n in range(30, 40):
                outs.append(model(ids[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=cache).logits)
        return torch.cat(outs, dim=1)[mask.bool()]

    expected = run()
    monkeypatch.setenv("HYBRIDIZE_KERNELS", "triton")
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)


def test_training_on_the_kernels(ids, monkeypatch):
    def gradients():
        model = make_hybrid(make_base("llama"), "gated").train()
        model.set_plan(hz.AttentionPlan.from_layers(model.plan.geometry, [], hz.Gated(window=5, tau=0.5, leak=0.0)))
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = gradients()
    monkeypatch.setenv("HYBRIDIZE_KERNELS", "triton")
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)
