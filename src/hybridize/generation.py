"""How a hybrid model takes part in transformers' generate: its own cache, prompt lengths, and what it refuses."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import GenerationMixin

from hybridize.cache import HybridCache
from hybridize.errors import bad

# renamed in 5.24: generate hands the cache on under this name
CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


class HybridGenerationMixin(GenerationMixin):
    """generate() over a HybridCache: greedy, sampling, beams; growing or static cache; chunked prefill; several turns."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' generate.

        Raises:
            HybridizeError: assisted or prompt-lookup decoding (a window cannot take tokens back), a cache type that is not
                ours, or a prompt whose RoPE distances exceed the base's trained context.
        """
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        for name in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit"):
            if kwargs.get(name) is not None or getattr(config, name, None) is not None:
                raise bad(name, "assisted decoding", "None: it rolls the cache back, and a window forgets what left it")
        inputs = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        if isinstance(inputs, Tensor) and not getattr(self.config, "hybrid_allow_beyond_context", False):
            self.plan.check_context(inputs.shape[1])
        if self.plan.phased:
            prompt = inputs if isinstance(inputs, Tensor) else kwargs.get("inputs_embeds")
            if prompt is None:
                raise bad("input_ids", None, "a prompt: the plan's operators must know where it ends")
            # everything in the inputs is prompt, also what an earlier turn generated: it will not be asked again
            kwargs["prompt_len"] = torch.full((len(prompt),), prompt.shape[1], device=prompt.device)
        return super().generate(*args, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        given = model_kwargs.get(CACHE_ARGUMENT)
        kind = generation_config.cache_implementation
        if given is not None and not isinstance(given, HybridCache):
            raise bad(CACHE_ARGUMENT, type(given).__name__, "a HybridCache (model.new_cache())")
        if given is not None and kind is not None:
            raise bad("cache_implementation", kind, f"None where {CACHE_ARGUMENT} is given")
        if kind not in (None, "dynamic", "static"):
            raise bad("cache_implementation", kind, "None, 'dynamic' or 'static'")
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() != 2:
            raise bad("attention_mask", f"shape {tuple(mask.shape)}", "[batch, tokens]")
        if given is None and generation_config.use_cache is not False:
            limit = max(max_cache_length, generation_config.max_cache_len or 0) if kind == "static" else None
            model_kwargs[CACHE_ARGUMENT] = self.new_cache(limit)
        elif given is not None:
            given._is_user_defined = True
        if self.plan.phased and mask is not None:
            model_kwargs["prompt_len"] = mask.sum(dim=1)  # padding is no prompt; without a mask there is none

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        cache, mask = inputs.get(CACHE_ARGUMENT), inputs.get("attention_mask")
        if isinstance(cache, HybridCache) and isinstance(mask, torch.Tensor):
            ids = inputs.get("input_ids")
            tokens = (ids if ids is not None else inputs["inputs_embeds"]).shape[1]
            inputs["attention_mask"] = mask[:, -tokens:]  # one shape per step: a compiled step is never recompiled
        return inputs
