"""Files that the system refuses to write: the old file stays, nothing else is left, and the error names the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

import longseq
from longseq.backbones.tokens import TokenBackbone
from longseq.files import Kind, check_replaced, json_keys, replacing
from longseq.tasks.training.files import WholeCheckpoints, write_text


def save_checkpoint(path: Path) -> None:
    WholeCheckpoints().save_checkpoint({"weights": torch.zeros(1 << 16)}, path)


def save_model(path: Path) -> None:
    longseq.save_pretrained(TokenBackbone(vocab_size=2000, d_model=16, depth=1, mixer="linear_attention"), path.parent)


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("last.ckpt", save_checkpoint),
        ("model.safetensors", save_model),
        ("metrics.json", lambda path: write_text(path, "0" * (1 << 17))),
    ],
)
def test_a_file_without_room_leaves_the_old_one(name, save, tmp_path, little_room):
    (tmp_path / name).write_text("old")
    with pytest.raises(OSError, match=name) as refused:
        save(tmp_path / name)
    assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(tmp_path / name))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "old"}


def test_a_model_whose_last_file_has_no_room_leaves_the_old_one(tmp_path, monkeypatch):
    model = TokenBackbone(vocab_size=11, d_model=8, depth=1, mixer="linear_attention")
    longseq.save_pretrained(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refuse(path: Path, text: str, **options: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(OSError, match=r"No space left on device: .*config.json"):
        longseq.save_pretrained(TokenBackbone(vocab_size=13, d_model=8, depth=1, mixer="linear_attention"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_whoever_may_read_other_files_may_read_the_weights(tmp_path):
    before = os.umask(0o027)
    try:
        longseq.save_pretrained(TokenBackbone(vocab_size=11, d_model=8, depth=1, mixer="linear_attention"), tmp_path)
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("model.safetensors", "config.json", "README.md"), "0o640"
    )


def test_other_errors_are_told_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError) as missing, replacing(tmp_path / "made"):
        (tmp_path / "read").read_text()
    assert missing.value.filename == str(tmp_path / "read")
    with pytest.raises(UnicodeEncodeError), replacing(tmp_path / "made") as partial:
        partial.write_text("\ud800")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    path = tmp_path / "absent" / "state"
    with pytest.raises(FileNotFoundError) as refused, replacing(path) as partial:
        torch.save({}, partial)
    assert refused.value.filename == str(path)


def test_a_pipe_is_written_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_device_that_refuses_is_named_and_stays():
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        save_checkpoint(Path("/dev/full"))
    assert Path("/dev/full").is_char_device()


ROWS = Kind("rows", lambda path: "rows" in json_keys(path))


@pytest.mark.parametrize("text", ['{"rows": []}', ""])
def test_a_file_of_the_same_kind_and_an_empty_one_are_replaced(text, tmp_path):
    path = tmp_path / "made.json"
    check_replaced(path, "output", ROWS)
    path.write_text(text)
    check_replaced(path, "output", ROWS, reads=[tmp_path / "absent", None])


@pytest.mark.parametrize("text", ['{"notes": []}', "[1]", "{", "\udcff"])
def test_a_file_of_another_kind_is_not_replaced(text, tmp_path):
    path = tmp_path / "made.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"^output=.*made.json is there and holds no rows: give another name, or rem"):
        check_replaced(path, "output", ROWS)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_what_is_read_is_not_replaced_by_any_of_its_names(link, tmp_path):
    (tmp_path / "read.json").write_text('{"rows": []}')
    link(tmp_path / "read.json", tmp_path / "linked.json")
    with pytest.raises(ValueError, match=r"^output=.*linked.json is what the command reads, and would be replaced"):
        check_replaced(tmp_path / "linked.json", "output", ROWS, reads=[tmp_path / "read.json"])
