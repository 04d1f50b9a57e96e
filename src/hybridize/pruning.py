"""`hybridize prune`: layers whose gate leaves nearly every token closed lose their far half, its weights and its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridize.data.needles import needle_prompts
from hybridize.data.text import load_text
from hybridize.errors import bad
from hybridize.evaluation.closing import closed_shares, closing_row
from hybridize.evaluation.suite import Proof
from hybridize.files import check_output_folder
from hybridize.methods.l2a import pruned_plan
from hybridize.options import lengths_of, load_model
from hybridize.report.card import write_card
from hybridize.runs import RunFolder, quiet_libraries
from hybridize.terminal import Terminal
from hybridize.verbs import lift_model, note_resume, save_model, write_run
from hybridize.workflows import counted, hybrid_of, prove


def prune(terminal: Terminal, model: str, out: Path, threshold: float | None, budget: float | None, **options: Any) -> None:
    """Measure, drop, prove against the model as it was, save."""
    if (threshold is None) == (budget is None):
        raise bad("threshold, budget", "both or neither", "exactly one of --threshold and --budget")
    proof = Proof(options["test_prompts"], lengths_of(options["lengths"]))
    length = max(proof.lengths)
    config = {"verb": "prune", "model": model, "threshold": threshold, "budget": budget, "prove": proof.as_config()}
    config |= {"prompts": options["prompts"], "text": options["text"], "seed": options["seed"]}
    with quiet_libraries():
        check_output_folder(out, options["overwrite"])
        loaded = load_model(model, options)
        hybrid = hybrid_of(loaded)
        before = hybrid.plan
        if not any(before.gate(layer) for layer in range(before.geometry.layers)):
            raise bad("model", model, "a folder with gated layers (convert --method l2a)")
        before.check_context(length, "lengths")
        run = RunFolder(out, config, options["overwrite"])
        note_resume(terminal, run)
        seconds: dict[str, float] = {}

        def measure() -> list[float | None]:
            text = "\n\n".join(load_text(options["text"]))
            given: dict[str, Any] = {"length": length, "count": options["prompts"], "kinds": ("number",)}
            prompts = needle_prompts(loaded.tokenizer, text, **given, seed=options["seed"])
            return closed_shares(hybrid, prompts, lambda done, of: terminal.report("measuring", done, of))

        with counted(seconds, "measure"):
            closed = run.step("closed", measure)
        chosen = pruned_plan(before, closed, length, threshold, budget)
        with counted(seconds, "prove"):
            rows = prove(run, loaded, hybrid, {"as it was": before, "pruned": chosen}, proof, terminal.report)
        hybrid.set_plan(chosen)
        with counted(seconds, "save"):
            save_model(run, loaded, hybrid, None, options["max_shard_size"])
    terminal.close()
    write_run(
        run, f"{model}, pruned", chosen, None, rows, seconds, {"model": model}, closing=[closing_row(before, length, closed)]
    )
    write_card(run.path / "README.md", base=model, plan=chosen, rows=rows, trained=True)
    lift_model(run)
    folder = run.finish()
    terminal.quality_table(rows)
    dropped = chosen.provenance["pruned"]
    terminal.say(f"the far half is gone in layers {dropped}\nmodel: {folder}\nreport: {folder / 'report.html'}")
    terminal.result({"out": str(folder), "rows": rows, "closed": closed, "pruned": dropped, "seconds": seconds})
