"""From what a user typed to what workflows take: options, models, configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hybridize import checkpoint
from hybridize.data.ruler_tasks import TASKS
from hybridize.errors import HybridizeError, bad
from hybridize.families import family_of
from hybridize.files import check_format, read_json
from hybridize.loading import DEFAULT, Loaded, load
from hybridize.plan import AttentionPlan
from hybridize.workflows import Selection, hybrid_of


def selection_of(options: dict[str, Any]) -> Selection:
    """The Selection that the options ask for, checked before anything is loaded."""
    names = (
        "selector", "budget", "window", "sinks", "sink_positions", "decode", "unit", "prompts", "text", "seed",
        "batch_tokens",
    )  # fmt: skip
    ask = Selection(**{name: options[name] for name in names}, lengths=lengths_of(options["length"], "length"))
    _ = ask.cheap, ask.asked_unit  # checked before anything is loaded
    if not 0 <= ask.budget <= 1:
        raise bad("budget", ask.budget, "a share between 0 and 1")
    for name in ("prompts", "batch_tokens"):
        if getattr(ask, name) < 1:
            raise bad(name, getattr(ask, name), "at least 1")
    if ask.prompts < len(ask.lengths):
        raise bad("prompts", ask.prompts, f"at least one for each of {len(ask.lengths)} lengths")
    return ask


PROOF_OPTIONS = {
    "test_prompts": "prompts", "text": "text", "seed": "seed", "batch_tokens": "batch_tokens", "limit": "limit",
    "perplexity_windows": "perplexity_windows", "view": "view", "stride": "stride", "drift": "drift",
}  # fmt: skip


def proof_of(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of Proof that the options ask for; what was not given is left out."""
    asked = {field: options[name] for name, field in PROOF_OPTIONS.items() if options.get(name) is not None}
    for name in ("qa", "choice", "perplexity", "long"):
        if options.get(name):
            asked[name] = tuple(options[name])
    if options.get("beyond"):
        asked["beyond"] = True
    if options.get("lengths") is not None:
        asked["lengths"] = lengths_of(options["lengths"])
    if options.get("kinds") is not None:
        asked["kinds"] = tuple(kind for kind in options["kinds"].split(",") if kind)
    if options.get("ruler") is not None:
        asked["ruler"] = ruler_tasks(options["ruler"])
    if options.get("generate"):
        asked["method"] = "generate"
    return asked


def lengths_of(text: str, field: str = "lengths") -> tuple[int, ...]:
    """Comma-separated lengths."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise bad(field, text, "whole numbers with commas between") from None
    if any(length < 1 for length in lengths):
        raise bad(field, text, "numbers of at least 1")
    return lengths


def load_model(model: str, options: dict[str, Any]) -> Loaded:
    """The model a user names; a linked folder becomes its base under its plan."""
    link = Path(model) / "link.json"
    if link.is_file():
        data = check_format(read_json(link, "link"), "hybridize-link", 1)
        plan = AttentionPlan.load(Path(model) / "plan.json")
        loaded = load_model(checkpoint.check_link(data, plan), options)
        hybrid = hybrid_of(loaded)
        hybrid.set_plan(plan)
        return Loaded(hybrid, loaded.tokenizer, model)
    return load(
        model,
        dtype=options["dtype"],
        device_map=options["device_map"],
        trust_remote_code=options["trust_remote_code"],
        rope=options.get("rope"),
    )


def read_config(model: str, trust_remote_code: bool) -> Any:
    """A model's config without its weights."""
    try:
        if model == DEFAULT or model.endswith(".gguf"):
            return load(model).model.config
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if isinstance(error, HybridizeError):
            raise
        raise HybridizeError(f"model: could not read the config of {model!r}: {error}") from error
    family_of(config.model_type)
    return config


def ruler_tasks(text: str | None) -> tuple[str, ...]:
    """Comma-separated RULER tasks, or "all" of those that need no data set."""
    if not text:
        return ()
    tasks = tuple(TASKS) if text == "all" else tuple(text.split(","))
    if unknown := [task for task in tasks if task not in TASKS]:
        raise bad("ruler", unknown[0], f"'all' or names of {sorted(TASKS)}")
    return tasks
