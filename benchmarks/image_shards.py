"""Train on images and on shards of them that are scaled down, over three seeds, and write image_shards.json.

python benchmarks/image_shards.py FOLDER [OUTPUT.json [KEY=VALUE ...]]

FOLDER has class folders of images in train and test. `longseq prepare task=image` packs them into shards; then
`longseq compare` trains the same recipe from the files and from the shards, on a CPU. KEY=VALUE changes the recipe.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from command import read_json, run_script
from comparison import RESULTS, trained_row

HERE = Path(__file__).parent
SIZE, PIXELS = 128, 112  # of the images in shards and of the model: as 256 and 224 are
# The rows of the comparison, in words and as overrides of a run in a folder where `files` and `shards` lie.
IMAGES = {
    "files": ("files as they are", "data=image_folder data.root=files"),
    "shards": (f"shards of size={SIZE}", "data=image_shards data.root=shards"),
}
RECIPE = (
    f"data.img_size={PIXELS}",
    "model=vit",
    "model.patch_size=28",
    "scale=nano",
    "recipe.epochs=12",
    "trainer=cpu",
    "data.num_workers=0",
    "logger=none",
)
MIXER = "linear_attention"


def call(place: Path, *words: str) -> None:
    """Run `longseq` in a folder; a command that fails has said why."""
    done = subprocess.run([sys.executable, "-m", "longseq", *words], cwd=place, check=False)
    if done.returncode:
        sys.exit(f"longseq {words[0]} ended with exit code {done.returncode}")


def link(place: Path, folder: Path) -> None:
    """Let the images lie in `place / "files"`. `folder` must be there."""
    folder.stat()
    (place / "files").symlink_to(folder.resolve(), target_is_directory=True)


def compare(place: Path, rows: Mapping[str, str], *options: str) -> dict[str, Any]:
    """The results of `longseq compare`, called in `place`, of rows by name, as overrides."""
    told = ", ".join(f'{name}: "{words}"' for name, words in rows.items())
    call(place, "compare", "mixers=[]", f"rows={{{told}}}", "plot=false", "output=compared", *options)
    return read_json(place / "compared" / "results.json", RESULTS)


def measure(folder: Path, recipe: Sequence[str]) -> dict[str, Any]:
    """The results of the comparison."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        link(place, folder)
        call(place, "prepare", "task=image", "input=files", "output=shards", f"size={SIZE}")
        rows = {name: f"mixer={MIXER} {words}" for name, (_, words) in IMAGES.items()}
        return compare(place, rows, "seeds=[0,1,2]", "jobs=2", *recipe)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    output = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "image_shards.json"
    recipe = (*RECIPE, *sys.argv[3:])
    results = measure(Path(sys.argv[1]), recipe)
    rows = [{"images": told, **trained_row(results, name), "model": MIXER} for name, (told, _) in IMAGES.items()]
    result = {
        "what": "Training from image files and from shards of smaller images",
        "command": "python benchmarks/image_shards.py FOLDER",
        "kind": "accuracy",
        "rows": rows,
        "notes": [
            f"`longseq compare` with {' '.join(recipe)}, trained and tested on the same images: as files, and as JPEG "
            f"files that `longseq prepare task=image size={SIZE}` scaled down. test/top1 of the checkpoint with the "
            "best val/top1; seeds 0, 1, 2: mean ± standard deviation (the value of each). Other work may have shared "
            "the processor: seconds and images per second are no comparison.",
        ],
    }
    output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main, __doc__)
