"""Our multiple-choice counts against lm-evaluation-harness's own model on the same items, in one run.

    python scripts/lm_eval_agreement.py ARC_EASY.jsonl PIQA.jsonl --limit 100 --out results/lm_eval_agreement.json

Files have rows of query, choices, gold. The base runs in lm_eval's `hf`, in our adapter and in `hybridize eval --choice`.
"""

import argparse
import tempfile
from pathlib import Path

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hybridize.data.choice import load_items
from hybridize.evaluation.choice import choice_results
from hybridize.evaluation.harness import HybridLM
from hybridize.loading import load
from hybridize.results import results, write_results

TASK = """
task: local_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_target: gold
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def counts(loaded, file, manager, limit):
    """Right items by lm_eval's own model, by our adapter in lm_eval, and by ourselves."""
    name, found = f"local_{Path(file).stem}", {}
    models = {
        "lm_eval hf": HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4),
        "lm_eval hf, softmax in fp32": HFLM(
            pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4, softmax_dtype="float32"
        ),
        "adapter": HybridLM(loaded),
    }
    if loaded.model.dtype == torch.float32:
        del models["lm_eval hf, softmax in fp32"]
    for who, model in models.items():
        out = lm_eval.simple_evaluate(model=model, tasks=[name], task_manager=manager, limit=limit, bootstrap_iters=0)
        found[who] = {m: round(out["results"][name][f"{m},none"] * limit) for m in ("acc", "acc_norm")}
    ours = choice_results(loaded.model, loaded.tokenizer, load_items(file)[:limit])
    return found | {"hybridize eval": {m: sum(r[m] for r in ours) for m in ("acc", "acc_norm")}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--out", default="results/lm_eval_agreement.json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else None
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for file in args.files:
            name = Path(file).stem
            (Path(folder) / f"{name}.yaml").write_text(TASK.format(name=name, file=Path(file).resolve()))
        manager = TaskManager(include_path=folder, include_defaults=False)
        for dtype in args.dtype:
            loaded = load(args.model, dtype=dtype, device_map=device)
            for file in args.files:
                for who, hits in counts(loaded, file, manager, args.limit).items():
                    head = dict(task=Path(file).stem, dtype=dtype, by=who, n=args.limit)
                    rows += [head | dict(metric=metric, hits=n) for metric, n in hits.items()]
                    print(rows[-2:], flush=True)
    write_results(args.out, results("lm_eval_agreement", rows, model=args.model))


if __name__ == "__main__":
    main()
