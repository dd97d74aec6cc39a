"""Measure how much of a training step's speed `longseq train` reaches from JPEG files.

python benchmarks/files.py [--root FOLDER] [--decode cpu gpu] [--repeats 1 3] [--devices 1] [--updates 200]

Each row is a run of `longseq train` on the images of a folder, or on pictures that are made. Images per second and the
time that updates wait for data are those of the run. The bare step is timed before them on random pixels that lie on
the device.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np
import timm
from PIL import Image
from report import add_common_arguments, make_result, to_markdown, write_result

NAMES = 100_000  # files of an epoch, at least: hard links, so that the disk is not measured
WINDOW = 25  # updates between two figures of throughput; the first ones, which compile, do not count
NOTES = (
    "`images per s` and `data wait ms` (the time without a batch) are those of the run, after its first updates. `step "
    "per s`: the bare step, eager or compiled as the run, with bfloat16 autocast and fused AdamW on pixels that lie on "
    "the device. `of step`: the share of that speed that the run reaches.",
)


def make_pictures(folder: Path, count: int, size: tuple[int, int]) -> None:
    """Write JPEG files train/CLASS/*.jpg and val/CLASS/*.jpg of ten classes; the training files have several names."""
    for split, label in itertools.product(("train", "val"), range(10)):
        (folder / split / str(label)).mkdir(parents=True)
    with ProcessPoolExecutor() as pool:
        pictures = pool.map(partial(draw_picture, size=size), range(count), chunksize=16)
        for number, picture in enumerate(pictures):
            path = folder / "train" / str(number % 10) / f"{number}.jpg"
            path.write_bytes(picture)
            if number < 10:
                (folder / "val" / str(number) / f"{number}.jpg").write_bytes(picture)
            for copy in range(1, NAMES // count):
                os.link(path, path.with_stem(f"{number}_{copy}"))


def draw_picture(seed: int, size: tuple[int, int]) -> bytes:
    """A JPEG file like a photograph: smooth light, edges, textures of 1/f noise, and grain; about 0.2 bytes a pixel."""
    generator = np.random.default_rng(seed)
    height, width = size
    y, x = np.mgrid[:height, :width].astype(np.float32) / max(size)
    pixels = np.empty((height, width, 3), dtype=np.float32)
    for channel in range(3):
        light = generator.uniform(0.2, 0.8) + generator.uniform(-0.4, 0.4) * x + generator.uniform(-0.4, 0.4) * y
        pixels[..., channel] = light
    for _ in range(12):
        centre, radius = generator.uniform(0, 1, 2), generator.uniform(0.03, 0.3)
        inside = np.hypot(x - centre[0], (y - centre[1]) * generator.uniform(0.5, 2)) < radius
        pixels[inside] = 0.5 * pixels[inside] + 0.5 * generator.uniform(0, 1, 3)
    spectrum = np.fft.rfft2(generator.normal(size=size))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    texture = np.fft.irfft2(spectrum / np.maximum(frequency, 1 / max(size)), s=size)
    pixels += (0.12 / texture.std() * texture[..., None]).astype(np.float32)
    pixels += generator.normal(0, 0.01, pixels.shape).astype(np.float32)
    stream = io.BytesIO()
    Image.fromarray((255 * pixels).clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def time_step(keys: argparse.Namespace) -> float:
    """Images per second of a bare training step on one device."""
    make = partial(timm.create_model, f"longseq_vit_{keys.scale}_patch16_224", mixer=keys.mixer)
    return models.measure_image(make, 224, keys.batch, keys, keys.device)["training_images_per_s"]


def train(keys: argparse.Namespace, root: Path, folder: Path, decode: str, repeats: int, devices: int) -> Any:
    """The metrics of a run of `longseq train`."""
    words = [
        "data=imagenet",
        f"data.root={root}",
        f"data.decode={decode}",
        "model=vit",
        f"scale={keys.scale}",
        f"mixer={keys.mixer}",
        "recipe=vim",
        "recipe.epochs=null",
        f"recipe.updates={keys.updates}",
        "recipe.schedule.warmup_epochs=null",
        "recipe.schedule.warmup_updates=0",
        f"recipe.validate_every_updates={keys.updates}",
        f"recipe.batch_size={keys.batch * devices}",
        f"recipe.augment.repeats={repeats}",
        f"trainer.log_every_n_steps={min(WINDOW, keys.updates // 2)}",
        f"output={folder}",
        "trainer=cpu" if keys.device.type == "cpu" else "trainer=gpu" if devices == 1 else "trainer=ddp",
        *([] if devices == 1 else [f"trainer.devices={devices}"]),
        *([] if keys.compile is None else [f"compile={keys.compile}"]),
        *keys.overrides,
    ]
    subprocess.run([sys.executable, "-m", "longseq", "train", *words], check=True)
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="more keys of `longseq train`, such as data.num_workers=8")
    parser.add_argument("--root", type=Path, help="images in class folders; pictures are made if left out")
    parser.add_argument("--pictures", type=int, default=3000, help="pictures that are made")
    parser.add_argument("--picture-size", type=int, nargs=2, default=(375, 500), help="their height and width")
    parser.add_argument("--decode", nargs="+", default=["cpu"], choices=["cpu", "gpu"])
    parser.add_argument("--repeats", nargs="+", type=int, default=[3], help="as recipe.augment.repeats")
    parser.add_argument("--devices", nargs="+", type=int, default=[1], help="numbers of GPUs")
    parser.add_argument("--scale", default="tiny", choices=["tiny", "small"], help="size of longseq_vit_*_patch16_224")
    parser.add_argument("--mixer", default="deltanet")
    parser.add_argument("--batch", type=int, default=256, help="images of one device")
    parser.add_argument("--updates", type=int, default=200, help="updates of a run")
    parser.add_argument("--compile", help="mode of torch.compile")
    add_common_arguments(parser, seconds=4, output="files.json")
    keys = parser.parse_args()
    keys.classes, rows = 1000, []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        root = keys.root or Path(made, "images")
        if keys.root is None:
            make_pictures(root, keys.pictures, keys.picture_size)
        bare = time_step(keys)
        for number, (devices, decode, repeats) in enumerate(itertools.product(keys.devices, keys.decode, keys.repeats)):
            found = train(keys, root, Path(made, f"run{number}"), decode, repeats, devices)
            rows.append(
                {
                    "model": f"longseq_vit_{keys.scale}_patch16_224",
                    "mixer": keys.mixer,
                    "decode": decode,
                    "repeats": repeats,
                    "devices": devices,
                    "batch": keys.batch * devices,
                    "images_per_s": found["images_per_second"],
                    "data_wait_ms": found["data_wait_ms"],
                    "step_per_s": bare,
                    "of_step": round(found["images_per_second"] / (bare * devices), 3),
                }
            )
            result = make_result("Training from JPEG files", rows, keys.device, NOTES)
            write_result(result, keys.output)
    print(to_markdown(result))


if __name__ == "__main__":
    main()
