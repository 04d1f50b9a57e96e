"""What `hybridize compare` is asked: entries, budget and measures, from a YAML file or a list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hybridize.errors import HybridizeError, bad
from hybridize.evaluation.suite import Proof
from hybridize.methods.baselines import BASELINES
from hybridize.options import lengths_of, ruler_tasks
from hybridize.rope import check_rope
from hybridize.scoring.scorers import SCORERS
from hybridize.workflows import CONTEXTS, Selection

BASE = "base"


@dataclass(frozen=True)
class Entry:
    """One line of a comparison.

    Args:
        source: a control ("periodic-0", "random-1", "all-window"), a selector ("drop", "duo", ...), a baseline ("streaming",
            "snapkv"), a plan.json, a scores.json, DuoAttention's .tsv, a folder that `convert` or another verb wrote, or
            "base" under another `rope`.
        name: how it is called; default the source, or its file's name.
        select: fields of Selection that differ for it (prompts, length, unit, seed, text).
        without: components switched off ("window", "sinks", "linear").
        rope: {"rope_type": "yarn", "linear" or "dynamic", "factor": times the base's context}, for source "base".
    """

    source: str
    name: str
    select: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    rope: dict[str, Any] | None = None


@dataclass(frozen=True)
class Comparison:
    """The question.

    Args:
        model: the base. entries: what is compared; the base itself always comes first.
        ask: budget and cheap operator of all entries. proof: what they are measured on.
        match_at: tokens at which budgets are equal bytes; default the longest length.
        contexts: at which costs are shown.
    """

    model: str
    entries: tuple[Entry, ...]
    ask: Selection
    proof: Proof
    match_at: int
    contexts: tuple[int, ...] = CONTEXTS

    def as_config(self) -> dict[str, Any]:
        entries = [{**vars(e), "without": list(e.without)} for e in self.entries]
        config = {"verb": "compare", "model": self.model, "entries": entries, "match_at": self.match_at}
        config |= {"select": self.ask.as_config(), "prove": self.proof.as_config(), "contexts": list(self.contexts)}
        return config


def read_comparison(path: str | Path, proof: dict[str, Any], model: str | None = None) -> Comparison:
    """The comparison of a YAML file; `proof` fields and `model` from the command line go before the file's.

    Raises:
        HybridizeError: no such file, no YAML, an unknown or missing field.
    """
    path = Path(path)
    if not path.is_file():
        raise bad("compare", str(path), "an existing .yaml file")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise HybridizeError(f"compare: {path} is not YAML ({error})") from None
    if not isinstance(data, dict):
        raise bad("compare", type(data).__name__, "a mapping with 'model' and 'entries'")
    known = {"model", "entries", "select", "prove", "match_at", "contexts"}
    if unknown := sorted(set(data) - known):
        raise bad(f"compare.{unknown[0]}", data[unknown[0]], f"one of the fields {sorted(known)}")
    if not isinstance(data.get("entries"), list):
        raise bad("compare.entries", data.get("entries"), "a list")
    asked = {**_fields(data.get("prove") or {}, Proof, "prove"), **proof}
    for name in ("qa", "choice", "perplexity", "long"):  # files are named from where the YAML stands
        if name not in proof and name in asked:
            asked[name] = tuple(str(path.parent / file) for file in asked[name])
    entries = [_entry(each, path.parent) for each in data["entries"]]
    select = _fields(data.get("select") or {}, Selection, "select")
    contexts = tuple(data.get("contexts") or CONTEXTS)
    return make_comparison(model or data.get("model"), entries, select, asked, data.get("match_at"), contexts)


def make_comparison(
    model: str | None,
    entries: Sequence[Entry],
    select: dict[str, Any],
    proof: dict[str, Any],
    match_at: int | None = None,
    contexts: tuple[int, ...] = CONTEXTS,
) -> Comparison:
    """A comparison from parts that were read already.

    Raises:
        HybridizeError: no model, no entries, two of one name, or a number out of its range.
    """
    if not isinstance(model, str) or not model:
        raise bad("compare.model", model, "the base: a folder, hub id, .gguf file or 'smollm2'")
    if not entries:
        raise bad("compare.entries", [], "at least one control, selector, baseline, plan, scores file or folder")
    names = [entry.name for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1 or name == "full"}):
        raise bad("compare.entries", twice[0], "names that differ from each other and from 'full', the base")
    if odd := [name for name in names if not re.fullmatch(r"[\w .+-]{1,80}", name)]:
        raise bad("compare.entries", odd[0], "names of letters, digits, spaces and . + - _, at most 80")
    asked, ask = Proof(**proof), Selection(**select)
    _ = ask.cheap
    at = max(asked.lengths) if match_at is None else match_at
    if any(not isinstance(n, int) or n < 1 for n in (at, *contexts)):
        raise bad("compare.match_at, contexts", (at, *contexts), "numbers of at least 1")
    return Comparison(model, tuple(entries), ask, asked, at, contexts)


def entry_of(source: str, folder: Path = Path(), **more: Any) -> Entry:
    """An entry by its source alone; paths are taken from `folder`."""
    words = source in (*SCORERS, *BASELINES, BASE, "all-window") or source.startswith(("periodic-", "random-"))
    where = source if words or Path(source).is_absolute() else str(folder / source)
    path = Path(where)
    if not words and not path.exists():
        raise bad(
            "compare.entries", source, f"periodic-N, random-N, all-window, one of {SCORERS + BASELINES}, or an existing path"
        )
    if (source == BASE) != (more.get("rope") is not None):
        raise bad("compare.entries.rope", more.get("rope"), "a RoPE scaling with source 'base', and with no other source")
    if more.get("rope") is not None:
        check_rope(more["rope"])
    own = path.parent.name if path.name in ("plan.json", "scores.json") else path.stem
    return Entry(where, **{"name": source if words else own, **more})


def _entry(data: Any, folder: Path) -> Entry:
    if isinstance(data, str):
        return entry_of(data, folder)
    if not isinstance(data, dict) or not isinstance(data.get("source"), str):
        raise bad("compare.entries", data, "a word, a path, or a mapping with 'source'")
    known = {"source", "name", "select", "without", "rope"}
    if unknown := sorted(set(data) - known):
        raise bad(f"compare.entries.{unknown[0]}", data[unknown[0]], f"one of the fields {sorted(known)}")
    without = data.get("without") or ()
    without = (without,) if isinstance(without, str) else tuple(without)
    rope = data.get("rope")
    more = {"select": _fields(data.get("select") or {}, Selection, "select"), "without": without, "rope": rope}
    made = entry_of(data["source"], folder, **more)
    suffix = [] if rope is None else [f"{rope['rope_type']} x{rope['factor']:g}"]
    name = data.get("name") or " ".join([made.name, *suffix, *(f"without {part}" for part in without)])
    return replace(made, name=str(name))


def _fields(data: Any, cls: type, where: str) -> dict[str, Any]:
    """Options of a dataclass from YAML: lists become tuples, lengths may be "1024,2048", ruler may be "all"."""
    known = set(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    if not isinstance(data, dict):
        raise bad(f"compare.{where}", data, "a mapping")
    if unknown := sorted(set(data) - known):
        raise bad(f"compare.{where}.{unknown[0]}", data[unknown[0]], f"one of the fields {sorted(known)}")
    made: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    if isinstance(made.get("lengths"), (str, int)):
        made["lengths"] = lengths_of(str(made["lengths"]))
    if isinstance(made.get("ruler"), str):
        made["ruler"] = ruler_tasks(made["ruler"])
    return made
