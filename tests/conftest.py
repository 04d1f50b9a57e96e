"""Tiny random models of every family, a byte tokenizer, and the record of the invariant matrix."""

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

if "HYBRIDIZE_TEST_DEVICE" not in os.environ:  # before Triton is imported: kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hybridize as hz
from hybridize.attention import FAR
from hybridize.operators.indexed import Index

torch.set_num_threads(1)
if device := os.environ.get("HYBRIDIZE_TEST_DEVICE"):  # "cuda": the invariant matrix on a GPU
    torch.set_default_device(device)
VOCAB = 300
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
# hidden_size != heads * head_dim everywhere (but in Qwen2, which has none), biases in Llama and Qwen2, norms in Qwen3
BASES = {
    "llama": (LlamaConfig, LlamaForCausalLM, dict(head_dim=16, attention_bias=True, tie_word_embeddings=True)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict()),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=16)),
    "mistral": (MistralConfig, MistralForCausalLM, dict(head_dim=16, sliding_window=None)),
}
OPERATORS = {
    "full": hz.Full(),
    "window": hz.Window(5, 2),
    "window_no_sinks": hz.Window(6, 0),
    "window_rebased": hz.Window(5, 2, sink_positions="rebased"),
    "window_full_decode": hz.Window(5, 2, decode="full"),
    "snapkv": hz.SnapKV(9, observe=3, pool=3),
    "linear": hz.Linear(dim=4, window=5, sinks=2),
    "linear_alone": hz.Linear("hedgehog", degree=1, dim=5, rule="sum", decay="token", rope=True, window=0, sinks=0),
    "linear_channel": hz.Linear(
        degree=1, dim=6, rule="sum", decay="channel", mixing=3, window=5, sinks=2, sink_positions="absolute"
    ),
    "linear_half": hz.Linear(degree=4, dim=3, rule="sum", decay="head", window=6, sinks=1, mix="half"),
    "linear_joint": hz.Linear(dim=4, rule="sum", rope=True, window=6, sinks=0, mix="joint"),
    "indexed": hz.Indexed(dim=4, block=4, window=5, sinks=2, retrieves=(True, False)),
    "indexed_dense_prefill": hz.Indexed(dim=4, top_p=0.8, block=1, window=5, sinks=2, dense_prefill=True),
    "gated": hz.Gated(window=5, tau=0.5, leak=0.0),
    "gated_shared": hz.Gated(window=6, gate="random", rate=0.4, share_projections=True),
    "indexed_exact": hz.Indexed("exact", block=1, max_tokens=12, dense_below=8, window=5, sinks=1),
}


def make_base(family, **more):
    config_class, model_class, extra = BASES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHAPE, **extra, **more}))
    with torch.no_grad():  # biases and norms start at trivial values, which would hide a mistake in them
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "lm_head" not in name and "embed" not in name:
                parameter.mul_(4)  # attention far from uniform
    return model.eval()


def make_plan(model, operator):
    """`operator` everywhere, or "mixed": every operator somewhere, groups of a layer interleaved."""
    geometry = hz.geometry_of(model.config)
    if operator != "mixed":
        if operator == "full":
            return hz.AttentionPlan.base(geometry)
        return hz.AttentionPlan.from_layers(geometry, [], OPERATORS[operator])
    rows = [
        ("window", "full", "window"),
        ("indexed", "window_rebased", "indexed"),
        ("window_full_decode", "linear", "snapkv"),
    ]
    return hz.AttentionPlan(geometry, OPERATORS, rows)


def make_hybrid(base, operator):
    """A hybrid whose learned parameters beside the base's, if it has any, are far from where they start."""
    torch.manual_seed(1)
    model = hz.convert(base, make_plan(base, operator))
    with torch.no_grad():
        for branches in model.branches():
            for group, branch in branches.items():
                for parameter in branch.parameters():
                    # a gated layer's copies are as the base's weights are, about 0.1: what is far from those is far already
                    spread = 0.05 if group == FAR and parameter.dim() == 2 else 0.5
                    parameter.add_(torch.randn_like(parameter, dtype=torch.float32) * spread)
    return model.eval()


def index_parameters(model):
    """Names of what only distillation trains: what an index chooses has no gradient of the model's loss."""
    indexes = [name for name, module in model.named_modules() if isinstance(module, Index)]
    return {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in indexes}


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


def make_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@pytest.fixture
def ids():
    drawn = torch.randint(3, VOCAB, (2, 40), generator=torch.Generator("cpu").manual_seed(7), device="cpu")
    return drawn.to(torch.get_default_device())


# -- results/matrix.json ------------------------------------------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption("--matrix-json", default=None, help="write the invariant matrix (operator x family x use) here")


@pytest.fixture
def poison(monkeypatch):
    """Memory that is not written shows as NaN."""
    real = torch.empty, torch.empty_like

    def fill(x):
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(real[0](*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(real[1](*a, **k)))


def pytest_configure(config):
    config.matrix_rows = []
    if config.getoption("--matrix-json") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(MatrixRecord(config), "matrix-record")


class MatrixRecord:
    def __init__(self, config):
        self.path, self.rows = config.getoption("--matrix-json"), []

    def pytest_runtest_logreport(self, report):
        if "test_matrix.py" not in report.nodeid or not (report.when == "call" or report.skipped or report.failed):
            return
        name, _, parameters = report.nodeid.split("::")[-1].partition("[")
        family, operator = parameters.rstrip("]").split("-", 1)
        self.rows.append(dict(use=name.removeprefix("test_"), family=family, operator=operator, outcome=report.outcome))

    def pytest_sessionfinish(self):
        rows = sorted(self.rows, key=lambda row: tuple(row.values()))
        counts = {outcome: sum(r["outcome"] == outcome for r in rows) for outcome in ("passed", "failed", "skipped")}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        head = {"name": "matrix", "command": "make test", "versions": versions, "counts": counts}
        lines = ",\n".join(json.dumps(row) for row in rows)
        Path(self.path).write_text(json.dumps(head)[:-1] + ', "rows": [\n' + lines + "\n]}\n")
