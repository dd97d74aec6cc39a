"""Files that the system refuses to write: the old file stays, and nothing else is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

import longseq
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.training.system import WholeCheckpoints, write_text


def save_checkpoint(path: Path) -> None:
    WholeCheckpoints().save_checkpoint({"weights": torch.zeros(1 << 16)}, path)


@pytest.mark.parametrize(
    ("name", "save"), [("last.ckpt", save_checkpoint), ("metrics.json", lambda path: write_text(path, "0" * (1 << 17)))]
)
def test_a_file_without_room_leaves_the_old_one(name, save, tmp_path, little_room):
    (tmp_path / name).write_text("old")
    with pytest.raises((OSError, RuntimeError)):  # torch has an error of its own
        save(tmp_path / name)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "old"}


def test_a_model_whose_last_file_has_no_room_leaves_the_old_one(tmp_path, monkeypatch):
    model = TokenBackbone(vocab_size=11, d_model=8, depth=1, mixer="linear_attention")
    longseq.save_pretrained(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refuse(path: Path, text: str, **options: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(OSError, match="No space left on device"):
        longseq.save_pretrained(TokenBackbone(vocab_size=13, d_model=8, depth=1, mixer="linear_attention"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
