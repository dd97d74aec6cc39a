"""The samples that could not be read."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from longseq.tasks.training.files import write_text


class UnreadableSamples(Callback):
    """Prints, after the test, how many samples were skipped as unreadable, and the first `max_paths` of them.

    `folder/unreadable.txt` lists them all, one path per line. `unit` names the samples.
    """

    def __init__(self, max_paths: int = 10, folder: str | None = None, unit: str = "samples") -> None:
        self.max_paths, self.unit = max_paths, unit
        self.path = None if folder is None else Path(folder) / "unreadable.txt"

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        paths = self._write(trainer)
        if paths and trainer.is_global_zero:
            more = ", ..." if len(paths) > self.max_paths else ""
            print(
                f"skipped unreadable {self.unit}: {len(paths)} ({', '.join(paths[: self.max_paths])}{more})", flush=True
            )

    def _write(self, trainer: Trainer) -> list[str]:
        """Write the paths of all processes, and those of the run before an interruption."""
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        parts: list[list[str]] = [list(datamodule.unreadable)]
        if trainer.world_size > 1:
            parts = [[] for _ in range(trainer.world_size)]
            torch.distributed.all_gather_object(parts, list(datamodule.unreadable))
        found = {path for part in parts for path in part}
        if self.path is not None and self.path.is_file():
            found.update(self.path.read_text(encoding="utf-8").splitlines())
        if found and self.path is not None and trainer.is_global_zero:
            write_text(self.path, "".join(f"{path}\n" for path in sorted(found)))
        return sorted(found)
