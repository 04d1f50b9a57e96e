"""`hybridize convert`: score, plan, adapt, prove, save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridize import checkpoint
from hybridize.adapting import adapt
from hybridize.conversion import extended, memory_estimate
from hybridize.errors import bad
from hybridize.evaluation.suite import Proof, measures
from hybridize.families import HYBRID_TYPES
from hybridize.files import check_output_folder
from hybridize.geometry import geometry_of
from hybridize.indexing import index, sparsity_rows, with_trained
from hybridize.looking import closing_rows, look
from hybridize.methods import flashmorph, igal, l2a, nll, rtpurbo
from hybridize.morphed import morph
from hybridize.operators.specs import Gated, Indexed, Linear
from hybridize.options import lengths_of, load_model, read_config, selection_of
from hybridize.plan import AttentionPlan, units_for_budget
from hybridize.report.card import write_card
from hybridize.rope import raised
from hybridize.runs import RunFolder, quiet_libraries
from hybridize.scores import Scores
from hybridize.scoring.scorers import DEFAULT_SELECTOR, SCORERS
from hybridize.terminal import Terminal
from hybridize.training.forecast import forecast
from hybridize.training.recipe import Recipe, from_text, recipes_from_text
from hybridize.verbs import lift_model, note_resume, save_model, show_plan, write_run
from hybridize.workflows import Selection, compute_scores, cost_rows, counted, hybrid_of, plan_of_scores, prove, reference

METHODS = {
    "nll": nll.DEFAULTS, "igal": igal.DEFAULTS, "flashmorph": flashmorph.DEFAULTS, "rtpurbo": rtpurbo.DEFAULTS,
    "l2a": l2a.DEFAULTS,
}  # fmt: skip


def convert(terminal: Terminal, model: str, out: Path, method: str, **options: Any) -> None:
    """Score, plan, train where the method does, prove, save."""
    ask, recipes = asked_of(method, options)
    beyond = options["beyond"] or options["context"] is not None  # the base is measured as far as it was trained
    proof = Proof(options["test_prompts"], lengths_of(options["lengths"]), beyond=beyond)
    given = Scores.load(options["scores"]) if options["scores"] is not None else None
    fixed = AttentionPlan.load(options["plan"]) if options["plan"] is not None else None
    if options["dry_run"]:
        _dry_run(terminal, model, method, ask, given, fixed, options)
        for name, recipe in recipes.items():
            terminal.say(f"{name}: {recipe.label(name)}; {recipe.tokens:,} tokens")
        return
    text = options["train_text"] or ask.text
    config: dict[str, Any] = {"verb": "convert", "model": model, "method": method, "link": options["link"]}
    config |= {"select": ask.as_config(), "prove": proof.as_config()}
    config |= {"scores": str(options["scores"]), "plan": str(options["plan"])}
    config |= {name: options[name] for name in ("context", "rope_theta") if options[name] is not None}
    config["train"] = {"text": text, **{name: vars(recipe) for name, recipe in recipes.items()}} if recipes else None
    with quiet_libraries():
        check_output_folder(out, options["overwrite"])
        loaded = load_model(model, options)
        longer = _longer_config(loaded.model.config, options)
        hybrid = hybrid_of(loaded)
        own = base = AttentionPlan.base(hybrid.plan.geometry)
        if longer is not None:
            base = AttentionPlan.base(geometry_of(longer))
            if not options["beyond"]:
                base.check_context(max(proof.lengths), "length")
        per_layer = {"layer": 1, "group": base.geometry.kv_heads, "head": base.geometry.heads}
        # heads become groups, but for RTPurbo
        units = base.geometry.layers * per_layer["group" if ask.asked_unit == "head" and not ask.indexed else ask.asked_unit]
        units_for_budget(units, ask.budget)
        for recipe in recipes.values():
            base.check_context(recipe.length if recipe.tokens else 1, "train.length")
        if fixed is not None:
            fixed.check_base(base.geometry)
        if method == "flashmorph" and ask.linear is not None and flashmorph.is_control(ask.selector):
            flashmorph.flashmorph_plan(None, base, ask.linear, ask.budget, ask.selector)  # refused before anything is trained
        run = RunFolder(out, config, options["overwrite"])
        note_resume(terminal, run)
        seconds: dict[str, float] = {}
        trained: dict[str, Any] = {}
        todo, scores, before = measures(loaded.tokenizer, proof, run.step), given, None
        with counted(seconds, "score"):
            if scores is None and fixed is None and ask.needs_scores and method != "flashmorph":
                scores = compute_scores(run, loaded, hybrid, ask, terminal.report)
        if recipes:
            with counted(seconds, "prove"):  # while the weights are still the base's
                before = reference(run, hybrid, own, proof, todo, terminal.report)
        if longer is not None:
            hybrid = hybrid_of(replace(loaded, model=extended(loaded.model, longer)))
        with counted(seconds, "train"):
            if method == "flashmorph" and ask.linear is not None:
                everything = AttentionPlan.from_layers(base.geometry, [], ask.linear)  # the most that is trained at once
                _say_forecast(terminal, hybrid, recipes, everything)
                scores, chosen, trained = morph(run, loaded, hybrid, ask, recipes, text, given, fixed, terminal.report)
            else:
                chosen = fixed or plan_of_scores(scores, base, ask)
                if longer is not None:
                    chosen = chosen.extended_from(own.geometry)
            if method == "igal":
                _say_forecast(terminal, hybrid, recipes, chosen)
                trained = adapt(run, loaded, hybrid, chosen, recipes["train"], text, terminal.report)
                tokens = sum(record["tokens"] for record in trained.values())
                chosen = replace(chosen, provenance={**chosen.provenance, "trained_tokens": tokens})
            if method == "rtpurbo":
                _say_forecast(terminal, hybrid, recipes, chosen)
                trained = index(run, loaded, hybrid, chosen, recipes, text, terminal.report)
                chosen = with_trained(chosen, trained)
            if method == "l2a":
                _say_forecast(terminal, hybrid, recipes, chosen)
                trained = look(run, loaded, hybrid, chosen, recipes["look"], text, terminal.report)
                chosen = with_trained(chosen, trained)
        plans = {"hybrid": chosen} if before is not None else {"full": base, "hybrid": chosen}
        if trained and any(spec.kind == "linear" for spec in chosen.specs()):
            plans["state off"] = chosen.without("linear")
        if any(spec.kind == "indexed" for spec in chosen.specs()):
            plans["index off"] = chosen.without("indexed")
        if any(spec.kind == "gated" for spec in chosen.specs()):
            plans["far off"] = chosen.without("far")
        hybrid.set_plan(chosen)
        with counted(seconds, "prove"):
            rows = prove(run, loaded, hybrid, plans, proof, terminal.report, todo, before)
            sparse = sparsity_rows(run, loaded, hybrid, proof, terminal.report)
            closing = closing_rows(run, loaded, hybrid, proof, terminal.report)
        with counted(seconds, "save"):
            if options["link"]:
                run.begin()
                checkpoint.save_linked(chosen, model, run.path / "model", overwrite=True)
            else:
                save_model(run, loaded, hybrid, scores, options["max_shard_size"])
    terminal.close()
    for record in trained.values():
        if record.get("warning"):
            terminal.say(f"warning: {record['warning']}")
    cost: dict[str, Any] = {"tokens": 0, "seconds": 0.0}
    if scores is not given and method != "flashmorph":  # whose selection has a record of its own
        spent = sum(value for name, value in run.seconds.items() if name.startswith("score"))
        cost = {"tokens": ask.tokens, "seconds": spent}
    for record in trained.values():
        cost = {name: cost[name] + record[name] for name in cost}
    facts = {"model": model, **{name: recipe.label(name) for name, recipe in recipes.items() if recipe.tokens}}
    write_run(
        run,
        f"{model} by {method}",
        chosen,
        scores,
        rows,
        seconds,
        facts,
        conversion=cost,
        training=trained,
        sparsity=sparse,
        closing=closing,
    )
    write_card(run.path / "README.md", base=model, plan=chosen, rows=rows, trained=bool(trained))
    lift_model(run)
    folder = run.finish()
    terminal.quality_table(rows)
    terminal.sparsity_table(sparse)
    terminal.closing_table(closing)
    terminal.seconds_table(seconds)
    terminal.say(f"model: {folder}\nreport: {folder / 'report.html'}")
    terminal.result({"out": str(folder), "rows": rows, "seconds": seconds, "layers": chosen.kept_layers})


def asked_of(method: str, options: dict[str, Any]) -> tuple[Selection, dict[str, Recipe]]:
    """What the options ask of a method, its own defaults filled in; recipes by stage, none for one that trains nothing.

    Raises:
        HybridizeError: an unknown method, options that exclude each other, or that the method does not have.
    """
    if method not in METHODS:
        raise bad("method", method, f"one of {sorted(METHODS)}")
    if options["plan"] is not None and options["scores"] is not None:
        raise bad("plan, scores", "both", "at most one of --plan and --scores")
    foreign = {
        "nll": ("linear", "indexed", "top_p", "gated", "control", "train", "train_text"),
        "rtpurbo": ("linear", "gated"),
        "l2a": ("linear", "indexed", "top_p", "selector", "budget", "sinks", "sink_positions", "unit", "scores"),
    }.get(method, ("indexed", "top_p", "gated"))
    foreign += () if method == "l2a" else ("context", "rope_theta")
    if given := [name for name in foreign if options[name] is not None]:
        raise bad(given[0].replace("_", "-"), options[given[0]], f"nothing: --method {method} does not have it")
    if method != "nll" and options["link"]:
        raise bad("link", True, "no --link: the weights are trained, so they have to be written")
    options = {**options, **{k: v for k, v in METHODS[method].items() if options[k] is None}}
    selector = options["selector"]
    if method == "flashmorph":
        flashmorph.check_selector(selector, options["unit"])
        if options["control"] is not None:
            raise bad(
                "control", options["control"], "none: FlashMorph's are selectors (--selector periodic-0, random-0, kl, ...)"
            )
        if selector not in SCORERS:
            options |= {"selector": DEFAULT_SELECTOR}
    ask = selection_of(options)
    if method == "nll":
        return ask, {}
    near = {"window": ask.window, "sinks": ask.sinks, "sink_positions": ask.sink_positions}
    if method == "flashmorph":
        linear = from_text(Linear, options["linear"], "linear", {**flashmorph.LINEAR, **near})
        return replace(ask, selector=selector, linear=linear), recipes_from_text(options["train"], flashmorph.STAGES)
    if method == "rtpurbo":
        return _rtpurbo(ask, options)
    if method == "l2a":
        gated = from_text(Gated, options["gated"], "gated", {"window": ask.window})
        l2a.check_control(options["control"])
        if options["rope_theta"] is not None and options["context"] is None:
            raise bad("rope-theta", options["rope_theta"], "nothing without --context, the tokens it is to cover")
        recipes = recipes_from_text(options["train"], l2a.stages(options["context"]))
        l2a.check_stage(recipes["look"], options["context"])
        return replace(ask, gated=gated, control=options["control"]), recipes
    linear = from_text(Linear, options["linear"], "linear", near)
    ask = replace(ask, linear=linear, control=options["control"])
    _ = ask.needs_scores  # an unknown control is refused before anything is loaded
    return ask, {"train": from_text(Recipe, options["train"], "train")}


def _rtpurbo(ask: Selection, options: dict[str, Any]) -> tuple[Selection, dict[str, Recipe]]:
    if ask.asked_unit != "head":
        raise bad("selector, unit", f"{ask.selector} by {ask.asked_unit}", "a selector of heads: echo, retrieval or reasoning")
    if ask.sink_positions != "absolute" or ask.decode != "window":
        raise bad(
            "sink_positions, decode", f"{ask.sink_positions}, {ask.decode}", "absolute, window: heads of one group share keys"
        )
    given = {**rtpurbo.INDEXED, "window": ask.window, "sinks": ask.sinks}
    if options["top_p"] is not None:
        given["top_p"] = options["top_p"]
    indexed = from_text(Indexed, options["indexed"], "indexed", given)
    rtpurbo.needs_scores(options["control"])  # refused before anything is loaded
    rtpurbo.controlled(indexed, options["control"])
    return replace(ask, indexed=indexed, control=options["control"]), recipes_from_text(options["train"], rtpurbo.STAGES)


def _longer_config(config: Any, options: dict[str, Any]) -> Any:
    """The base's config for the context that is asked for; None: its own is."""
    if options["context"] is None:
        return None
    if config.model_type in HYBRID_TYPES:
        raise bad("context", options["context"], "nothing with a converted model: it has a context of its own")
    return raised(config, options["context"], options["rope_theta"])


def _say_forecast(terminal: Terminal, model: Any, recipes: dict[str, Recipe], plan: AttentionPlan) -> None:
    for each in forecast(model, recipes.items(), plan):
        terminal.say(each.text())


def _dry_run(
    terminal: Terminal,
    model: str,
    method: str,
    ask: Selection,
    given: Scores | None,
    fixed: AttentionPlan | None,
    options: dict[str, Any],
) -> None:
    with quiet_libraries():
        config = read_config(model, options["trust_remote_code"])
    config = _longer_config(config, options) or config
    base = AttentionPlan.base(geometry_of(config))
    if fixed is not None:
        fixed.check_base(base.geometry)
        made = fixed
    elif method == "flashmorph" and ask.linear is not None and (given is not None or flashmorph.is_control(ask.selector)):
        made = flashmorph.flashmorph_plan(given, base, ask.linear, ask.budget, ask.selector)
    elif method != "flashmorph" and (given is not None or not ask.needs_scores):
        made = plan_of_scores(given, base, ask)
    else:
        if ask.indexed is not None:
            terminal.say("which heads retrieve is known after scoring, and with it how many groups keep their cache:")
            return terminal.result({"heads": units_for_budget(base.geometry.layers * base.geometry.heads, ask.budget)})
        layers, groups = base.geometry.layers, base.geometry.kv_heads
        by_layer = ask.asked_unit == "layer"
        keep = units_for_budget(layers if by_layer else layers * groups, ask.budget)
        what = "layers" if by_layer else "groups"
        terminal.say(f"which {keep} {what} stay is known after scoring; what they cost does not depend on it:")
        pairs = [divmod(unit, groups) for unit in range(keep * groups if by_layer else keep)]
        if method == "flashmorph" and ask.linear is not None:
            made = AttentionPlan.from_groups(base.geometry, pairs, ask.linear)
        else:
            made = AttentionPlan.from_groups(base.geometry, pairs, ask.cheap, kept=ask.linear)
    show_plan(terminal, made, memory_estimate(config, made, 8192, 1, "bfloat16"))
    terminal.result({"plan": made.to_dict(), "cost": cost_rows(made)})
