"""The samples that could not be read."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from longseq.tasks.training.files import write_text


class UnreadableSamples(Callback):
    """Prints, after the test, how many samples of the run were skipped as unreadable, which, and why.

    `folder/unreadable.txt` lists them all, one path per line, from the end of fit on. `unit` names the samples.
    """

    FILES = ("unreadable.txt",)

    def __init__(self, max_paths: int = 10, folder: str | None = None, unit: str = "samples") -> None:
        self.max_paths, self.unit = max_paths, unit
        self.path = None if folder is None else Path(folder) / self.FILES[0]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = self._write(trainer)
        if not found or not trainer.is_global_zero:
            return
        paths = list(found)
        shown = "; ".join(f"{path}: {found[path]}" if found[path] else path for path in paths[: self.max_paths])
        more = f" and {len(paths) - self.max_paths} more" if len(paths) > self.max_paths else ""
        listed = f"; all in {self.path}" if more and self.path is not None else ""
        print(f"skipped unreadable {self.unit}: {len(paths)} ({shown}{more}{listed})", flush=True)

    def _write(self, trainer: Trainer) -> dict[str, str]:
        """Write the paths of all processes, and those of the run before an interruption; return them with the reasons.

        Reasons are those of this run, and of a data module that has them.
        """
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        own = getattr(datamodule, "unreadable_reasons", dict.fromkeys(datamodule.unreadable, ""))
        found = _of_all_processes(trainer, own)
        if self.path is not None and self.path.is_file():
            earlier = self.path.read_text(encoding="utf-8").splitlines()
            found = {**dict.fromkeys(earlier, ""), **found}
        found = dict(sorted(found.items()))
        if found and self.path is not None and trainer.is_global_zero:
            write_text(self.path, "".join(f"{path}\n" for path in found))
        return found


def _of_all_processes(trainer: Trainer, own: dict[str, str]) -> dict[str, str]:
    if trainer.world_size == 1:
        return own
    gathered: list[dict[str, str]] = [{} for _ in range(trainer.world_size)]
    torch.distributed.all_gather_object(gathered, own)
    return {path: reason for part in gathered for path, reason in part.items()}
