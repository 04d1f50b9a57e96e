"""Results as the project keeps them: one JSON a run, flat rows, and all that is needed to run it again."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hybridize.files import write_json


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("hybridize", "torch", "transformers", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device_name() -> str:
    """The accelerator, or the processor."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def commit() -> str:
    """The checkout's commit, "+changes" where files differ from it, "unknown" outside a checkout."""
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def where() -> dict[str, Any]:
    """What numbers depend on beside the question: kept when a run starts, for it may be finished on another machine."""
    return {"device": device_name(), "versions": versions(), "commit": commit()}


def results(name: str, rows: Sequence[dict[str, Any]], command: str | None = None, **more: Any) -> dict[str, Any]:
    """{"name", "date", "device", "versions", "commit", "command", ..., "rows"}."""
    return {
        "name": name,
        "date": datetime.date.today().isoformat(),
        **where(),
        "command": command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        **more,
        "rows": list(rows),
    }


def quality_row(
    *,
    selector: str,
    operators: str,
    budget: float,
    window: int | None,
    sinks: int | None,
    decode: str,
    seed: int,
    method: str = "nll",
    **cell: Any,
) -> dict[str, Any]:
    """One flat row of a measured quality cell; `cell` has task, context, score, n, low, high."""
    return {
        "method": method,
        "selector": selector,
        "operators": operators,
        "budget": budget,
        "window": window,
        "sinks": sinks,
        "decode": decode,
        "seed": seed,
        "trained_tokens": 0,
        "component": "all",
        **cell,
    }


def write_results(path: str | Path, data: dict[str, Any]) -> Path:
    return write_json(path, data)
