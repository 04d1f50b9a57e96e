"""What a training is asked: plain data, readable from `key=value` text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_type_hints

from hybridize.data.needles import CALIBRATION_KINDS
from hybridize.errors import bad

Asked = TypeVar("Asked")
TRAINED = ("branches", "lora", "attention", "attention_norms", "all", "base")


@dataclass(frozen=True)
class Recipe:
    """Steps of AdamW on a mixture of needles and text; the defaults are those of our prototype (docs/igal.md).

    Args:
        steps: optimizer steps. rows: rows a step, over all devices. length: tokens a row.
        rate, branch_rate: peak learning rates of base weights and of parameters beside them.
        trains: "branches" (parameters beside the base's only), "lora" (and low-rank factors of q, k, v, o, merged at the
            end), "attention" (and q, k, v, o themselves), "attention_norms" (and norms), "all" weights, "base" (all but
            parameters beside the base's).
        transfer_steps: steps of attention transfer before, on branches alone, at transfer_rate.
        ce, kl: weights of the cross entropy, and of the KL from the untrained base under its own plan, at learned tokens.
        top: of the KL, the teacher's most likely tokens that it is over, written down before the stage (0: all of them, from a
            teacher that runs beside the student).
        text_share: share of rows that are text. kinds: needles of the others.
        micro: rows a device runs at once (0: all of its share). checkpointing: recompute layers, for memory.
        warmup: steps of rising rate; then a cosine to `floor` times the peak. clip: largest gradient norm.
        watch: steps between looks at recall, whose best step is kept (0: the last step is).
        gate_rate, price: of a stage of gates (training/gates.py), which trains nothing else.
        strength, skip: of a stage of gated layers (training/looking.py): the price of open tokens at the last step, and the
            share of closed ones that a controller of it aims at (0: none does).
        lora_rank, lora_alpha: of "lora". save_every: steps between checkpoints. seed: of data and initial values.
    """

    steps: int = 200
    rows: int = 24
    length: int = 1024
    rate: float = 2e-4
    branch_rate: float = 3e-3
    trains: str = "attention"
    transfer_steps: int = 0
    transfer_rate: float = 1e-2
    ce: float = 1.0
    kl: float = 0.0
    top: int = 0
    text_share: float = 1 / 3
    kinds: tuple[str, ...] = CALIBRATION_KINDS
    micro: int = 0
    checkpointing: bool = False
    warmup: int = 10
    floor: float = 0.0
    watch: int = 0
    gate_rate: float = 2e-2
    price: float = 0.1
    strength: float = 1.31e-3
    skip: float = 0.0
    clip: float = 1.0
    lora_rank: int = 8
    lora_alpha: int = 16
    save_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "transfer_steps", "micro", "warmup", "watch", "top"):
            if getattr(self, name) < 0:
                raise bad(f"train.{name}", getattr(self, name), "at least 0")
        for name in ("rows", "length", "lora_rank", "lora_alpha", "save_every", "rate", "branch_rate", "gate_rate",
                     "clip"):  # fmt: skip
            if getattr(self, name) <= 0:
                raise bad(f"train.{name}", getattr(self, name), "more than 0")
        for name in ("ce", "kl", "price", "strength"):
            if getattr(self, name) < 0:
                raise bad(f"train.{name}", getattr(self, name), "at least 0")
        if not 0 <= self.floor < 1:
            raise bad("train.floor", self.floor, "a share of the peak rate, below 1")
        if not 0 <= self.skip < 1:
            raise bad("train.skip", self.skip, "a share of tokens, below 1")
        if not self.ce and not self.kl:
            raise bad("train.ce, train.kl", "0 and 0", "at least one of them above 0")
        if self.trains not in TRAINED:
            raise bad("train.trains", self.trains, f"one of {TRAINED}")
        if self.micro and self.rows % self.micro:
            raise bad("train.micro", self.micro, f"a divisor of rows={self.rows}")

    def label(self, stage: str = "") -> str:
        """What a person is told of it; a stage of gates trains nothing else."""
        trained = f"{self.trains} at {self.rate:g}, branches at {self.branch_rate:g}"
        if stage == "gates":
            trained = f"gates at {self.gate_rate:g}, price {self.price:g}"
        elif self.trains == "branches":
            trained = f"branches at {self.branch_rate:g}"
        elif stage == "look":
            aim = f", aimed at {self.skip:.0%} closed" if self.skip else ""
            trained = (
                f"{self.trains} at {self.rate:g}, routers at {self.branch_rate:g}; price of open tokens {self.strength:g}{aim}"
            )
        before = f"transfer {self.transfer_steps} steps at {self.transfer_rate:g}, then " if self.transfer_steps else ""
        what = f"{self.steps} steps of {self.rows} rows of {self.length} tokens, {100 * self.text_share:.0f} % text"
        return f"{before}{what}; trains {trained}; seed {self.seed}"

    @property
    def tokens_a_step(self) -> int:
        return self.rows * self.length

    @property
    def tokens(self) -> int:
        """Tokens that all stages read."""
        return (self.steps + self.transfer_steps) * self.tokens_a_step


def from_text(cls: type[Asked], text: str | None, field: str, given: Mapping[str, Any] | None = None) -> Asked:
    """A dataclass from "key=value,key=value"; several words of a tuple have + between them.

    Args:
        given: values of fields that the text does not name.

    Raises:
        HybridizeError: no such field, or a value that cannot be one.
    """
    kinds, made = get_type_hints(cls), dict(given or {})
    known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    for part in filter(None, (text or "").split(",")):
        name, sign, value = part.partition("=")
        if name not in known or not sign:
            raise bad(field, part, f"KEY=VALUE with a KEY of {known}")
        made[name] = _value(value, kinds[name], f"{field}.{name}")
    return cls(**made)


def recipes_from_text(text: str | None, defaults: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Recipes of several stages from "stage.key=value,key=value": a key without a stage is every stage's.

    Raises:
        HybridizeError: no such stage or field, or a value that cannot be one.
    """
    asked: dict[str, list[str]] = {name: [] for name in defaults}
    for part in filter(None, (text or "").split(",")):
        stage, dot, rest = part.partition(".")
        if dot and "=" not in stage:
            if stage not in defaults:
                raise bad("train", part, f"STAGE.KEY=VALUE with a STAGE of {list(defaults)}")
            asked[stage].append(rest)
        else:
            for found in asked.values():
                found.append(part)
    return {name: from_text(Recipe, ",".join(asked[name]), f"train.{name}", vars(each)) for name, each in defaults.items()}


def _value(text: str, kind: Any, field: str) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise bad(field, text, "true or false")
        return text == "true"
    try:
        return kind(text) if kind in (int, float, str) else tuple(filter(None, text.split("+")))
    except ValueError:
        raise bad(field, text, f"a number ({kind.__name__})") from None
