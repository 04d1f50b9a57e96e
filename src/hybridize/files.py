"""The one writer: every artefact goes to a temporary name, is fsynced, then renamed over the old one.

A kill or a full disk at any point leaves either the old artefact or the new one, never half of one.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridize.errors import HybridizeError, bad

TEMPORARY = ".hybridize-tmp"
OLD = ".hybridize-old"


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write `data` to `path` atomically; the old file stays whole until the new one is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise HybridizeError(f"could not write {path}: {error}; the previous file, if any, is intact") from error
    return path


def write_text(path: str | Path, text: str) -> Path:
    return write_bytes(path, text.encode("utf-8"))


def dump_json(data: Any) -> str:
    """JSON with a stable layout: the same data gives the same bytes."""
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: str | Path, data: Any) -> Path:
    return write_text(path, dump_json(data))


def read_json(path: str | Path, what: str = "file") -> Any:
    """Read JSON written by us.

    Raises:
        HybridizeError: the file is missing, unreadable, truncated or not JSON.
    """
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise bad(what, str(path), "an existing file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HybridizeError(f"{what}: {path} is corrupted or truncated ({error})") from error


def check_format(data: Any, kind: str, version: int) -> dict[str, Any]:
    """Check an artefact's own header: {"format": kind, "format_version": version, ...}."""
    if not isinstance(data, dict) or data.get("format") != kind:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise bad("format", got, f"{kind!r}")
    if data.get("format_version") != version:
        raise bad(f"{kind}.format_version", data.get("format_version"), f"{version}, the version this release reads")
    return data


def replace_folder(temporary: Path, final: Path) -> None:
    """Put a finished temporary folder in the place of `final`, in one step where the system can exchange names."""
    if not final.exists():
        os.replace(temporary, final)
        return
    if not exchange_names(temporary, final):
        old = final.with_name(final.name + OLD)
        shutil.rmtree(old, ignore_errors=True)
        os.replace(final, old)
        os.replace(temporary, final)
        shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)


def exchange_names(a: Path, b: Path) -> bool:
    """Swap two names atomically (Linux renameat2); False where the system or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0


def recover_folder(final: Path) -> None:
    """Undo a kill between the two renames of `replace_folder`: put the old folder back under its name."""
    old = final.with_name(final.name + OLD)
    if old.exists() and not final.exists():
        os.replace(old, final)


def check_output_folder(path: str | Path, overwrite: bool) -> Path:
    """The rule for every output folder: new, empty, or `overwrite` asked for.

    Raises:
        HybridizeError: the path is a file, or a non-empty folder without `overwrite`.
    """
    path = Path(path)
    recover_folder(path)
    if path.is_file():
        raise bad("out", str(path), "a folder, this is a file")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise bad("out", str(path), "a new or empty folder (or pass --overwrite)")
    return path


def sync_tree(folder: Path) -> None:
    """fsync every file below `folder` (files that other libraries wrote into it)."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())


@contextmanager
def atomic_folder(final: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder to fill; on success it is fsynced and renamed to `final`, on failure removed.

    Raises:
        HybridizeError: `final` is not empty and `overwrite` is false, or the disk refused a write.
    """
    final = check_output_folder(final, overwrite)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(final.name + TEMPORARY)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        replace_folder(temporary, final)
    except OSError as error:
        raise HybridizeError(f"could not write {final}: {error}; the previous folder, if any, is intact") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
