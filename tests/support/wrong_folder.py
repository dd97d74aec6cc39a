"""The folder in which the wrong commands of tests/tools/wrong_commands.txt run."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from documents import make_rows, write_jsonl
from PIL import Image
from safetensors.torch import save_file

from longseq.backbones.classifier import TextClassifier
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
    classifier = TextClassifier(num_classes=2, vocab_size=257, d_model=8, depth=1, mixer="attention")
    classifier.text = {
        "tokenizer": {"kind": "bytes"},
        "window": 16,
        "class_names": ["bird", "fish"],
        "multi_label": False,
        "vocab_size": 257,
        "separator": 256,
        "max_length": None,
        "truncation": "none",
    }
    classifier.save_pretrained(folder / "classifier")
    (folder / "classes" / "bird").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "classes" / "bird" / "a.png")
    torch.save({"a": torch.zeros(1)}, folder / "weights.pt")
    (folder / "linked.pt").symlink_to("run.ckpt")
    edited = torch.load(RUN, weights_only=True)
    edited["optimizer_states"] = []
    torch.save(edited, folder / "edited.ckpt")
    (folder / "empty.ckpt").touch()
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text('{"model_type": "llama"}')
    save_file({"embed_tokens.weight": torch.zeros(2, 2)}, folder / "llama" / "model.safetensors")
    (folder / "dangling").symlink_to("nowhere")
    for name in ("empty", "taken", "taken.csv", "photos", "figures", "settings"):
        (folder / name).mkdir()
    Image.new("RGB", (8, 8)).save(folder / "photos" / "a.png")
    texts = {
        "taken/old.txt": "old",
        "notes.txt": "notes\n",
        "images.tar": "packed",
        "images.zip": "packed",
        "notes.json": '{"test/top1": 0.5}\n',
        "notes.md": "# Notes\n",
        "report.md": "# Report\n",
        "figures/table.md": "| a |\n",
        "settings/mine.yaml": "defaults: [train, _self_]\nseed: 3\n",
        "nothing.txt": "",
        "text.txt": "some text\n\nmore\n",
        "rows.jsonl": '{"text": "a"}\n',
        "header.csv": "file_name,label\n",
        "nuls.csv": "\0",  # a csv.Error in Python 3.10
        "long.csv": "a" * 2**18,  # one in any Python: csv reads cells of 128 KiB at most
        "semicolons.csv": "file_name;label\nphotos/a.png;bird\n",
        "columns.csv": "image,kind\nphotos/a.png,bird\n",
        "spaced.csv": "file_name, label\nphotos/a.png, bird\n",
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    write_documents(folder)
    for ending in ("csv", "json", "jsonl"):
        (folder / f"full.{ending}").symlink_to("/dev/full")
    return folder


def write_documents(folder: Path) -> None:
    """Documents of two classes, and files with one mistake each."""
    rows = make_rows(30)
    birds = [row for row in rows if row["label"] == "bird"]
    stone = {"text": "a stone", "label": "stone"}
    latin = '{"text": "caf\xe9", "label": "bird"}\n'.encode("latin-1")
    files = {
        "documents": [row for row in rows if row["label"] != "tree"],
        "equal": birds,
        "lonely": [*rows, stone],
        "stone": [*(row for row in make_rows(9, seed=1) if row["label"] == "bird"), stone],
        "no_json": [*rows, "{", "none"],
        "blank": [*rows, {"text": " ", "label": "bird"}],
        "unlabelled": [{"text": "a"}, {"text": "b", "label": None}],
        "several": [{"text": "a", "label": ["bird", "fish"]}],
        "numbers": [{"text": 3, "label": "bird"}],
    }
    for name, lines in files.items():
        write_jsonl(folder / f"{name}.jsonl", lines)
    (folder / "latin.jsonl").write_bytes((folder / "documents.jsonl").read_bytes() + latin)
    (folder / "ragged.csv").write_text("text,label\none, two,bird\nthree\n")
