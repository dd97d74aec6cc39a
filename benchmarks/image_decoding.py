"""Train on JPEG files that the CPU decodes, and that the GPU decodes, over six seeds, and write image_decoding.json.

python benchmarks/image_decoding.py FOLDER [OUTPUT.json [KEY=VALUE ...]]

FOLDER has class folders of JPEG files in train and test. `longseq compare` trains the same recipe with data.decode=cpu
and with data.decode=gpu, which also says who crops and colours the images. KEY=VALUE changes the recipe.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from command import run_script
from comparison import trained_row
from image_shards import compare, link

HERE = Path(__file__).parent
MIXER = "deltanet"
RECIPE = (
    "data=image_folder",
    "data.root=files",
    "data.img_size=112",
    "model=vit",
    "model.patch_size=14",
    "scale=nano",
    "recipe.epochs=30",
    "trainer=gpu",
    "data.num_workers=2",
    "logger=none",
    "seeds=[0,1,2,3,4,5]",
    "jobs=6",
)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    output = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "image_decoding.json"
    recipe = (*RECIPE, *sys.argv[3:])
    with tempfile.TemporaryDirectory() as made:
        link(Path(made), Path(sys.argv[1]))
        rows = {name: f"mixer={MIXER} data.decode={name}" for name in ("cpu", "gpu")}
        results = compare(Path(made), rows, *recipe)
    result = {
        "what": "Training from JPEG files that the CPU decodes, and that the GPU decodes",
        "command": "python benchmarks/image_decoding.py FOLDER",
        "kind": "accuracy",
        "rows": [{"decode": name, **trained_row(results, name), "model": MIXER} for name in rows],
        "notes": [
            f"`longseq compare` with {' '.join(recipe)}. Who decodes also crops, colours and normalizes, "
            "also images of validation and test. test/top1 of the checkpoint with the best val/top1; by seed: mean ± "
            "standard deviation (the value of each). All runs shared one GPU: seconds and images per second are no "
            "comparison.",
        ],
    }
    output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main, __doc__, gpu="decodes on a GPU")
