"""Run folders: what a command was asked, what it has finished, and how it goes on after a kill."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hybridize.errors import HybridizeError, bad
from hybridize.files import check_format, check_output_folder, dump_json, read_json, replace_folder, sync_tree, write_json
from hybridize.results import where

FORMAT, FORMAT_VERSION = "hybridize-run", 1
TRAINING = "training"  # checkpoints, and what a finished stage trained
SCRATCH = ("steps", TRAINING)  # in this order: a step that is there can count on its files


class RunFolder:
    """A command's output folder, worked on under `OUT.partial` and renamed to `OUT` when everything in it is complete.

    Finished steps are files, so the same command started again goes on where a kill stopped it, and gives the same bytes.

    Args:
        out: the folder that will exist at the end.
        config: what was asked; a partial folder of another question is not continued.
        overwrite: replace a folder that is not empty, and start over a partial one of another question.

    Raises:
        HybridizeError: `out` is not empty, or a partial run of another question is there, without `overwrite`.
    """

    def __init__(self, out: str | Path, config: dict[str, Any], overwrite: bool = False) -> None:
        self.out = check_output_folder(out, overwrite)
        self.overwrite = overwrite
        self.path = self.out.with_name(self.out.name + ".partial")
        config = json.loads(dump_json(config))  # as a partial folder's question reads: tuples are lists there
        self.config = config
        self.seconds: dict[str, float] = {}
        self.asked = asked = {"format": FORMAT, "format_version": FORMAT_VERSION, "config": config}
        if (self.path / "run.json").exists():
            found = check_format(read_json(self.path / "run.json", "run"), FORMAT, FORMAT_VERSION)
            if found != asked:
                if not overwrite:
                    field, got, expected = first_difference(asked["config"], found["config"])
                    raise bad(
                        field,
                        got,
                        f"{expected!r}, as the unfinished run in {self.path} has (continue it as it was, or pass --overwrite "
                        "to start anew)",
                    )
                shutil.rmtree(self.path)
        elif self.path.exists():
            shutil.rmtree(self.path)  # killed before its first file: nothing to lose
        self.resumed = self.path.exists()

    def begin(self) -> None:
        """Make the folder, when the first thing is about to be written: a refused question leaves nothing behind."""
        if not (self.path / "run.json").exists():
            write_json(self.path / "where.json", where())
            write_json(self.path / "run.json", self.asked)
            self.log(f"started: {self.config}")

    @property
    def where(self) -> dict[str, Any]:
        """Device, versions and commit of the machine that began the run: another one may finish it."""
        path = self.path / "where.json"
        return read_json(path, "where") if path.exists() else where()

    def log(self, text: str) -> None:
        """Append a line with the time to log.txt."""
        with open(self.path / "log.txt", "a", encoding="utf-8") as handle:
            handle.write(f"{datetime.datetime.now().isoformat(timespec='seconds')} {text}\n")

    def has(self, name: str) -> bool:
        """Whether a step was finished, now or before a kill."""
        return (self.path / "steps" / f"{name}.json").exists()

    def step(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of a step: from its file where it was finished before, else made, written and timed."""
        path = self.path / "steps" / f"{name}.json"
        if path.exists():
            done = read_json(path, f"step {name}")
        else:
            start = time.perf_counter()
            data = make()
            done = {"seconds": time.perf_counter() - start, "data": data}
            self.begin()
            write_json(path, done)
            self.log(f"step {name}: {done['seconds']:.1f} s")
        self.seconds[name] = done["seconds"]
        return done["data"]

    def finish(self) -> Path:
        """Drop step files and checkpoints, sync everything, and rename the partial folder to `out`."""
        self.begin()
        self.log("finished")
        for scratch in SCRATCH:
            shutil.rmtree(self.path / scratch, ignore_errors=True)
        try:
            sync_tree(self.path)
            if self.out.is_dir() and not any(self.out.iterdir()):
                os.rmdir(self.out)
            replace_folder(self.path, self.out)
        except OSError as error:
            raise HybridizeError(f"could not finish {self.out}: {error}; the work so far is in {self.path}") from error
        return self.out


def first_difference(mine: Any, theirs: Any, field: str = "") -> tuple[str, Any, Any]:
    """(name, mine, theirs) of the first field in which two nested questions differ."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted({*mine, *theirs}):
            if mine.get(key) != theirs.get(key):
                return first_difference(mine.get(key), theirs.get(key), f"{field}.{key}" if field else key)
    return field or "run", mine, theirs


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep transformers' own bars and notices out of ours."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
