"""HybridCache: transformers' cache API over one state per operator span. Window layers really hold a window only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from hybridize.errors import HybridizeError, bad
from hybridize.operators.contract import Chunk, State
from hybridize.operators.gated import new_far_state
from hybridize.operators.registry import build_operator
from hybridize.plan import AttentionPlan


class HybridLayer(CacheLayerMixin):
    """The states of one layer, in the order of its spans, then what a gated layer keeps of all tokens.

    Keys and values reach them through HybridAttention and FarAttention.
    """

    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, cache: HybridCache, states: list[State]) -> None:
        super().__init__()
        self.cache = cache
        self.states = states
        self.is_compileable = cache.max_tokens is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise HybridizeError("HybridCache: states are allocated by the operators, not by lazy_initialization")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise HybridizeError("HybridCache: it serves hybridize models only, a stock attention layer cannot write to it")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_seq_length() + query_length, 0

    def get_seq_length(self) -> Any:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1 if self.cache.max_tokens is None else self.cache.max_tokens

    def crop(self, tokens_to_remove: int) -> None:
        raise HybridizeError(
            "HybridCache.crop: a window forgets what left it, so tokens cannot be taken back; "
            "assisted and prompt-lookup decoding need a full-attention model"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for state in self.states:
            state.select_rows(beam_idx)

    def reset(self) -> None:
        for state in self.states:
            state.reset()


class HybridCache(Cache):
    """One state per operator span of every layer, plus two numbers a row.

    Args:
        plan: the plan of the model that will use it.
        max_tokens: None for a growing cache; else a static, compilable one of that many columns.

    Attributes:
        lengths: real tokens each row holds, [B] int64 (padding not counted).
        prompt_len: per row, where prefill ends and decoding begins, [B] int64; written by our `generate`. A query's
            view depends on this and its position only, never on how a prompt was cut into calls.
    """

    def __init__(self, plan: AttentionPlan, max_tokens: int | None = None) -> None:
        self.plan = plan
        self.max_tokens = max_tokens
        operators = {name: build_operator(spec) for name, spec in plan.operators.items()}
        states = [
            [operators[name].new_state(max_tokens) for name, _ in plan.spans(layer)] for layer in range(plan.geometry.layers)
        ]
        for layer, spans in enumerate(states):
            if plan.gate(layer) is not None:
                spans.append(new_far_state(max_tokens))
        super().__init__(layers=[HybridLayer(self, spans) for spans in states])
        self.lengths: Tensor | None = None
        self.prompt_len: Tensor | None = None
        self.ragged = False
        self._columns: Any = 0

    def states(self, layer: int) -> list[State]:
        """The states of a layer's spans."""
        held: list[State] = self.layers[layer].states
        return held if self.plan.gate(layer) is None else held[:-1]

    def far_state(self, layer: int) -> State:
        """Keys and values of all tokens of a gated layer, beside its window's."""
        state: State = self.layers[layer].states[-1]
        return state

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Columns taken in, padding included: a number, or a tensor for a static cache in use."""
        return self._columns

    def begin(self, batch: int, tokens: int, count: Tensor | None, device: torch.device) -> Chunk:
        """Open the next chunk of `tokens` columns; `count` [B]: real tokens in each row, None: all of them."""
        if self.lengths is None:
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
            if self.max_tokens is not None:
                self._columns = torch.zeros((), dtype=torch.int64, device=device)
                if not torch.compiler.is_compiling():
                    torch._dynamo.mark_static_address(self.lengths)
                    torch._dynamo.mark_static_address(self._columns)
        if len(self.lengths) != batch:
            raise HybridizeError(f"HybridCache: got a batch of {batch} rows, expected {len(self.lengths)}, as it holds")
        columns = self._host_columns(tokens)
        if self.max_tokens is not None and columns is not None and columns + tokens > self.max_tokens:
            raise HybridizeError(f"HybridCache: got {columns + tokens} tokens, expected at most max_tokens={self.max_tokens}")
        self.ragged = self.ragged or count is not None
        offset = columns if columns == 0 or not self.ragged else None
        prompt_len = self.prompt_len
        steps = torch.arange(tokens, device=device)
        if offset is not None:
            positions = offset + steps[None]
        else:
            positions = self.lengths[:, None] + steps
        return Chunk(positions, offset, count, prompt_len, batch)

    def _host_columns(self, tokens: int) -> int | None:
        # a static cache keeps its length on the device: one token at a time must not wait for it, nor a compiled graph
        if isinstance(self._columns, int):
            return self._columns
        return None if tokens == 1 or torch.compiler.is_compiling() else int(self._columns)

    def end(self, chunk: Chunk) -> None:
        """Close a chunk after the last layer."""
        assert self.lengths is not None
        self.lengths += chunk.tokens if chunk.count is None else chunk.count
        self._columns += chunk.tokens

    def start_prompt(self, prompt_len: Tensor) -> None:
        """Say where each row's prompt ends, counted from the row's first token, before its first chunk. [B] int64.

        Raises:
            HybridizeError: another prompt after an operator has dropped tokens of the first one.
        """
        prompt_len = prompt_len.to(torch.int64)
        states = [state for layer in self.layers for state in layer.states]
        if any(state.prompt_is_closed for state in states) and not torch.equal(prompt_len, self.prompt_len):
            raise bad("prompt_len", prompt_len.tolist(), "the first prompt's: SnapKV has dropped tokens (use a new cache)")
        self.prompt_len = prompt_len

    def bytes(self) -> int:
        """Bytes allocated: every storage counted once and whole, so that a view that pins a prefill shows."""
        tensors = [tensor for layer in self.layers for state in layer.states for tensor in state.tensors()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        rows = 0 if self.lengths is None else 16 * len(self.lengths)  # lengths and prompt_len
        return sum(storages.values()) + rows

    # -- rows -----------------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        for name in ("lengths", "prompt_len"):
            rows = getattr(self, name)
            if rows is not None:
                setattr(self, name, rows.index_select(0, beam_idx.to(rows.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = torch.arange(self.batch_size if self.lengths is not None else 0).repeat_interleave(repeats)
        self.reorder_cache(rows)

    @property
    def batch_size(self) -> int:
        return -1 if self.lengths is None else len(self.lengths)

    def reset(self) -> None:
        super().reset()
        self.ragged = False
        self.prompt_len = None
        if self.max_tokens is None:
            self.lengths, self._columns = None, 0
        elif self.lengths is not None:
            self.lengths.zero_()
            self._columns.zero_()
