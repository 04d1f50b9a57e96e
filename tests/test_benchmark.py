"""Timing in turns, ceilings, and `hybridize bench` on a CPU."""

import json

import pytest
import torch

import hybridize as hz
from hybridize.benchmark import timing
from hybridize.benchmark.decode import rewind, static_cache
from hybridize.benchmark.indexed import Hybrid, Layer, Planted, pays_from
from hybridize.benchmark.run import Bench
from hybridize.benchmark.shapes import SHAPES, random_models
from hybridize.benchmark.timing import Ceilings, interleaved, measured_ceilings
from hybridize.operators.specs import Indexed
from test_cli import run

CPU = torch.device("cpu")


def test_jobs_take_turns(monkeypatch):
    order, clock = [], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def job(name, seconds):
        def run_once(number):
            order.append((name, number))
            clock[0] += seconds * (1 + number % 2)

        return run_once

    prepared = []
    jobs = {"a": job("a", 1.0), "b": job("b", 3.0)}
    times = interleaved(jobs, CPU, seconds=0.0, least=4, prepare=prepared.append)
    assert order[:4] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]  # warm-up, not counted
    assert order[4:] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2), ("b", 3), ("a", 3)]
    assert prepared == [name for name, _ in order]
    assert (times["a"].median, times["b"].median, times["a"].rounds) == (1.5, 4.5, 4)
    assert times["a"].low == 1.0 and times["a"].high == 2.0 and times["a"].spread == pytest.approx(2 / 3)


def test_ceilings():
    found = measured_ceilings(CPU, torch.float32)
    assert found.copy > 1e8 and found.matmul > 1e8
    assert Ceilings(10.0, 100.0).floor(50.0, 100.0) == 5.0 and Ceilings(10.0, 100.0).floor(1.0, 100.0) == 1.0


def test_known_shapes_have_their_sizes():
    count = {name: shape.step_parameters for name, shape in SHAPES.items()}
    assert count["llama-3.1-8b"] == pytest.approx(7.5e9, rel=0.01)  # 8.03 B less the input embedding
    assert count["qwen3-1.7b"] == pytest.approx(1.72e9, rel=0.01)
    shape = SHAPES["tiny"]
    stock, model = random_models(shape, 64, CPU, torch.float32)
    norms = (2 * shape.layers + 1) * shape.hidden
    assert sum(p.numel() for p in model.parameters()) == shape.step_parameters + shape.hidden * shape.vocabulary + norms
    again = random_models(shape, 64, CPU, torch.float32)[1]
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
        assert torch.equal(model(ids).logits, stock(ids).logits)  # one set of weights
        model.set_plan(hz.AttentionPlan.from_layers(model.plan.geometry, [0], hz.Window(4, 1)))
        assert torch.equal(again(ids).logits, stock(ids).logits)


def test_a_filled_cache_is_as_long_as_it_says():
    model = random_models(SHAPES["tiny"], 200, CPU, torch.float32)[1]
    plan = hz.AttentionPlan.from_layers(model.plan.geometry, [0], hz.Window(16, 2))
    model.set_plan(plan)
    cache = static_cache(model, 108, 3)
    rewind(cache, torch.tensor([100, 20, 7]))
    assert cache.lengths.tolist() == [100, 20, 7] and int(cache.get_seq_length()) == 100
    assert cache.bytes() == plan.cache_bytes(108, 3, "float32", prompt=109)


@pytest.mark.timeout(120)
def test_bench(capsys, tmp_path):
    words = ["bench", "--out", tmp_path / "out", "--contexts", "96", "--batches", "1,2", "--window", 16, "--seconds", 0.01]
    code, out, err = run(capsys, *words, "--dtype", "float32", "--backward", "--json")
    assert code == 0, err
    made = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert made["name"] == "speed_tiny" and "torch reference" in made["facts"]["window attention"]
    rows = made["rows"]
    whats = {"kernel_forward", "kernel_backward", "kernel_decode", "prefill", "decode", "train", "decode_ragged"}
    assert {r["what"] for r in rows} == whats
    for row in rows:
        assert row["ratio"] == pytest.approx(row["baseline_value"] / row["value"])
        assert row["value"] > 0 and row["rounds"] >= 2 and row["of_limit"] > 0
    decode = [r for r in rows if r["what"] == "decode"]
    assert {(r["variant"], r["batch"]) for r in decode} == {
        (v, b) for v in ("base", "1 of 4 layers full", "stock transformers") for b in (1, 2)
    }
    base, hybrid = (next(r for r in decode if r["variant"] == v) for v in ("base", "1 of 4 layers full"))
    assert hybrid["cache_bytes"] < base["cache_bytes"]
    assert json.loads(out)["rows"] == rows


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--shape", "gpt"], "shape"),
        (["--parts", "attention,training"], "parts"),
        (["--parts", "batch", "--device", "cpu"], "parts"),
        (["--device", "cuda"], "device"),
        (["--contexts", "0"], "contexts"),
        (["--dtype", "int8"], "dtype"),
        (["--window", 0], "window.size"),
    ],
)
def test_bad_benches(capsys, tmp_path, words, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run(capsys, "bench", "--out", tmp_path / "out", *words)
    assert code == 2 and expected in err and not list(tmp_path.iterdir())


def test_parts_may_have_their_own_contexts():
    ask = Bench(parts=("attention:512", "decode", "prefill:1024+4096"), contexts=(256,))
    assert ask.named_parts == {"attention": (512,), "decode": (256,), "prefill": (1024, 4096)}
    assert ask.longest_first[0] == 4096
    for wrong in ("prefill:", "prefill:4k", "prefill:4+-1", "prefill:0"):
        with pytest.raises(hz.HybridizeError, match=r"parts|contexts"):
            Bench(parts=(wrong,))


def test_settings_are_checked():
    with pytest.raises(hz.HybridizeError, match="batches"):
        Bench(batches=(0,))


def test_layers_between_linear_ones():
    geometry = hz.Geometry("llama", 32, 32, 8, 128, 4096)
    name, plan = Bench(method="flashmorph", window=64).hybrid(geometry)
    assert name == "8 of 32 layers full, linear" and len(plan.kept_layers) == 8
    assert {spec.kind for spec in plan.specs()} == {"full", "linear"}
    assert next(s for s in plan.specs() if s.kind == "linear") == hz.Linear(degree=1, dim=64, decay="token")
    for wrong in ({"method": "dense"}, {"method": "nll", "linear": "default"}, {"method": "l2a", "linear": "default"}):
        with pytest.raises(hz.HybridizeError, match=r"^method: got"):
            Bench(**wrong)


def test_linear_plans_move_no_weights():
    """A captured graph of one plan stays right under the other; every count of groups is spread over layers."""
    geometry = hz.Geometry("llama", 32, 32, 8, 128, 4096)
    for budget, count in ((0.0625, 16), (0.125, 32), (0.25, 64), (0.17, 44)):
        name, plan = Bench(budget=budget, linear="degree=2,dim=16", window=64).hybrid(geometry)
        assert name == f"{count} of 256 groups linear" and len(plan.far_groups) == count
        assert all(plan.group_order(layer) == tuple(range(8)) for layer in range(32))
        assert plan.specs()[0].rebased_distance == 68 and plan.operators["linear"].width == 136
    with pytest.raises(hz.HybridizeError, match=r"linear\.degree: got"):
        Bench(linear="degree=5")


def test_bench_of_linear_groups(capsys, tmp_path):
    words = ["bench", "--out", tmp_path / "b", "--linear", "default", "--window", 64, "--budget", 0.25, "--contexts", 256]
    words += ["--parts", "prefill,decode", "--seconds", 0, "--dtype", "float32", "--json"]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert {row["variant"] for row in rows} == {"base", "2 of 8 groups linear", "stock transformers"}
    assert {row["what"] for row in rows} == {"prefill", "decode"}


def test_open_tokens(capsys, tmp_path):
    ask = Bench(method="l2a", budget=0.2, window=16, sinks=0)
    name, plan = ask.hybrid(hz.geometry_of(SHAPES["tiny"].config(64)))
    assert name == "20% of tokens open" and plan.gate(3) == hz.Gated(16, "position", rate=0.2)
    given = ["bench", "--method", "l2a", "--budget", 0.2, "--window", 16, "--sinks", 0, "--seconds", 0, "--dtype", "float32"]
    parts = ["--parts", "attention,prefill,decode,train", "--contexts", 100, "--backward", "--json"]
    code, out, err = run(capsys, *given, *parts, "--out", tmp_path / "bench")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert {row["what"] for row in rows if row["variant"] == "window + 20% open"} == {"kernel_forward", "kernel_backward"}
    assert {row["what"] for row in rows if row["variant"] == name} == {"prefill", "decode", "train"}


def test_one_layer_of_indexed_attention(capsys, tmp_path):
    given = ["bench", "--parts", "indexed:300+600", "--budget", 0.25, "--window", 32, "--seconds", 0, "--dtype", "float32"]
    code, out, err = run(capsys, *given, "--out", tmp_path / "bench", "--json")
    assert code == 0, err
    found = json.loads(out)
    rows = found["rows"]
    assert {row["what"] for row in rows} == {"layer_forward", "layer_decode"}
    assert {row["context"] for row in rows} == {300, 600}
    for row in rows:
        if row["variant"].startswith("indexed"):  # blocks of 64: one of the theme, the first, the query's own
            assert 0 < row["chosen"] <= 3 * 64 / row["context"]
            assert row["baseline"] in ("full sdpa", "heads dense") and row["ratio"] > 0
    assert set(found["facts"]["choosing pays from, tokens"].values()) <= {None, 300, 600}


def test_planted_themes_are_what_is_chosen():
    shape = SHAPES["smollm2-135m"]
    layer = Layer.of(shape, 0.35)
    assert (layer.heads, layer.groups) == (3, 2)  # 1 - (1 - 0.35)^3 of 3 groups
    inputs = Planted(layer, 700, CPU, torch.float32)
    spec = Indexed(block=16, sinks=4, window=64)
    assert [sum(member.retrieves) for member in layer.members(spec)] == [2, 1]
    hybrid = Hybrid(inputs, spec, inputs.queries(64), inputs.keys(0.2, 16))
    heads = hybrid.spans(slice(0, 700))[0]
    which = hybrid.retrieving.retrieving(heads)
    seen = hybrid.retrieving.sees(heads, which, heads.k, hybrid.retrieving.index_keys(heads), slice(650, 700))
    theme = hybrid.raw[0][0, which, 650:].argmax(-1)  # [H', T]
    members = hybrid.raw[1][0, which // 3, :, :16]  # [H', S, themes]
    n, j = torch.arange(650, 700)[:, None], torch.arange(700)
    wanted = torch.stack([members[h].T[theme[h]] > 0 for h in range(3)]) | (j < 16) | (j >= n // 16 * 16)
    assert torch.equal(seen[0], wanted & (j <= n))
    prompt, token = hybrid.prefill(hybrid.spans(slice(0, 700))), hybrid.decode()()
    assert len(prompt) == len(token) == 2
    for whole, last in zip(prompt, token, strict=True):
        torch.testing.assert_close(last[:, :, 0], whole[:, :, -1])


def test_choosing_pays_from_where_it_never_lost_again():
    def row(context, ratio, variant="indexed 2%", baseline="heads dense"):
        return {"what": "layer_forward", "variant": variant, "context": context, "ratio": ratio, "baseline": baseline}

    rows = [row(1024, 1.5), row(2048, 0.9), row(4096, 1.1), row(8192, 2.0), row(8192, 0.1, baseline="full sdpa")]
    rows += [row(1024, 2.0, "indexed 5%"), row(8192, 0.7, "indexed 5%")]
    assert pays_from(rows) == {"layer_forward, indexed 2%": 4096, "layer_forward, indexed 5%": None}
