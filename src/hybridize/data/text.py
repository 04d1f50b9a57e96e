"""Text from the bundled books, the user's files or a hub data set, as a list of documents."""

from __future__ import annotations

import json
import lzma
from importlib import resources
from pathlib import Path
from typing import Any

from hybridize.errors import HybridizeError, bad

# Shelley, Frankenstein (1818) and Wells, The Time Machine (1895); Poe, Arthur Gordon Pym (1838): two parts, so that
# nothing a method was calibrated on is ever evaluated on
BUNDLED = ("calibration", "evaluation")


def bundled_text(part: str) -> str:
    """One part of the bundled public-domain text: "calibration" (0.6 MB) or "evaluation" (0.4 MB)."""
    if part not in BUNDLED:
        raise bad("part", part, f"one of {BUNDLED}")
    data = resources.files("hybridize.data").joinpath(f"{part}.txt.xz").read_bytes()
    return lzma.decompress(data).decode("utf-8")


def load_text(source: str, field: str = "text", split: str = "train") -> list[str]:
    """Documents from `source`.

    Args:
        source: "calibration" or "evaluation" (bundled), a .txt file (one document), a .jsonl file (one a line, under
            `field`; chat `messages` are joined), or `hub:NAME` for a data set read with the datasets library.
        field: the text field of a jsonl file or data set.
        split: the split of a hub data set.

    Raises:
        HybridizeError: no such file, an unknown kind, a broken line (its number is named), or no text at all.
    """
    if source in BUNDLED:
        return [bundled_text(source)]
    if source.startswith("hub:"):
        return _from_hub(source[4:], field, split)
    path = Path(source)
    if not path.is_file():
        raise bad("text", source, "'calibration', 'evaluation', an existing .txt or .jsonl file, or hub:NAME")
    if path.suffix == ".txt":
        documents = [path.read_text(encoding="utf-8")]
    elif path.suffix == ".jsonl":
        documents = [_line(line, field, path, i) for i, line in enumerate(path.open(encoding="utf-8"), 1) if line.strip()]
    else:
        raise bad("text", source, "a .txt or .jsonl file")
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise bad("text", source, "at least one document that is not empty")
    return documents


def _line(line: str, field: str, path: Path, number: int) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise HybridizeError(f"text: {path} line {number} is not JSON ({error})") from None
    return _row_text(row, field, f"{path} line {number}")


def _row_text(row: Any, field: str, where: str) -> str:
    if isinstance(row, dict) and isinstance(row.get(field), str):
        return row[field]
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return "\n\n".join(str(message.get("content", "")) for message in row["messages"])
    got = sorted(row) if isinstance(row, dict) else type(row).__name__
    raise bad(f"text: {where}", got, f"a string field {field!r} or a list 'messages'")


def _from_hub(name: str, field: str, split: str) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise HybridizeError("text: hub data sets need the datasets library: pip install 'hybridize[train]'") from None
    rows = load_dataset(name, split=split)
    return [_row_text(row, field, f"{name} row {i}") for i, row in enumerate(rows)]
