"""The count of images that could not be read."""

from lightning.pytorch import Callback, LightningModule, Trainer


class UnreadableImages(Callback):
    """Prints, at the end of fit and of test, how many images were skipped because they could not be read, and which."""

    def __init__(self, max_paths: int = 10) -> None:
        self.max_paths = max_paths

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        paths = list(trainer.datamodule.unreadable)  # type: ignore[attr-defined]
        if not paths:
            return
        shown = ", ".join(paths[: self.max_paths])
        more = f" and {len(paths) - self.max_paths} more" if len(paths) > self.max_paths else ""
        where = f" by process {trainer.global_rank}" if trainer.world_size > 1 else ""
        print(f"{len(paths)} unreadable image(s) skipped{where}: {shown}{more}", flush=True)
