"""lm-evaluation-harness on a local task: our adapter against its own hf model, item by item; plans and batches kept."""

import json

import pytest
import torch

import hybridize as hz
from conftest import make_base, make_plan, make_tokenizer

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from hybridize.data.choice import load_items  # noqa: E402
from hybridize.evaluation.choice import choice_results  # noqa: E402
from hybridize.evaluation.harness import HybridLM  # noqa: E402

TASK = """
task: local_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{query}}}}"
doc_to_target: {target}
{more}
metric_list: [{metrics}]
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = "red green blue yellow white black brown orange".split()
    rows = [
        {
            "query": f"Item {i}: the colour is",
            "choices": [words[(i + j * j) % 8] + "!" * (j % 3) for j in range(4)],
            "gold": i % 4,
        }
        for i in range(20)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    acc = "{metric: acc}, {metric: acc_norm}"
    kinds = {
        "choice": ("multiple_choice", "gold", 'doc_to_choice: "{{choices}}"', acc),
        "rolling": ("loglikelihood_rolling", '"{{query}}"', "", "{metric: word_perplexity}"),
        "text": (
            "generate_until", '"x"', "generation_kwargs: {until: ['e'], max_gen_toks: 6, do_sample: false}",
            "{metric: exact_match}",
        ),
    }  # fmt: skip
    for name, (kind, target, more, metrics) in kinds.items():
        text = TASK.format(name=name, file=file, kind=kind, target=target, more=more, metrics=metrics)
        (tmp_path / f"{name}.yaml").write_text(text)
    return TaskManager(include_path=str(tmp_path), include_defaults=False), file


def evaluate(model, manager, *names):
    tasks = [f"local_{name}" for name in names]
    return lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=10)


def test_adapter_agrees_with_lm_evals_own_model(tasks, tokenizer):
    manager, file = tasks
    base = make_base("llama")
    full = hz.convert(base, hz.AttentionPlan.base(hz.geometry_of(base.config))).eval()
    theirs = evaluate(
        HFLM(pretrained=base, tokenizer=tokenizer, batch_size=4, max_length=64), manager, "choice", "rolling", "text"
    )
    mine = evaluate(HybridLM(full, tokenizer, batch_size=4, max_length=64), manager, "choice", "rolling", "text")
    assert mine["results"]["local_choice"]["acc,none"] == theirs["results"]["local_choice"]["acc,none"]
    assert mine["results"]["local_choice"]["acc_norm,none"] == theirs["results"]["local_choice"]["acc_norm,none"]
    for name in ("choice", "rolling", "text"):
        for a, b in zip(mine["samples"][f"local_{name}"], theirs["samples"][f"local_{name}"], strict=True):
            assert a["doc_id"] == b["doc_id"]
            for x, y in zip(_flat(a["resps"]), _flat(b["resps"]), strict=True):
                assert x == (pytest.approx(y, rel=1e-4) if isinstance(y, float) else y)
    # and the same count by `hybridize eval --choice`
    results = choice_results(full, tokenizer, load_items(file))
    for metric in ("acc", "acc_norm"):
        assert sum(r[metric] for r in results) / 20 == theirs["results"]["local_choice"][f"{metric},none"]


def _flat(value):
    return [x for item in value for x in _flat(item)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("operator", ["mixed", "window_full_decode"])
def test_a_converted_folder_runs_by_name(tasks, tmp_path, operator, tokenizer):
    manager, file = tasks
    base = make_base("llama")
    model = hz.convert(base, make_plan(base, operator)).eval()
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    out = lm_eval.simple_evaluate(
        model="hybridize", model_args=f"pretrained={tmp_path / 'model'}", tasks=["local_choice"], task_manager=manager,
        bootstrap_iters=10,
    )  # fmt: skip
    results = choice_results(model, tokenizer, load_items(file))
    assert out["results"]["local_choice"]["acc,none"] == sum(r["acc"] for r in results) / 20


def test_batches_change_nothing(tasks, tokenizer):
    manager, _ = tasks
    base = make_base("mistral")
    model = hz.convert(base, make_plan(base, "mixed")).eval()
    runs = [
        evaluate(HybridLM(model, tokenizer, batch_size=size, batch_tokens=tokens), manager, "choice", "text")["samples"]
        for size, tokens in ((None, 1), (None, 10**6), (3, 10**6))
    ]
    for run in runs[1:]:
        for name in ("local_choice", "local_text"):
            for a, b in zip(run[name], runs[0][name], strict=True):
                for x, y in zip(_flat(a["resps"]), _flat(b["resps"]), strict=True):
                    assert x == (pytest.approx(y, rel=1e-4) if isinstance(y, float) else y)


def test_needs_a_tokenizer():
    with pytest.raises(hz.HybridizeError, match="tokenizer"):
        HybridLM(make_base("llama"))
    assert torch.get_num_threads() >= 1
