"""Data workers that are new processes, as in Python 3.14, and no forks of the run; and workers without memory."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import make_rows, write_jsonl
from forked import run_longseq, start_fork

# Runs commands, one in each line of the input, in a process whose own processes begin anew. The other packages are
# imported once for all of them, which takes seconds; what is ours each of them imports.
PROGRAM = """
import multiprocessing, shlex, sys
from longseq.tools import cli

multiprocessing.set_start_method("forkserver")
multiprocessing.set_forkserver_preload(["lightning.pytorch", "sklearn", "timm", "tokenizers", "torchmetrics"])
for line in sys.stdin.read().splitlines():
    sys.argv = ["longseq", *shlex.split(line)]
    try:
        code = cli.main()
    except SystemExit as left:
        code = left.code
    if code:
        sys.exit(code)
"""

SHORT = "trainer=cpu recipe.epochs=null recipe.updates=3 recipe.validate_every_updates=3 callbacks.telemetry=null"
SMALL = (
    "model.d_model=16 model.depth=1 data.validation=0.2 data.test=0.2 data.root=rows.jsonl data.cache=cache "
    "recipe.batch_size=512"
)
RUNS = {
    "lm": f"task=lm data=text data.window=16 callbacks.text_samples=null {SMALL}",
}


@pytest.mark.slow
def test_workers_that_begin_anew_read_what_the_run_itself_reads(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", make_rows(90))
    lines = [
        f"train mixer=linear_attention {SHORT} {words} data.num_workers={workers} output={name}{workers}"
        for name, words in RUNS.items()
        for workers in (0, 1)
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="\n".join(lines),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in RUNS:
        alone, sent = (json.loads((tmp_path / f"{name}{workers}" / "metrics.json").read_text()) for workers in (0, 1))
        measured = [key for key in alone if key.startswith(("train/", "val/", "test/"))]
        assert measured
        assert {key: alone[key] for key in measured} == {key: sent[key] for key in measured}


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
