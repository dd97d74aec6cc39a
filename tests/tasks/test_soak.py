"""A long run that is interrupted again and again: nothing grows. `pytest -m soak -s` runs it, in some minutes."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

EPOCHS, STOPS = 400, 10
FIRST_LEG = 200  # epochs of one process, in which a leak would show


class Usage(NamedTuple):
    """The resources of a process."""

    megabytes: float
    threads: int
    files: int
    children: int


def usage(pid: int) -> Usage:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Usage(int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), files, len(children))


def epoch_of(path: Path) -> int:
    """The epochs of a checkpoint, which its writer replaces as a whole."""
    return torch.load(path, weights_only=True)["epoch"] if path.is_file() else -1


def write_images(root: Path) -> None:
    random = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 8)):
        for label in range(2):
            folder = root / split / str(label)
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(0, 256, (256, 256, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")


@pytest.mark.soak
def test_four_hundred_epochs_and_ten_interruptions_leave_nothing_behind(tmp_path, start, tiny_overrides):
    write_images(tmp_path / "images")
    arguments = ["train", "data=image_folder", "recipe=digits", "data.root=images", "data.img_size=160"]
    arguments += [*tiny_overrides, "model.depth=1", "recipe.batch_size=8", "data.num_workers=1", "resume=true"]
    arguments += [f"recipe.epochs={EPOCHS}", "trainer.log_every_n_steps=1", "model.patch_size=40"]
    stops = [FIRST_LEG + number * (EPOCHS - FIRST_LEG) // STOPS for number in range(STOPS)]
    report: list[dict[str, Any]] = []
    sizes, seconds = [], []
    for stop in [*stops, None]:
        began = time.monotonic()
        process = start(tmp_path, *arguments)
        seen: list[tuple[int, Usage]] = []
        while process.poll() is None:
            (last,) = [*tmp_path.glob("outputs/image/*/checkpoints/last.ckpt")] or [tmp_path / "none"]
            epoch = epoch_of(last)
            if epoch >= 0 and (not seen or epoch >= seen[-1][0] + 10):
                seen.append((epoch, usage(process.pid)))
            if stop is not None and epoch >= stop:
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.1)
        _, errors = process.communicate(timeout=200)
        assert process.returncode == (0 if stop is None else 143), errors
        seconds.append(time.monotonic() - began)
        sizes.append(last.stat().st_size)
        report.append({"stopped_at": stop, "seconds": round(seconds[-1], 1), "usage": [seen[:2][-1], seen[-1]]})
        run = last.parents[1]
        assert {path.name for path in last.parent.iterdir()} == {"best.ckpt", "last.ckpt"}
        assert not (run / "run.lock").exists()

    metrics = json.loads((run / "metrics.json").read_text())
    events = [path.stat().st_size for path in run.glob("events.*")]
    print(json.dumps({"legs": report, "metrics": metrics["seconds"], "event_bytes": sum(events), "checkpoints": sizes}))
    assert metrics["epochs"] == EPOCHS
    # Of all legs, without the start of each process.
    assert 2 * seconds[-1] < metrics["seconds"] < sum(seconds)
    # From the second reading on: the first epochs still import and allocate.
    early, late = report[0]["usage"][0][1], report[0]["usage"][1][1]
    assert late.megabytes < 1.1 * early.megabytes
    assert late.threads <= early.threads + 1
    assert late.files <= early.files + 2
    assert late.children == early.children
    for leg in report[1:]:
        held = leg["usage"][-1][1]
        assert held.megabytes < 1.15 * late.megabytes
        assert held.threads <= late.threads + 1
    assert max(sizes) < 1.02 * min(sizes)
    assert len(events) <= STOPS + 1
    # Three kinds of pictures of 1.65 MB together (the images are noise, which PNG does not compress): about 20 of each
    # in 400 epochs, whether there are stops or not.
    assert sum(events) < 40e6
    assert len(list(tmp_path.glob("outputs/image/*"))) == 1
