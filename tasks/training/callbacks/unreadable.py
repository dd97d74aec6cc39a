"""The samples that could not be read."""

from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from longseq.tasks.training.files import write_text


class UnreadableSamples(Callback):
    """Prints, after the test, how many samples of the run were skipped as unreadable, and which.

    `folder/unreadable.txt` lists them all, one path per line, from the end of fit on. `unit` names the samples.
    """

    FILES = ("unreadable.txt",)

    def __init__(self, max_paths: int = 10, folder: str | None = None, unit: str = "samples") -> None:
        self.max_paths, self.unit = max_paths, unit
        self.path = None if folder is None else Path(folder) / self.FILES[0]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        paths = self._write(trainer)
        if not paths or not trainer.is_global_zero:
            return
        shown = ", ".join(paths[: self.max_paths])
        more = f" and {len(paths) - self.max_paths} more" if len(paths) > self.max_paths else ""
        listed = f"; all in {self.path}" if more and self.path is not None else ""
        print(f"skipped unreadable {self.unit}: {len(paths)} ({shown}{more}{listed})", flush=True)

    def _write(self, trainer: Trainer) -> list[str]:
        """Write and return the paths of all processes, and those of the run before an interruption."""
        paths = set(_of_all_processes(trainer, list(trainer.datamodule.unreadable)))  # type: ignore[attr-defined]
        if self.path is not None and self.path.is_file():
            paths.update(self.path.read_text(encoding="utf-8").splitlines())
        listed = sorted(paths)
        if listed and self.path is not None and trainer.is_global_zero:
            write_text(self.path, "".join(f"{path}\n" for path in listed))
        return listed


def _of_all_processes(trainer: Trainer, paths: list[str]) -> list[str]:
    if trainer.world_size == 1:
        return paths
    gathered: list[list[str]] = [[] for _ in range(trainer.world_size)]
    torch.distributed.all_gather_object(gathered, paths)
    return [path for part in gathered for path in part]
