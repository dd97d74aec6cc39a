"""Data workers without memory."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from forked import run_longseq, start_fork


def run_with_little_shared_memory() -> int:
    """Run `longseq`, whose files, also those of shared memory, have at most 128 KiB; the images of a batch are 1 MB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as in a new process of Python
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, resource.RLIM_INFINITY))
    return run_longseq()


@pytest.mark.slow
def test_a_run_ends_if_its_workers_have_too_little_shared_memory(
    command: Any, image_folder: Path, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    words = ("data=image_folder", f"data.root={image_folder}", "data.img_size=224", "model.patch_size=56")
    train = ("train", *tiny_overrides, *words, "recipe.batch_size=8", "recipe.epochs=1", "callbacks.telemetry=null")
    done = command(tmp_path, *train, "data.num_workers=0", "output=run")
    assert done.returncode == 0, done.stderr
    predict = ("predict", "checkpoint=run/checkpoints/best.ckpt", f"input={image_folder}", "output=predictions.csv")
    for limited in ((*train, "data.num_workers=2", "output=limited"), (*predict, "num_workers=2")):
        process = start_fork(limited, tmp_path, run=run_with_little_shared_memory)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 2
        *_, last = errors.splitlines()
        assert last.startswith("longseq: error: ")
        assert "Traceback" not in errors
        assert "File too large" in last
