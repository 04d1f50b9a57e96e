"""Converted folders: what is written, how it loads without hybridize, and exports that stock loaders understand."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybridize.conversion import HYBRID_FIELDS, base_config, to_base, with_weights
from hybridize.errors import HybridizeError, bad
from hybridize.families import HYBRID_TYPES, family_of
from hybridize.files import atomic_folder, write_json, write_text
from hybridize.operators.specs import Full, Window
from hybridize.plan import AttentionPlan
from hybridize.scores import Scores

# every module a converted model needs to run, flattened into its folder for trust_remote_code
REMOTE_MODULES = (
    "errors", "files", "kernels.dispatch", "operators.spec", "operators.exact_specs", "operators.linear_spec",
    "operators.indexed_spec", "operators.gated_spec", "operators.specs", "costs", "plan", "operators.choosing",
    "operators.contract", "operators.dense", "operators.banded", "operators.full", "operators.learned", "operators.snapkv",
    "operators.window", "operators.recurrence", "operators.mixing", "operators.linear", "operators.indexed",
    "operators.gated", "operators.joint", "operators.registry", "cache", "layout", "content", "projections", "far",
    "attention", "generation", "geometry", "modeling", "families",
)  # fmt: skip
LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "NOTICE", "USE_POLICY.md")


def save(
    model: Any,
    tokenizer: Any,
    folder: str | Path,
    *,
    scores: Scores | None = None,
    base: str | None = None,
    remote_code: bool = True,
    overwrite: bool = False,
    max_shard_size: str = "5GB",
) -> Path:
    """Write a converted model: weights in the base's layout, config with the plan, tokenizer, licence, scores.

    Args:
        base: local folder of the base, whose licence files are carried over.
        remote_code: also write the code that trust_remote_code needs, so that no hybridize has to be installed.
        overwrite: replace a folder that is not empty; the old one stays whole until the new one is complete.

    Raises:
        HybridizeError: not a hybrid, a folder that is not empty, or a disk that refused a write.
    """
    if model.config.model_type not in HYBRID_TYPES:
        raise bad("model", model.config.model_type, f"a hybrid, one of {sorted(HYBRID_TYPES)}")
    with atomic_folder(folder, overwrite) as temporary:
        _save_weights(model, temporary, max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        model.plan.save(temporary / "plan.json")
        if scores is not None:
            scores.save(temporary / "scores.json")
        if base is not None:
            copy_licence(base, temporary)
        if remote_code:
            write_remote_code(temporary, model.config)
    return Path(folder)


def _save_weights(model: Any, folder: Path, max_shard_size: str = "5GB") -> None:
    try:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise HybridizeError(f"could not write the weights: {error}; the previous folder, if any, is intact") from error


def copy_licence(base: str, folder: Path) -> list[str]:
    """Carry the base's licence files over; returns their names. A hub id or file has none at hand: the card names it."""
    source = Path(base)
    source = source.parent if source.is_file() else source
    found = [name for name in LICENCES if (source / name).is_file()]
    for name in found:
        (folder / name).write_bytes((source / name).read_bytes())
    return found


def write_remote_code(folder: Path, config: Any) -> None:
    """The needed modules as `hybridize_*.py` beside the weights, and an `auto_map` that names them."""
    for module in REMOTE_MODULES:
        *rooms, name = module.split(".")
        text = resources.files("hybridize").joinpath(*rooms, f"{name}.py").read_text(encoding="utf-8")
        write_text(folder / f"hybridize_{module.replace('.', '_')}.py", flatten_imports(text))
    family = family_of(config.model_type)
    values = config.to_dict()
    values["architectures"] = [family.model.__name__]
    values["auto_map"] = {
        "AutoConfig": f"hybridize_families.{family.config.__name__}",
        "AutoModel": f"hybridize_families.{family.body.__name__}",
        "AutoModelForCausalLM": f"hybridize_families.{family.model.__name__}",
    }
    stored = config.to_diff_dict()
    write_json(folder / "config.json", {**stored, **{k: values[k] for k in ("architectures", "auto_map", "model_type")}})


def flatten_imports(text: str) -> str:
    """`from hybridize.a.b import c` to `from .hybridize_a_b import c`: how remote code finds its neighbours."""
    return re.sub(
        r"^from hybridize\.([\w.]+) import", lambda m: f"from .hybridize_{m[1].replace('.', '_')} import", text, flags=re.M
    )


def save_linked(plan: AttentionPlan, base: str, folder: str | Path, overwrite: bool = False) -> Path:
    """A training-free plan without copied weights: plan.json and the base it belongs to (`hybridize eval` reads it)."""
    with atomic_folder(folder, overwrite) as temporary:
        plan.save(temporary / "plan.json")
        link = {"format": "hybridize-link", "format_version": 1, "base": base, "identity": plan.geometry.identity}
        write_json(temporary / "link.json", link)
    return Path(folder)


# -- exports ------------------------------------------------------------------------------------------------------


def export(model: Any, tokenizer: Any, folder: str | Path, form: str, overwrite: bool = False) -> Path:
    """Write a folder that stock transformers (and what builds on its configs) loads.

    Args:
        form: "base", the base model exactly as it was; or "stock", the plan as the family's own `layer_types`.

    Raises:
        HybridizeError: the plan has no stock form.
    """
    if form not in ("base", "stock"):
        raise bad("form", form, "'base' or 'stock'")
    made = to_base(model) if form == "base" else to_stock(model)
    with atomic_folder(folder, overwrite) as temporary:
        _save_weights(made, temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
    return Path(folder)


def to_stock(model: Any) -> PreTrainedModel:
    """The plan as stock `layer_types`: Qwen in its own class, Llama and Mistral as Ministral (Mistral with layer types).

    Raises:
        HybridizeError: sinks, decode="full", groups that differ inside a layer, or windows of several sizes.
    """
    plan = model.plan
    kinds, sizes = [], set()
    for layer, row in enumerate(plan.assignment):
        specs = {plan.operators[name] for name in row}
        if len(specs) > 1:
            raise bad(f"plan.assignment[{layer}]", "several operators", "one a layer: stock models have no group mix")
        spec = specs.pop()
        if not isinstance(spec, Full | Window):
            raise bad(f"plan.assignment[{layer}]", spec.label(), "full attention or a window: stock models have no other")
        if isinstance(spec, Window):
            if spec.sinks or spec.decode == "full":
                raise bad(f"plan.assignment[{layer}]", spec.label(), "a window without sinks: stock models drop them")
            sizes.add(spec.size)
        kinds.append("full_attention" if isinstance(spec, Full) else "sliding_attention")
    if len(sizes) > 1:
        raise bad("plan.operators", f"windows of {sorted(sizes)}", "one window size: stock configs hold a single one")
    config = base_config(model.config)
    window = sizes.pop() if sizes else None
    if config.model_type in ("qwen2", "qwen3"):
        stock = AutoConfig.for_model(
            config.model_type,
            **{k: v for k, v in config.to_dict().items() if k not in (*HYBRID_FIELDS, "layer_types", "sliding_window")},
            layer_types=kinds,
        )
        stock.use_sliding_window, stock.sliding_window = window is not None, window
    else:
        if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
            raise bad("config.attention_bias", True, "no biases: Ministral has none")
        fields = {k: v for k, v in config.to_dict().items() if k not in (*HYBRID_FIELDS, "sliding_window")}
        stock = AutoConfig.for_model("ministral", **fields, sliding_window=window, layer_types=kinds)
    return with_weights(AutoModelForCausalLM._model_mapping[type(stock)], stock, model)


def check_link(data: Any, plan: AttentionPlan) -> str:
    """The base that a linked folder names.

    Raises:
        HybridizeError: link and plan do not belong together.
    """
    if data.get("identity") != plan.geometry.identity:
        raise HybridizeError(f"link.identity: got {data.get('identity')!r}, expected {plan.geometry.identity!r}, the plan's")
    return data["base"]
