"""Folders: atomic, complete, loadable without hybridize, exported exactly; and what a kill or a full disk leaves."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import hybridize as hz
from conftest import BASES, make_base, make_plan, make_tokenizer
from hybridize import checkpoint, files
from hybridize.loading import load

CLOSE = dict(rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "llama"
    make_base("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "LICENSE").write_text("the base's licence")
    return folder


def converted(base_folder, folder, operator="mixed", **options):
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    model = hz.convert(base, make_plan(base, operator)).eval()
    checkpoint.save(model, AutoTokenizer.from_pretrained(base_folder), folder, base=str(base_folder), **options)
    return model


def test_folder_is_complete(base_folder, tmp_path, ids):
    scores = hz.Scores("layer", [[1.0, 2.0, 3.0]])
    model = converted(base_folder, tmp_path / "out", scores=scores)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "plan.json", "scores.json", "tokenizer.json", "LICENSE"} <= names
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "hybridize_llama"
    loaded = load(str(tmp_path / "out"))
    assert loaded.is_hybrid
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, model(ids).logits)


def test_sharded_and_dtypes(base_folder, tmp_path, ids):
    model = converted(base_folder, tmp_path / "out", max_shard_size="40KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    with torch.no_grad():
        assert torch.equal(load(str(tmp_path / "out")).model(ids).logits, model(ids).logits)
    assert load(str(tmp_path / "out"), dtype="bfloat16").model.dtype == torch.bfloat16
    assert load(str(tmp_path / "out"), device_map="cpu").model.device.type == "cpu"
    with pytest.raises(hz.HybridizeError, match="dtype"):
        load(str(tmp_path / "out"), dtype="int3")


def test_auto_model_gives_the_body(base_folder, tmp_path, ids):
    model = converted(base_folder, tmp_path / "out")
    body = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert type(body) is type(model.model)
    with torch.no_grad():
        assert torch.equal(body(ids).last_hidden_state, model.model(ids).last_hidden_state)


class Lora(torch.nn.Module):
    """The names and shapes that peft gives a wrapped projection."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        out, into = base_layer.weight.shape
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(into, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, out, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_are_stored_in_the_base_layout(ids):
    """An adapter trained on a hybrid means the same on another plan of the base, through its state dict."""

    def adapted(operator):
        base = make_base("llama")
        model = hz.convert(base, make_plan(base, operator)).eval()
        for attention in model.attentions():
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(attention, name, Lora(getattr(attention, name)))
        return model

    torch.manual_seed(5)
    mixed, plain = adapted("mixed"), adapted("full")
    plain.load_state_dict({name: tensor for name, tensor in mixed.state_dict().items() if ".branches." not in name})
    with torch.no_grad():
        expected = plain(ids).logits
        with pytest.raises(hz.HybridizeError, match="adapters"):
            plain.set_plan(mixed.plan)
        assert torch.equal(plain(ids).logits, expected)
        mixed.set_plan(hz.AttentionPlan.base(mixed.plan.geometry))
        torch.testing.assert_close(mixed(ids).logits, expected, **CLOSE)
        again = adapted("mixed")
        again.load_state_dict({**again.state_dict(), **plain.state_dict()})
        again.set_plan(hz.AttentionPlan.base(mixed.plan.geometry))
        torch.testing.assert_close(again(ids).logits, expected, **CLOSE)


def test_split_and_offloaded(base_folder, tmp_path, ids):
    """Weights under accelerate's hooks are reordered in place; those that are shared or not in memory are refused."""
    pytest.importorskip("accelerate")
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    def hook(model):
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                add_hook_to_module(getattr(layer.self_attn, name), AlignDevicesHook("cpu", io_same_device=True))
        return model

    expected = converted(base_folder, tmp_path / "out")
    model = hook(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    plan = model.plan
    with torch.no_grad(), model.holding_branches():
        model.set_plan(hz.AttentionPlan.base(plan.geometry))
        assert not torch.equal(model(ids).logits, expected(ids).logits)
        model.set_plan(plan)
        assert torch.equal(model(ids).logits, expected(ids).logits)
    offloaded = AutoModelForCausalLM.from_pretrained(base_folder)
    hybrid = hz.convert(offloaded, make_plan(offloaded, "window"))
    hybrid.model.layers[1].self_attn.q_proj.to("meta")  # as disk offload leaves it
    with pytest.raises(hz.HybridizeError, match="device_map"):
        hybrid.set_plan(plan)
    base = hook(AutoModelForCausalLM.from_pretrained(base_folder))
    hz.convert(base, make_plan(base, "window"))
    with pytest.raises(hz.HybridizeError, match="device_map"):
        hz.convert(base, make_plan(base, "mixed"))


def test_stock_loader_refuses(base_folder, tmp_path):
    """A loader that does not know the plan must not run full attention silently."""
    converted(base_folder, tmp_path / "out", remote_code=False)
    code = f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "hybridize_llama" in done.stderr


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_remote_code_without_hybridize(tmp_path, ids, family):
    """In a venv that cannot import hybridize, the folder loads with trust_remote_code and gives the same logits."""
    base = make_base(family)
    model = hz.convert(base, make_plan(base, "mixed")).eval()
    checkpoint.save(model, None, tmp_path / "out")
    with torch.no_grad():
        expected = model(ids, prompt_len=torch.tensor([30, 30])).logits
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, eos_token_id=None)
    torch.save({"ids": ids, "expected": expected, "tokens": tokens}, tmp_path / "expected.pt")
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # the libraries by path: .pth files in there, which would bring an editable hybridize, are not followed
    (site / "libraries.pth").write_text("\n".join({sysconfig.get_path("purelib"), *_outer_libraries()}))
    script = f"""
import importlib.util, sys
sys.path = [p for p in sys.path if not p.endswith("/src")]
assert importlib.util.find_spec("hybridize") is None, "hybridize can be imported here"
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "out")!r}, trust_remote_code=True).eval()
kept = torch.load({str(tmp_path / "expected.pt")!r})
ids = kept["ids"]
with torch.no_grad():
    assert torch.equal(model(ids, prompt_len=torch.tensor([30, 30])).logits, kept["expected"])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, eos_token_id=None)
assert torch.equal(out, kept["tokens"])
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "python"), "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    if "hybridize can be imported here" in done.stderr:
        pytest.fail("install hybridize with -e: a copy in site-packages cannot be hidden")
    assert done.returncode == 0, done.stderr[-2000:]


def _outer_libraries():
    return [p for p in sys.path if p.endswith("site-packages")]


def test_remote_modules_are_all_that_is_needed():
    """Flattened files import only each other, and every module they name is in the folder."""
    package = Path(hz.__file__).parent
    for module in checkpoint.REMOTE_MODULES:
        text = checkpoint.flatten_imports((package / f"{module.replace('.', '/')}.py").read_text())
        assert not re.findall(r"^\s*(?:from|import) hybridize", text, flags=re.M)
        for name in checkpoint.REMOTE_MODULES:
            text = text.replace(f"from .hybridize_{name.replace('.', '_')} import", "")
        assert "from .hybridize" not in text, module


@pytest.mark.parametrize("family", BASES)
def test_export_base_is_exact(tmp_path, family):
    base = make_base(family)
    model = hz.convert(base, make_plan(base, "mixed"))
    checkpoint.export(model, None, tmp_path / "base", "base")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert type(again) is type(base)
    for name, tensor in base.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert hz.geometry_of(AutoConfig.from_pretrained(tmp_path / "base")) == hz.geometry_of(base.config)


@pytest.mark.parametrize("family", BASES)
def test_export_stock_layer_types(tmp_path, ids, family):
    """A sink-free plan of whole layers runs in a stock class, with the same logits."""
    base = make_base(family, **(dict(attention_bias=False) if family == "llama" else {}))
    plan = hz.AttentionPlan.from_layers(hz.geometry_of(base.config), [1], hz.Window(6, 0))
    model = hz.convert(base, plan).eval()
    checkpoint.export(model, None, tmp_path / "stock", "stock")
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config["sliding_window"] == 6
    assert config["model_type"] == (family if family.startswith("qwen") else "ministral")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock").eval()
    assert type(stock).__module__.startswith("transformers.")
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, model(ids).logits, **CLOSE)


@pytest.mark.parametrize(("operator", "field"), [("mixed", "several operators"), ("window", "sinks")])
def test_export_stock_refuses(operator, field):
    base = make_base("qwen3")
    with pytest.raises(hz.HybridizeError, match=field):
        checkpoint.to_stock(hz.convert(base, make_plan(base, operator)))
    biased = make_base("llama")
    plan = hz.AttentionPlan.from_layers(hz.geometry_of(biased.config), [1], hz.Window(6, 0))
    with pytest.raises(hz.HybridizeError, match="attention_bias"):
        checkpoint.to_stock(hz.convert(biased, plan))


# -- the writer ---------------------------------------------------------------------------------------------------


def test_corrupted_weights(base_folder, tmp_path):
    converted(base_folder, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    for broken in (weights.read_bytes()[:-100], b"nothing", weights.read_bytes()[:5]):
        weights.write_bytes(broken)
        with pytest.raises(hz.HybridizeError, match="model:"):
            load(str(tmp_path / "out"))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_full_disk_leaves_the_old_folder(base_folder, tmp_path, monkeypatch, family):
    model = converted(base_folder, tmp_path / "out")
    before = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}
    with pytest.raises(hz.HybridizeError, match="--overwrite"):
        checkpoint.save(model, None, tmp_path / "out")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(hz.HybridizeError, match="No space left"):
            checkpoint.save(model, None, tmp_path / "out", overwrite=True)
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_full_disk_under_the_weights(base_folder, tmp_path):
    """A file-size limit stands for a full disk inside safetensors itself."""
    code = f"""
import resource, signal, sys
import hybridize as hz
from hybridize import checkpoint
from hybridize.loading import load
model = load({str(base_folder)!r}).model
hybrid = hz.convert(model, hz.AttentionPlan.base(hz.geometry_of(model.config)))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    checkpoint.save(hybrid, None, {str(tmp_path / "out")!r})
except hz.HybridizeError as error:
    print("clear:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "clear: could not write" in done.stdout, done.stderr[-1500:]
    assert list(tmp_path.iterdir()) == []


def test_exchange_and_its_fallback(tmp_path, monkeypatch):
    for exchange in (files.exchange_names, lambda *_: False):
        monkeypatch.setattr(files, "exchange_names", exchange)
        for name in ("new", "final"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_text(name)
        files.replace_folder(tmp_path / "new", tmp_path / "final")
        assert (tmp_path / "final" / "file").read_text() == "new"
        assert [p.name for p in tmp_path.iterdir()] == ["final"]
        (tmp_path / "final").rename(tmp_path / f"final{files.OLD}")  # killed between the two renames
        files.recover_folder(tmp_path / "final")
        assert (tmp_path / "final" / "file").read_text() == "new"
        (tmp_path / "final" / "file").unlink()
        (tmp_path / "final").rmdir()


@pytest.mark.timeout(600)
def test_kill_at_every_write(base_folder, tmp_path):
    script = Path(__file__).with_name("kill_harness.py")
    done = subprocess.run([sys.executable, str(script), str(base_folder), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    assert int(done.stdout.split()[0]) > 40


@pytest.mark.timeout(600)
def test_kill_in_training(base_folder, tmp_path):
    """The same for a run that trains, at some of its writes: scores, checkpoints, what was trained, the model."""
    script = Path(__file__).with_name("kill_harness.py")
    command = [sys.executable, str(script), str(base_folder), str(tmp_path), "igal", "17"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 80
