"""Recall watched while a stage trains, its best step kept: later tuning can destroy recall (arXiv 2606.11052)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hybridize.files import read_json, write_json

WATCHED = "watched.json"


class Watch(TrainerCallback):
    """Calls `recall` every `every` steps and at the end; `save(path)` writes what is trained, whenever it is the best so far.

    What is in the folder goes on after a kill, to the same files.
    """

    def __init__(
        self, folder: Path, every: int, steps: int, recall: Callable[[], float], save: Callable[[Path], None]
    ) -> None:
        self.folder, self.every, self.steps, self.recall, self.save = folder, every, steps, recall, save
        found = folder / WATCHED
        self.values: dict[int, float] = {int(k): v for k, v in read_json(found, WATCHED).items()} if found.exists() else {}

    @property
    def best(self) -> int | None:
        """The first of the steps with the highest recall."""
        return max(sorted(self.values), key=lambda step: self.values[step], default=None)

    def file(self, step: int) -> Path:
        return self.folder / f"best-{step}.safetensors"

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.values = {step: value for step, value in self.values.items() if step <= state.global_step}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        if step % self.every and step != self.steps:
            return
        value = self.recall()  # every process, since a sharded model answers as one
        if self.best is None or value > self.values[self.best]:
            self.save(self.file(step))
        self.values[step] = value
        if state.is_world_process_zero:
            write_json(self.folder / WATCHED, self.values)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:  # a kill goes back no further than this
            for old in self.folder.glob("best-*.safetensors"):
                if self.best is None or old != self.file(self.best):
                    old.unlink()


def settled(watch: Watch, load: Callable[[Path], None]) -> dict[str, Any]:
    """Bring the weights of the best step back; what is kept of the watching."""
    best = watch.best
    assert best is not None
    if best != watch.steps:
        load(watch.file(best))
    return {"recall": [[step, watch.values[step]] for step in sorted(watch.values)], "best_step": best}
