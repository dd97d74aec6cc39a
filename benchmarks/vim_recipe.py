"""Train an ImageNet folder with Vim's recipe on one GPU and on more, and write vim_recipe.json.

python benchmarks/vim_recipe.py [OUTPUT.json [DEVICES ...]] [updates=200] [pictures=3000] [decodes=cpu,gpu]

The folder has the layout and the file size of ImageNet's; its pictures are made. Each row is a run of `longseq train`,
by default on 1 GPU and on all, with each `data.decode`. The bare step of one GPU is measured before them (`longseq
benchmark files`).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from command import run_script
from hydra import compose, initialize_config_module

from longseq.tasks.training.configuration import read_command
from longseq.tasks.training.runs import METRICS_FILE
from longseq.tools.benchmark.files import Bench, FilesKeys, make_pictures
from longseq.tools.benchmark.report import add_circumstances

HERE = Path(__file__).parent
MODEL = {"model": "longseq_small_patch16_224", "mixer": "longhorn"}
NAMES = 108_000  # at most, of files that have several each: an epoch has more batches than a run
BATCH, WINDOW = 256, 25
COMPILE = "compile=reduce-overhead"
OPTIONS = {"updates": "200", "pictures": "3000", "decodes": "cpu,gpu"}


def recipe(decode: str, updates: int) -> list[str]:
    """The words of a run of `longseq train`, but for its folders and devices."""
    return [
        "data=imagenet",
        f"data.decode={decode}",
        "scale=small",
        f"mixer={MODEL['mixer']}",
        "recipe=vim",
        "recipe.epochs=null",
        f"recipe.updates={updates}",
        "recipe.schedule.warmup_epochs=null",
        f"recipe.schedule.warmup_updates={updates // 4}",
        f"recipe.validate_every_updates={updates}",
        f"trainer.log_every_n_steps={WINDOW}",
        "logger=csv",
        COMPILE,
    ]


def make_folder(root: Path, pictures: int) -> None:
    make_pictures(root, pictures, (375, 500))
    for picture in list((root / "train").rglob("*.jpg")):
        for number in range(1, NAMES // pictures):
            os.link(picture, picture.with_name(f"{picture.stem}_{number}.jpg"))


def time_step(root: Path) -> int:
    """Images a second of the bare step on one GPU."""
    with initialize_config_module("longseq.conf", version_base="1.3"):
        keys = read_command(FilesKeys, compose("benchmark_files", [COMPILE, f"root={root}", f"batch={BATCH}"]))
    return Bench(keys, str(root), torch.device("cuda")).step(MODEL)["images_per_s"]


def train(root: Path, devices: int, decode: str, updates: int) -> dict[str, Any]:
    """The figures of a run, from its metrics.json."""
    folder = root.with_name(f"run_{devices}_{decode}")
    trainer = ["trainer=gpu"] if devices == 1 else ["trainer=ddp", f"trainer.devices={devices}"]
    own = [f"data.root={root}", f"output={folder}", f"recipe.batch_size={BATCH * devices}"]
    words = [*own, *recipe(decode, updates), *trainer]
    subprocess.run([sys.executable, "-m", "longseq", "train", *words], cwd=root.parent, check=True)
    metrics = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    return {name: metrics[name] for name in ("images_per_second", "data_wait_ms", "gpu_memory_gib", "seconds")}


def read_words(words: list[str]) -> tuple[Path, list[int], int, int, list[str]]:
    """The output, the numbers of GPUs, the updates of a run, the pictures, and the kinds of decoding."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    rest = [word for word in words if "=" not in word]
    if unknown := sorted(set(given) - set(OPTIONS)):
        raise ValueError(f"there is no {unknown[0]}=: the options are {', '.join(OPTIONS)}")
    options = {**OPTIONS, **given}
    output = Path(rest[0]) if rest else HERE / "vim_recipe.json"
    counts = [int(word) for word in rest[1:]] or sorted({1, torch.cuda.device_count()})
    return output, counts, int(options["updates"]), int(options["pictures"]), options["decodes"].split(",")


def main() -> None:
    output, counts, updates, pictures, decodes = read_words(sys.argv[1:])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        root = Path(made, "imagenet")
        make_folder(root, pictures)
        bare = time_step(root)
        for devices, decode in itertools.product(counts, decodes):
            found = train(root, devices, decode, updates)
            share = round(found["images_per_second"] / (bare * devices), 3)
            head = {**MODEL, "decode": decode, "gpus": devices, "batch": BATCH * devices, "updates": updates}
            rows.append({**head, **found, "step_per_s": bare, "of_step": share})
            write(output, rows, pictures, updates)


def write(output: Path, rows: list[dict[str, Any]], pictures: int, updates: int) -> None:
    result = {
        "what": "Vim's recipe on an ImageNet folder",
        "command": "python benchmarks/vim_recipe.py",
        "kind": "speed",
        "rows": add_circumstances(rows, torch.device("cuda")),
        "notes": [
            f"`longseq train {' '.join(recipe('DECODE', updates))}`, {BATCH} images "
            "for each GPU at 224 pixels, each drawn three times, from JPEG "
            f"files of 500 x 375 pixels ({NAMES // pictures * pictures} names of {pictures} pictures: the disk is not "
            "measured). Images a "
            f"second of all GPUs, after the first {WINDOW} updates, which compile. `data wait ms` is how long the GPU "
            "had nothing to do because a batch was not there.",
            "`step per s`: images a second of the step of `longseq benchmark files` on one GPU, on pixels that lie "
            "there, without the average of the weights and drop path; `of step`: the share that the run reaches, of as "
            "many steps as there are GPUs.",
        ],
    }
    output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main, __doc__, gpu="trains on GPUs")
