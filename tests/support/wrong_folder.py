"""The folder in which the wrong commands of tests/tools/wrong_commands.txt run."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from PIL import Image

from longseq.backbones.tokens import TokenBackbone

RUN = Path(__file__).resolve().parents[1] / "frozen" / "run.ckpt"


def make_folder(folder: Path) -> Path:
    """Fill an empty folder with models, data and files of other kinds."""
    shutil.copy(RUN, folder / "run.ckpt")
    (folder / "torn.ckpt").write_bytes(RUN.read_bytes()[:20_000])
    torch.save({"a": torch.zeros(1)}, folder / "other.ckpt")
    model = TokenBackbone(vocab_size=257, d_model=8, depth=1, mixer="attention")
    model.text = {"tokenizer": {"kind": "bytes"}, "window": 16}
    model.save_pretrained(folder / "lm")
    for name in ("empty", "taken", "taken.csv", "photos"):
        (folder / name).mkdir()
    Image.new("RGB", (8, 8)).save(folder / "photos" / "a.png")
    texts = {
        "taken/old.txt": "old",
        "notes.txt": "notes\n",
        "nothing.txt": "",
        "text.txt": "some text\n\nmore\n",
        "rows.jsonl": '{"text": "a"}\n',
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    for ending in ("csv", "json", "jsonl"):
        (folder / f"full.{ending}").symlink_to("/dev/full")
    return folder
