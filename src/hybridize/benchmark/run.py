"""`hybridize bench`: what is measured for a shape, as resumable pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hybridize.benchmark.attention import attention_rows
from hybridize.benchmark.decode import ROOM, decode_rows, kernel_decode_rows, largest_batch_rows, ragged_rows
from hybridize.benchmark.indexed import indexed_rows, pays_from
from hybridize.benchmark.shapes import Shape, random_models, shape_named
from hybridize.benchmark.subject import Subject
from hybridize.benchmark.timing import Ceilings, measured_ceilings, release
from hybridize.benchmark.whole import prefill_rows, train_rows
from hybridize.errors import bad
from hybridize.geometry import geometry_of
from hybridize.kernels.dispatch import kernels_for
from hybridize.methods import flashmorph
from hybridize.methods.nll import periodic_layers
from hybridize.operators.specs import Gated, Linear, Window
from hybridize.plan import AttentionPlan, Geometry, units_for_budget
from hybridize.training.recipe import from_text

PARTS = ("attention", "prefill", "decode", "train", "ragged", "batch", "indexed")
DEFAULT_PARTS = PARTS[:5]  # the largest batch needs a GPU, indexed attention a budget of its own
METHODS = ("nll", "igal", "flashmorph", "l2a")
RAGGED = 16  # rows of a batch of unequal lengths


@dataclass(frozen=True)
class Bench:
    """The question: a named shape, parts of PARTS, tokens of context, rows of decoding batches.

    A part may have contexts of its own: "prefill:131072+262144".
    `method`: what the hybrid is like. "nll": `budget` is the share of full layers, the others run windows; "flashmorph": the
    others run `linear` ("KEY=VALUE,..." of its spec, or "default"); "igal": the share of groups that run `linear`, the others
    re-based windows; "l2a": the share of tokens that every layer opens, evenly, behind a window without sinks. None: "igal"
    where `linear` is given, else "nll".
    The part "indexed" takes `budget` as the share of query heads that retrieve, whatever the method.
    `stock`: transformers' own class too, which takes longest. `backward`: of attention alone.
    """

    shape: str = "tiny"
    parts: tuple[str, ...] = DEFAULT_PARTS
    contexts: tuple[int, ...] = (1024,)
    batches: tuple[int, ...] = (1,)
    budget: float = 0.25
    method: str | None = None
    linear: str | None = None
    window: int = 512
    sinks: int = 4
    backward: bool = False
    stock: bool = True
    seconds: float = 1.0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        shape_named(self.shape)
        if self.kind not in METHODS or (self.kind in ("nll", "l2a") and self.linear is not None):
            raise bad("method", self.method, f"one of {METHODS}, and no linear where it is 'nll' or 'l2a'")
        _ = Window(self.window, self.sinks), self.linear_spec
        if unknown := [part for part in self.named_parts if part not in PARTS]:
            raise bad("parts", unknown[0], f"some of {PARTS}")
        contexts = self.longest_first
        if not self.contexts or not self.batches or min(*self.contexts, *contexts, *self.batches) < 1:
            raise bad("contexts, batches", (self.contexts, contexts, self.batches), "numbers of at least 1")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise bad("dtype", self.dtype, "'bfloat16', 'float16' or 'float32'")

    @property
    def kind(self) -> str:
        return self.method or ("igal" if self.linear else "nll")

    @property
    def linear_spec(self) -> Linear | None:
        if self.kind in ("nll", "l2a"):
            return None
        given = {"window": self.window, "sinks": self.sinks, **(flashmorph.LINEAR if self.kind == "flashmorph" else {})}
        return from_text(Linear, None if self.linear == "default" else self.linear, "linear", given)

    def hybrid(self, geometry: Geometry) -> tuple[str, AttentionPlan]:
        """(name, plan) of what is held against the base."""
        layers, groups, linear = geometry.layers, geometry.kv_heads, self.linear_spec
        if self.kind == "l2a":
            gated = Gated(self.window, "position", rate=self.budget)
            plan = AttentionPlan.from_layers(geometry, [], gated, {"method": "bench"})
            return f"{self.budget:.0%} of tokens open", plan
        if linear is None:
            keep = periodic_layers(layers, units_for_budget(layers, self.budget))[0]
            plan = AttentionPlan.from_layers(geometry, keep, Window(self.window, self.sinks), {"method": "bench"})
            return f"{len(keep)} of {layers} layers full", plan
        if self.kind == "flashmorph":
            keep = periodic_layers(layers, units_for_budget(layers, self.budget))[0]
            plan = AttentionPlan.from_layers(geometry, keep, linear, {"method": "bench"})
            return f"{len(keep)} of {layers} layers full, linear", plan
        count = units_for_budget(layers * groups, self.budget)
        # the first groups of each layer, so that no plan moves weights under a captured graph
        rest = count % layers
        pairs = [(layer, group) for group in range(count // layers) for layer in range(layers)]
        pairs += [(i * layers // rest, count // layers) for i in range(rest)]
        cheap = Window(self.window, self.sinks, "rebased")
        plan = AttentionPlan.from_groups(geometry, pairs, cheap, {"method": "bench"}, linear)
        return f"{count} of {layers * groups} groups linear", plan

    @property
    def named_parts(self) -> dict[str, tuple[int, ...]]:
        """Contexts of each part asked for."""
        found = {}
        for part in self.parts:
            name, colon, own = part.partition(":")
            if colon and not all(each.isdecimal() for each in own.split("+")):
                raise bad("parts", part, "a part, or a part with its contexts, as 'prefill:131072+262144'")
            found[name] = tuple(int(each) for each in own.split("+")) if colon else self.contexts
        return found

    @property
    def longest_first(self) -> list[int]:
        return sorted({n for contexts in self.named_parts.values() for n in contexts}, reverse=True)


def bench(
    ask: Bench, device: torch.device, step: Callable[[str, Callable[[], Any]], Any], report: Callable[[str, int, int], None]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(speed rows, facts): every piece through `step` (RunFolder.step), so that a killed run goes on where it was.

    Raises:
        HybridizeError: the largest batch was asked for on a device that is no GPU.
    """
    if "batch" in ask.named_parts and device.type != "cuda":
        raise bad("parts", "batch", "a CUDA device: it asks how much fits into its memory")
    shape, dtype = shape_named(ask.shape), getattr(torch, ask.dtype)
    window = Window(ask.window, ask.sinks)

    def measure_ceilings() -> dict[str, float]:
        return vars(measured_ceilings(device, dtype))

    ceilings = Ceilings(**step("ceilings", measure_ceilings))
    pieces: list[tuple[str, Callable[[], Any]]] = []
    if "attention" in ask.named_parts:
        opened = ask.budget if ask.kind == "l2a" else None
        for n in ask.named_parts["attention"]:
            given = (ask.shape, shape, n, window, device, dtype, ceilings)
            pieces.append(
                (f"attention-{n}", partial(attention_rows, *given, backward=ask.backward, seconds=ask.seconds, opened=opened))
            )
            pieces.append((f"attention-decode-{n}", partial(kernel_decode_rows, *given, ask.seconds)))
    for n in ask.named_parts.get("indexed", ()):
        one_layer = (ask.shape, shape, n, window, ask.budget, device, dtype, ceilings, ask.seconds)
        pieces.append((f"indexed-{n}", partial(indexed_rows, *one_layer)))
    pieces += _model_pieces(ask, shape, device, dtype, ceilings)
    rows: list[dict[str, Any]] = []
    for i, (name, run) in enumerate(pieces):
        rows += step(name, run)
        release()
        report("bench", i + 1, len(pieces))
    kernels = kernels_for("window", torch.empty(1, shape.heads, 1, shape.head_dim, device=device, dtype=dtype)) is not None
    which = "Triton kernels" if kernels else "the torch reference: not what a GPU would run"
    facts = {"copy, bytes/s": ceilings.copy, "matmul, FLOP/s": ceilings.matmul, "window attention": which}
    if "indexed" in ask.named_parts:
        facts["choosing pays from, tokens"] = pays_from(rows)
    return rows, facts


def _model_pieces(
    ask: Bench, shape: Shape, device: torch.device, dtype: torch.dtype, ceilings: Ceilings
) -> Sequence[tuple[str, Callable[[], Any]]]:
    @functools.cache
    def subject() -> Subject:
        stock, model = random_models(shape, ask.longest_first[0] + ROOM, device, dtype)
        name, hybrid = ask.hybrid(geometry_of(model.config))
        plans = {"base": AttentionPlan.base(hybrid.geometry), name: hybrid}
        return Subject(ask.shape, shape, stock, model, plans, ceilings, ask.seconds)

    def on_subject(rows: Callable[..., Any], *given: Any) -> Callable[[], Any]:
        return lambda: rows(subject(), *given)

    pieces: list[tuple[str, Callable[[], Any]]] = []
    by_context: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "prefill": (prefill_rows, (ask.stock,)),
        "train": (train_rows, ()),
        "ragged": (ragged_rows, (RAGGED,)),
        "batch": (largest_batch_rows, ()),
    }
    for part, contexts in ask.named_parts.items():
        if part == "decode":
            pieces += [(f"decode-{b}", on_subject(decode_rows, contexts, b, ask.stock)) for b in ask.batches]
        elif part in by_context:
            rows, more = by_context[part]
            pieces += [(f"{part}-{n}", on_subject(rows, n, *more)) for n in contexts]
    return pieces
