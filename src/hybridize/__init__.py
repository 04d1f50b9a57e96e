"""hybridize: turn a pretrained full-attention LLM into an efficient long-context hybrid."""

from hybridize.cache import HybridCache
from hybridize.conversion import convert, to_base
from hybridize.errors import HybridizeError
from hybridize.families import register
from hybridize.geometry import geometry_of
from hybridize.operators.specs import Full, Gated, Indexed, Linear, SnapKV, Window
from hybridize.plan import AttentionPlan, Geometry
from hybridize.scores import Scores

__version__ = "0.1.0"
__all__ = [
    "AttentionPlan",
    "Full",
    "Gated",
    "Geometry",
    "HybridCache",
    "HybridizeError",
    "Indexed",
    "Linear",
    "Scores",
    "SnapKV",
    "Window",
    "convert",
    "geometry_of",
    "to_base",
]

register()
