"""Pack CIFAR-10 into six lossless pictures, for a machine without network, and unpack them there.

python benchmarks/cifar10_data.py pack FOLDER PICTURES      FOLDER: train/ and val/ (or test/), a folder for each class
python benchmarks/cifar10_data.py unpack PICTURES FILE.npz

Pixels, order and labels are those of `data=cifar10 data.root=FOLDER`, so that a run on FILE.npz (`entry.py`) draws the
same images as `longseq train` on FOLDER. PICTURES may be several folders, separated by commas, if the six pictures
(about 17 MB each) were copied separately.
"""

from __future__ import annotations

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from command import run_script
from PIL import Image

from longseq.tasks.image.sources import Source, cifar10

SIDE = 32  # pixels of an image
ACROSS = 100  # images in a row of a picture, and the number of rows
INDEX = "cifar10.json"


def pack(folder: str, pictures: Path) -> None:
    """Write the pictures, and a file with the labels, class names and a digest of the pixels."""
    splits = cifar10(folder, download=False, val_fraction=0.5, split_seed=0)  # any split: the sources have all images
    sources = (splits.train.source, splits.test.source)
    images, labels = zip(*map(read, sources), strict=True)
    pixels = np.concatenate(images)
    pictures.mkdir(parents=True, exist_ok=True)

    def write(number: int) -> None:
        block = pixels[number * ACROSS**2 : (number + 1) * ACROSS**2]
        sheet = block.reshape(ACROSS, ACROSS, SIDE, SIDE, 3).swapaxes(1, 2).reshape(ACROSS * SIDE, ACROSS * SIDE, 3)
        Image.fromarray(sheet).save(pictures / f"cifar10_{number}.webp", lossless=True, quality=80, method=4)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(len(pixels) // ACROSS**2)))
    index = {
        "class_names": sources[0].class_names,
        "train": "".join(map(str, labels[0])),
        "test": "".join(map(str, labels[1])),
        "sha256": hashlib.sha256(pixels.tobytes()).hexdigest(),
    }
    (pictures / INDEX).write_text(json.dumps(index) + "\n")


def read(source: Source) -> tuple[np.ndarray, list[int]]:
    """All images [N, 32, 32, 3] uint8 of a source, and their labels."""
    pairs = [source.read(index) for index in range(len(source))]
    return np.stack([np.asarray(image.convert("RGB")) for image, _ in pairs]), [target for _, target in pairs]


def unpack(folders: list[Path], file: Path) -> None:
    """Write train, train_labels, test, test_labels and class_names. ValueError if a pixel differs."""
    index = json.loads(find(folders, INDEX).read_text())
    count = (len(index["train"]) + len(index["test"])) // ACROSS**2
    with ThreadPoolExecutor(count) as pool:
        sheets = list(pool.map(lambda number: decode(find(folders, f"cifar10_{number}.webp")), range(count)))
    pixels = np.concatenate(sheets)
    if hashlib.sha256(pixels.tobytes()).hexdigest() != index["sha256"]:
        raise ValueError(
            f"the pixels in {', '.join(map(str, folders))} are not those that were packed: pack them again"
        )
    train = len(index["train"])
    np.savez(
        file,
        train=pixels[:train],
        test=pixels[train:],
        train_labels=np.array(list(index["train"]), np.int64),
        test_labels=np.array(list(index["test"]), np.int64),
        class_names=np.array(index["class_names"]),
    )


def decode(picture: Path) -> np.ndarray:
    sheet = np.asarray(Image.open(picture).convert("RGB"))
    return sheet.reshape(ACROSS, SIDE, ACROSS, SIDE, 3).swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)


def find(folders: list[Path], name: str) -> Path:
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"{', '.join(map(str, folders))}: {name} is not there")


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in ("pack", "unpack"):
        sys.exit(__doc__)
    verb, source, target = sys.argv[1:]
    try:
        if verb == "pack":
            pack(source, Path(target))
        else:
            unpack([Path(folder) for folder in source.split(",")], Path(target))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    run_script(main, __doc__)
