"""Which implementation runs: the Triton kernels where they can, the torch reference where not; said once, never silently.

`HYBRIDIZE_KERNELS` is "auto" (kernels on a CUDA device), "reference", or "triton" (an error where they cannot run; also how
tests run them on a CPU, in Triton's interpreter).
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import logging

from hybridize.errors import HybridizeError, bad

logger = logging.get_logger(__name__)
MODES = ("auto", "reference", "triton")
CUDNN_FROM = 4096
CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
HEAD_DIMS = "a multiple of 8 from 16 to 256"
INDEX_BLOCKS = (16, 32, 64, 128)  # of indexed attention


def head_dim_fits(head_dim: int) -> bool:
    return 16 <= head_dim <= 256 and head_dim % 8 == 0


def index_tile_fits(dtype: torch.dtype, head_dim: int, block: int) -> bool:
    """Whether keys of a chosen block, padded to a power of 2, are few enough for a program's memory: 64 KiB."""
    return block * 2 ** (head_dim - 1).bit_length() * dtype.itemsize <= 1 << 16


def mode() -> str:
    """The user's choice.

    Raises:
        HybridizeError: HYBRIDIZE_KERNELS is none of MODES.
    """
    chosen = os.environ.get("HYBRIDIZE_KERNELS", "auto")
    if chosen not in MODES:
        raise bad("HYBRIDIZE_KERNELS", chosen, f"one of {MODES}")
    return chosen


LOADED: dict[str, Any] = {}
PROVEN: dict[tuple[Any, ...], str | None] = {}


def load(name: str) -> Any:
    """A module of kernels, or None where Triton, or hybridize beside remote code, is not installed."""
    if name not in LOADED:
        try:
            LOADED[name] = importlib.import_module(f"hybridize.kernels.{name}")
        except ImportError:
            LOADED[name] = None
    return LOADED[name]


def prepare() -> None:
    """Load the kernels where they may be asked for: a graph that is being traced cannot import them."""
    if mode() == "triton" or (mode() == "auto" and torch.cuda.is_available()):
        for name in ("window", "decode", "rotary", "matvec", "indexed", "opened", "proof"):
            load(name)


def keeps_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def kernels_for(name: str, q: Tensor, dropout: float = 0.0, lacks: str | None = None) -> Any:
    """The module of kernels to run for queries q [B, H, T, D], or None: run the reference.

    `lacks`: what is asked for that these kernels do not have.

    Raises:
        HybridizeError: HYBRIDIZE_KERNELS=triton, and they cannot run.
    """
    chosen = mode()
    if chosen == "reference" or (chosen == "auto" and q.device.type != "cuda"):
        return None
    reason = lacks or _why_not(name, q, dropout)
    if reason is None:
        return load(name)
    if chosen == "triton":
        raise HybridizeError(f"HYBRIDIZE_KERNELS: got 'triton', but {reason}")
    logger.warning_once(f"hybridize: plain torch runs instead of the {name} kernel: {reason}")
    return None


def dense_backends(q: Tensor, dropout: float = 0.0) -> AbstractContextManager[Any]:
    """Which of SDPA's backends full attention of queries q [B, H, T, D] runs on.

    The rule, from results/speed_window_h200.json: cuDNN's for prompts of CUDNN_FROM tokens and more in half precision on a
    Hopper GPU; else whatever PyTorch picks, which is what transformers runs.
    """
    if not _prefers_cudnn(q, dropout):
        return nullcontext()
    logger.info_once(f"hybridize: full attention of {CUDNN_FROM} tokens and more runs on cuDNN's SDPA")
    return sdpa_kernel(CUDNN_FIRST, set_priority=True)


def _prefers_cudnn(q: Tensor, dropout: float) -> bool:
    half = q.dtype in (torch.bfloat16, torch.float16)
    if q.device.type != "cuda" or q.shape[2] < CUDNN_FROM or q.shape[-1] > 128 or not half or dropout or mode() == "reference":
        return False
    return torch.cuda.get_device_capability(q.device)[0] == 9


def _why_not(name: str, q: Tensor, dropout: float) -> str | None:
    if load(name) is None:
        return "the kernels need the triton and hybridize packages"
    if not head_dim_fits(q.shape[-1]):
        return f"head_dim is {q.shape[-1]}, the kernels take {HEAD_DIMS}"
    if dropout:
        return "the kernels have no attention dropout"
    if q.dtype == torch.float32 and q.device.type == "cuda" and keeps_gradients(q):
        return "their fp32 backward takes minutes to compile (autocast to bf16, and it is compiled in seconds)"
    return _proven(q)


def _proven(q: Tensor) -> str | None:
    """Why kernels are not to be trusted with such queries; found out once, outside of any traced graph."""
    key = (q.device, q.dtype, q.shape[-1])
    if key not in PROVEN:
        if torch.compiler.is_compiling():
            return None  # the eager prefill before it found out, or nothing has run yet
        PROVEN[key] = load("proof").why_wrong(*key)
    return PROVEN[key]
