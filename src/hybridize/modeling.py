"""Base families as hybrid config and model classes: one generic body over the base's own modules, no copied files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

from hybridize.attention import HybridAttention, HybridDecoderLayer, LayerContext
from hybridize.cache import HybridCache
from hybridize.content import open_chunk, rows_to_content, to_content
from hybridize.errors import HybridizeError, bad
from hybridize.generation import HybridGenerationMixin
from hybridize.geometry import plan_of
from hybridize.operators.contract import Chunk
from hybridize.operators.learned import Learned
from hybridize.plan import AttentionPlan
from hybridize.projections import row_kernels

logger = logging.get_logger(__name__)

if TYPE_CHECKING:
    from typing import Any as Body  # the mixins always stand before a base class, whose attributes they use
else:
    Body = object


@dataclass
class HybridOutput(BaseModelOutputWithPast):
    """aux: what operators say beside their output, by "layer.first group.name"; None where none says anything."""

    aux: dict[str, Tensor] | None = None


class HeadOrder(Body):
    """Loading that ends with heads in span order, for bodies and causal LMs alike."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.permute_heads()
        return loaded

    def permute_heads(self) -> None:
        """Bring heads into span order; files and state dicts stay in the base's layout.

        Raises:
            HybridizeError: weights are quantized and some layer mixes operators.
        """
        attentions = self.attentions()
        if any(a.group_order != a.wanted_order for a in attentions) and getattr(self, "hf_quantizer", None) is not None:
            raise HybridizeError(
                "quantization: got a quantized model and a plan that mixes operators inside a layer, expected plain weights "
                "(packed rows cannot be reordered); use a plan of whole layers, or load without quantization"
            )
        for attention in attentions:
            attention.permute()

    def attentions(self) -> list[HybridAttention]:
        return [module for module in self.modules() if isinstance(module, HybridAttention)]


class HybridModel(HeadOrder):
    """Body of a hybrid model, mixed into a base body class: embeddings, layers, final norm."""

    _no_split_modules = ["HybridDecoderLayer"]
    _keep_in_fp32_modules_strict = {"branches", "router"}
    _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = False
    _can_record_outputs: dict[str, Any] = {}

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        plan = plan_of(config)
        self.layers: nn.ModuleList = nn.ModuleList(
            HybridDecoderLayer(layer, plan, i) for i, layer in enumerate(self._modules["layers"].children())
        )
        self.use_plan(plan)

    def use_plan(self, plan: AttentionPlan, branches: Sequence[Mapping[int, Learned]] | None = None) -> None:
        """Set operators (weights keep their order); prepares what re-based sinks need.

        `branches`: learned parameters to take up again, for each layer by group.
        """
        self.plan = plan
        for i, layer in enumerate(self.layers):
            layer.use_plan(plan, None if branches is None else branches[i])
        rope = (getattr(self.config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope") and any(spec.rebased_distance for spec in plan.specs()):
            raise bad(
                "window.sink_positions", "rebased", f"'absolute' on a base whose RoPE is {rope!r}: it changes with length"
            )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: HybridCache | None = None,
        prompt_len: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> HybridOutput:
        """Hidden states [B, T, E] of input_ids [B, T].

        `attention_mask` [B, T] or [B, past + T]: 1 for real tokens; `prompt_len` [B]: where each row's prompt ends,
        for plans with decode="full" (generate sets it).

        Raises:
            HybridizeError: a mask of another shape, a foreign cache, packed sequences, attention maps asked for.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise bad("input_ids, inputs_embeds", "both or neither", "exactly one of them")
        if output_attentions or (output_attentions is None and getattr(self.config, "output_attentions", False)):
            raise bad("output_attentions", True, "False: operators never build attention maps")
        if packed := sorted(key for key in kwargs if key.startswith("cu_seq_lens") or key == "segments"):
            raise bad(packed[0], "packed sequences", "one document a row: hybrid state does not reset inside a row")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache_for(cache if past_key_values is None else past_key_values, use_cache)
        chunk, order = open_chunk(hidden, attention_mask, cache, prompt_len)
        if order is not None:
            hidden, position_ids = (
                to_content(hidden, order),
                None if position_ids is None else rows_to_content(position_ids, order),
            )
        context = self.context(hidden, chunk, cache, position_ids)
        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states, aux = [], {}
        for i, layer in enumerate(self.layers):
            if keep:
                states.append(hidden)
            hidden, more = layer(hidden, context)
            aux.update({f"{i}.{name}": value for name, value in more.items()})
        hidden = self.norm(hidden)
        if cache is not None:
            cache.end(chunk)
        if keep:
            states.append(hidden)
        if order is not None:
            back = order.argsort(dim=1)
            hidden, states = to_content(hidden, back), [to_content(state, back) for state in states]
        return HybridOutput(
            last_hidden_state=hidden, past_key_values=cache, hidden_states=tuple(states) if keep else None, aux=aux or None
        )

    def context(
        self, hidden: Tensor, chunk: Chunk, cache: HybridCache | None = None, position_ids: Tensor | None = None
    ) -> LayerContext:
        """What the layers of one call share; lets a scorer run a part of the layers on its own."""
        rope_positions = chunk.positions if position_ids is None else position_ids

        def sink_rotation(distance: int) -> tuple[Tensor, Tensor]:
            # the row's own offset between RoPE and content positions stays, so distances to the sink keys are right
            shifted = rope_positions - (chunk.positions - distance).clamp_min(0)
            return self.rotary_emb(hidden, position_ids=shifted)

        row = row_kernels(hidden, cache, self.plan.geometry.head_dim)
        return LayerContext(chunk, cache, self.rotary_emb(hidden, position_ids=rope_positions), sink_rotation, row)

    def _cache_for(self, cache: Any, use_cache: bool | None) -> HybridCache | None:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if cache is None:  # training asks for none: it would only hold the graph of every state
            return HybridCache(self.plan) if use_cache and not self.training else None
        if self.training and any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers):
            raise bad("past_key_values", "a cache", "None while training with gradient checkpointing")
        if not isinstance(cache, HybridCache):
            raise bad("past_key_values", type(cache).__name__, "a HybridCache (model.new_cache())")
        if cache.plan.assignment != self.plan.assignment or cache.plan.operators != self.plan.operators:
            raise bad("past_key_values", "a cache of another plan", "a cache made by this model (model.new_cache())")
        return cache


class HybridForCausalLM(HeadOrder, HybridGenerationMixin):
    """Hybrid model with its language-model head, mixed into a base causal-LM class."""

    body_class: type[nn.Module]
    _no_split_modules = HybridModel._no_split_modules
    _keep_in_fp32_modules_strict = HybridModel._keep_in_fp32_modules_strict
    _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = False
    _can_record_outputs: dict[str, Any] = {}

    def __init__(self, config: PreTrainedConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = self.body_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        if config._attn_implementation not in ("sdpa", None):
            logger.warning_once(f"attn_implementation={config._attn_implementation!r} has no effect: operators run their own")

    @property
    def plan(self) -> AttentionPlan:
        return self.model.plan

    def set_plan(self, plan: AttentionPlan, branches: Sequence[Mapping[int, Learned]] | None = None) -> None:
        """Re-cut the model to another plan of the same base, in place; refused, it keeps the one it has.

        Base weights are all kept, and so are learned parameters of groups that stay what they are; other groups' go, unless
        the caller holds them (`branches`, for each layer by group, are taken up again).
        """
        plan.check_base(self.plan.geometry)
        before, had = self.plan, self.branches()
        self.model.use_plan(plan, branches)
        try:
            self.permute_heads()
        except HybridizeError:
            self.model.use_plan(before, had)
            raise
        self.config.hybrid_plan = plan.to_dict()

    @contextmanager
    def temporary_plan(self, plan: AttentionPlan) -> Iterator[None]:
        """Run under another plan inside a `with` block."""
        before, had = self.plan, self.branches()
        self.set_plan(plan)
        try:
            yield
        finally:
            self.set_plan(before, had)

    @contextmanager
    def holding_branches(self) -> Iterator[None]:
        """Inside a `with` block no plan loses learned parameters: a group that is what it was again has those it had."""
        outer = [layer for layer in self.model.layers if layer.self_attn.held is None]
        for layer in outer:
            layer.self_attn.held = layer.branches()
        try:
            yield
        finally:
            for layer in outer:
                layer.self_attn.held = None

    def branches(self) -> list[dict[int, Learned]]:
        """Learned parameters beside the base's, for each layer by group."""
        return [layer.branches() for layer in self.model.layers]

    def new_cache(self, max_tokens: int | None = None) -> HybridCache:
        """An empty cache for this model: growing, or static with room for `max_tokens` columns."""
        return HybridCache(self.plan, max_tokens)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: HybridCache | None = None,
        prompt_len: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V] (the last `logits_to_keep` columns of them), loss where labels [B, T] are given."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            prompt_len=prompt_len,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    create_masks_for_generate: Callable[..., Any] = staticmethod(lambda *_, attention_mask=None, **__: attention_mask)
