"""Files that are trained on and measured: told by their bytes, whatever their names and folders."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from longseq.tasks.image import repeats
from longseq.tasks.image.config import ImageDataKeys
from longseq.tasks.image.data import ImageDataModule


def told(root, caplog, source="folder"):
    caplog.clear()
    keys = ImageDataKeys(name="own", source=source, root=str(root), test_split="test", img_size=16)
    ImageDataModule(keys, batch_size=4).setup()
    return [message for message in caplog.messages if "the bytes of" in message]


@pytest.fixture
def images(image_folder, tmp_path):
    """root/train and root/val, classes class0 to class2; root/test has what validation has, but for one image each."""
    root = tmp_path / "images"
    shutil.copytree(image_folder, root)
    generator = np.random.default_rng(1)
    for path in sorted((root / "val").rglob("*.*")):
        copy = root / "test" / path.relative_to(root / "val")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes() + generator.bytes(4))  # a reader passes over what follows the image
    return root


def test_copies_are_told_by_split_and_example(images, caplog):
    assert told(images, caplog) == []
    trained = sorted((images / "train" / "class1").iterdir())
    shutil.copy(trained[0], images / "val" / "class1" / "other.png")
    for index in (1, 2):
        shutil.copy(trained[index], images / "test" / "class0" / f"other{index}.png")
    val, test = told(images, caplog)
    assert val.startswith(
        f"1 of the 13 validation images have the bytes of a training image, such as {images}/val/class1/other.png and "
        f"{trained[0]}: figures of images that were trained on flatter"
    )
    assert test.startswith(f"2 of the 14 test images have the bytes of a training image, such as {images}/test/class0/")


def test_large_files_are_known_by_their_ends(images, caplog):
    first, second, third = sorted((images / "train" / "class0").iterdir())[:3]
    whole = first.read_bytes() + bytes(3 * repeats.COMPARED)
    first.write_bytes(whole)
    second.write_bytes(whole[:-1] + b"1")
    shutil.copy(second, images / "val" / "class0" / "equal.png")
    (images / "val" / "class0" / "unlike.png").write_bytes(whole[:-1] + b"2")
    (message,) = told(images, caplog)
    assert message.startswith(
        f"1 of the 14 validation images have the bytes of a training image, such as {images}/val/"
    )
    assert f"equal.png and {second}" in message
    third.unlink()
    third.symlink_to(images / "nowhere")  # unreadable files are told elsewhere
    for split in ("train", "val"):
        os.mkfifo(images / split / "class2" / "pipe.png")
        (images / split / "class2" / "empty.png").touch()
    (message,) = told(images, caplog)
    assert message.startswith("1 of the 16 validation images")


def test_a_line_of_two_tables_is_a_repeat(images, caplog):
    lines = [f"{path.relative_to(images)},{path.parent.name}" for path in sorted((images / "train").rglob("*.*"))]
    for name, listed in (("train", lines[:-3]), ("val", lines[-3:]), ("test", lines[:6:2])):
        (images / f"{name}.csv").write_text("\n".join(["file_name,label", *listed]))
    (message,) = told(images, caplog, "csv")
    assert message.startswith("3 of the 3 test images have the bytes of a training image")


def test_spellings_of_a_file_in_a_table_are_told(images, caplog, monkeypatch):
    monkeypatch.chdir(images.parent)
    images = images.relative_to(images.parent)
    (images / "link.png").symlink_to("train/class0")
    files = [path.relative_to(images) for path in sorted((images / "train").rglob("*.*"))]
    lines = [f"{path},{path.parent.name}" for path in files]
    (images / "linked.jpg").symlink_to(files[1])
    again = [f"link.png/../class0/{files[0].name}", str((images / files[0]).absolute()), "linked.jpg"]
    (images / "train.csv").write_text("\n".join(["file_name,label", *lines[:-3], *(f"{one},class0" for one in again)]))
    (images / "test.csv").write_text(
        "\n".join(["file_name,label", *lines[-3:], f"{(images / files[-1]).absolute()},class2"])
    )
    caplog.clear()
    keys = {"root": str(images), "img_size": 16, "val_split": None}
    ImageDataModule(ImageDataKeys(name="own", source="csv", **keys), batch_size=4).setup()
    train, test = [message for message in caplog.messages if "another spelling" in message]
    number = len(lines) - 1
    assert train == (
        f"{images}/train.csv: 3 of the {len(lines)} lines list the file of an earlier one in another spelling, such as "
        f"line {number} ({images}/{again[0]}) that of line 2 ({images / files[0]}): it counts more than once; give "
        "each image one line"
    )
    assert test.startswith(f"{images}/test.csv: 1 of the 4 lines list the file of an earlier one")


def test_equal_training_images_of_two_classes_are_told_once(images, caplog):
    folders = [images / "train" / f"class{number}" for number in range(3)]
    first, second, third = sorted(folders[0].iterdir())[:3]
    shutil.copy(first, folders[0] / "same_class.jpg")  # says nothing new, but nothing wrong either
    assert told(images, caplog) == []
    for number, path in ((1, second), (2, second), (2, third)):
        shutil.copy(path, folders[number] / f"copy_of_{path.name}")
    assert told(images, caplog) == [
        f"5 of the 28 training images have the bytes of one with another label, such as {second} (class0) and "
        f"{folders[1]}/copy_of_{second.name} (class1): no model can be right about both; correct or remove them"
    ]


def test_equal_images_with_other_labels_of_a_table_are_told(images, caplog):
    first = min((images / "train" / "class0").iterdir())
    shutil.copy(first, images / "copy.jpg")
    listed = [f"{path.relative_to(images)},{path.parent.name}" for path in sorted((images / "train").rglob("*.*"))]
    (images / "all.csv").write_text("\n".join(["file_name,label", *listed, "copy.jpg,class1|class2"]))
    caplog.clear()
    keys = {"root": str(images / "all.csv"), "img_size": 16, "multi_label": True, "label_delimiter": "|"}
    ImageDataModule(ImageDataKeys(name="own", source="csv", val_fraction=0.1, **keys), batch_size=4).setup()
    (message,) = [one for one in caplog.messages if "another label" in one]
    assert f"{images}/copy.jpg (class1, class2) and {first} (class0)" in message


def test_of_many_files_paths_alone_are_compared(images, caplog, monkeypatch):
    trained = sorted((images / "train" / "class1").iterdir())
    shutil.copy(trained[0], images / "val" / "class1" / "other.png")
    monkeypatch.setattr(repeats, "MOST_FILES", 30)
    monkeypatch.setattr(repeats, "_content", None)
    assert told(images, caplog) == []
    assert not [message for message in caplog.messages if "a training image" in message]
    listed = {name: [str(path) for path in sorted((images / name).rglob("*.*"))] for name in ("train", "val")}
    listed["test"] = [f"train/../train/class1/{path.name}" for path in trained[:2]]
    for name, paths in listed.items():
        lines = [f"{path},{path.split('/')[-2]}" for path in paths]
        (images / f"{name}.csv").write_text("\n".join(["file_name,label", *lines]))
    assert told(images, caplog, "csv") == []
    (message,) = [message for message in caplog.messages if "a training image" in message]
    assert message.startswith(
        f"2 of the 2 test images are the file of a training image, such as {images}/train/../train/class1/"
        f"{trained[0].name} and {trained[0]}: figures of images that were trained on flatter"
    )
