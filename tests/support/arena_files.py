"""Small files in the formats that Long Range Arena publishes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image


def write_arena(name: str, root: Path) -> tuple[int, list[str]]:
    """Write what the experiment `name` reads; return a batch size in tokens, and the overrides that name the files."""
    task = name.removeprefix("document/")
    if task == "lra_listops":
        return 128, ["data.options={train: 100, validation: 4, test: 4, shortest: 9, longest: 40}"]
    if task == "lra_image":
        write_cifar10(root)
    elif task == "lra_retrieval":
        write_pairs(root)
    elif task == "lra_pathfinder":
        write_paths(root)
    else:
        write_reviews(root)
    return 2048 if task == "lra_image" else 128, [f"data.root={root}"]


def write_reviews(root: Path) -> None:
    """Files of imdb's form with two labels."""
    root.mkdir()
    for split in ("train", "test"):
        rows = [{"text": f"{split} {index} " + ["bad", "good"][index % 2], "label": index % 2} for index in range(40)]
        (root / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_cifar10(root: Path) -> np.ndarray:
    """Ten classes of 6 training images and one test image each, as folders; the test images, in grey."""
    random, kept = np.random.default_rng(0), []
    for split, count in (("train", 6), ("test", 1)):
        for label in range(10):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
                if split == "test":
                    kept.append(pixels @ np.array([0.299, 0.587, 0.114]))
    return np.stack(kept)


def write_pairs(root: Path, count: int = 12) -> None:
    root.mkdir()
    for split in ("train", "eval", "test"):
        lines = [
            f'{index % 2}.0\tP{index}\tQ{index}\ta "text" {split} {index}\tété {split} {index}'
            for index in range(count)
        ]
        (root / f"new_aan_pairs.{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_paths(root: Path, count: int = 30, size: int = 8) -> None:
    """A folder of one resolution, with one difficulty of `count` images, of which one is an empty file."""
    random = np.random.default_rng(0)
    folder = root / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    (folder / "imgs" / "0").mkdir(parents=True)
    lines = []
    for index in range(count):
        path = folder / "imgs" / "0" / f"sample_{index}.png"
        if index == 3:
            path.touch()
        else:
            level = 10 + index if index % 2 else 110 + index
            Image.fromarray(np.full((size, size), level, np.uint8)).save(path)
        lines.append(f"imgs/0 sample_{index}.png {index} {index % 2} {random.random():.3f}")
    (folder / "metadata" / "0.npy").write_text("\n".join(lines) + "\n")
