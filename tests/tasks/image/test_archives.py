"""Archives beside class folders: the folders are read, and what is not read is told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_data import open_folder, write_tar
from PIL import Image

from longseq.tasks.image.data import ImageDataModule


def write_image(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), shade, dtype=np.uint8)).save(path)


def write_classes(root: Path, *names: str, count: int = 4, first: int = 0) -> Path:
    for number, name in enumerate(names):
        for index in range(count):
            write_image(root / name / f"{index}.png", first + 10 * number + index)
    return root


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A .tar of the classes cat and dog."""
    return write_tar(tmp_path / "packed.tar", write_classes(tmp_path / "older", "cat", "dog", count=2, first=100))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all.tar", "bird.tar", "cat.tar"])
def test_class_folders_count_and_not_an_archive_beside_them(name, packed, tmp_path, caplog):
    root = write_classes(tmp_path / "images", "cat", "dog", "bird")
    shutil.copy(packed, root / name)
    module = open_folder(root)
    assert module.info.class_names == ["bird", "cat", "dog"]
    assert sum(len(split) for split in (module.splits.train, module.splits.validation)) == 12
    assert f"{root}: 1 passed over (1 .tar: {name})" in caplog.messages


@pytest.mark.slow
def test_class_folders_are_read_beside_archives_of_more_classes(packed, tmp_path, caplog):
    root = write_classes(tmp_path / "images", "cat", "dog")
    shutil.copy(packed, root / "all.tar")
    write_tar(root / "bird.tar", root / "dog")
    assert open_folder(root).info.class_names == ["cat", "dog"]
    assert f"{root}: 2 passed over (2 .tar: all.tar, bird.tar)" in caplog.messages


@pytest.mark.slow
def test_class_folders_are_read_beside_an_archive_of_their_archives(tmp_path, caplog):
    root = write_classes(tmp_path / "images", "cat", "dog")
    for name in ("cat", "elk"):
        write_tar(tmp_path / "inner" / f"{name}.tar", root / "cat")
    write_tar(root / "all.tar", tmp_path / "inner")
    with pytest.raises(ValueError, match=r"holds all\.tar of the classes cat, elk, and folders of other images"):
        open_folder(root)
    (tmp_path / "inner" / "elk.tar").unlink()
    write_tar(root / "all.tar", tmp_path / "inner")
    assert open_folder(root).info.class_names == ["cat", "dog"]
    (root / "broken.tar").write_bytes(b"no archive")
    assert open_folder(root).info.class_names == ["cat", "dog"]
    assert f"{root}: 2 passed over (2 .tar: all.tar, broken.tar)" in caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize("split", ["", "train", "val"])
@pytest.mark.parametrize("given", [None, {"cat": 0, "dog": 1}])
def test_archives_and_folders_of_other_images_are_refused(given, split, packed, tmp_path):
    root = tmp_path / "mixed"
    if split:
        write_classes(root, "train/cat", "train/dog", "val/cat", "val/dog")
        shutil.rmtree(root / split)
    write_image(root / split / "thumbs" / "preview.png", 0)
    write_image(root / split / "more" / "thumbs" / "preview.png", 0)
    shutil.copy(packed, root / split / "s0.tar")
    with pytest.raises(ValueError, match="move the folders away to read the archives, or the archives to") as error:
        open_folder(root, class_map=given)
    told = "holds s0.tar of the classes cat, dog, and folders of other images (more/thumbs, thumbs): move"
    assert str(error.value).startswith(f"{root / split} {told}")
    assert "\n" not in str(error.value)
    shutil.rmtree(root / split / "thumbs")
    shutil.rmtree(root / split / "more")
    assert open_folder(root, class_map=given).info.class_names == ["cat", "dog"]


def classes_of(module: ImageDataModule) -> dict[str, set[str]]:
    """The names of the classes, and the shades of the images of each."""
    source = module.splits.train.source
    found: dict[str, set[Any]] = {}
    for image, target in map(source.read, range(len(source))):
        found.setdefault(module.info.class_names[target], set()).add(np.asarray(image).flat[0].item())
    return found


LINE = "all images lie in folders called images, so the folders above these are the classes: cat, dog"


@pytest.mark.slow
@pytest.mark.parametrize("above", ["", "photos"])
@pytest.mark.parametrize("packed_as", ["one.tar", "parts", "classes", "archives.tar"])
def test_the_class_in_an_archive_is_the_folder_above_images(above, packed_as, tmp_path, caplog):
    root = write_classes(tmp_path / "made" / above, "cat/images", "dog/images", first=100)
    for name in ("cat", "dog"):
        write_tar(tmp_path / "classes" / f"{name}.tar", root / name)
    write_tar(tmp_path / "one.tar", tmp_path / "made")
    write_tar(tmp_path / "archives.tar", tmp_path / "classes")
    for number, kept in enumerate(("01", "23")):
        half = tmp_path / "halves" / str(number)
        shutil.copytree(tmp_path / "made", half, ignore=shutil.ignore_patterns(f"[!{kept}].png"))
        write_tar(tmp_path / "parts" / f"s{number}.tar", half)
    archive = tmp_path / packed_as
    module = open_folder(archive)
    assert classes_of(module) == {"cat": {100, 101, 102, 103}, "dog": {110, 111, 112, 113}}
    assert f"{archive}: {LINE}" in caplog.messages
    assert not any("passed over" in line for line in caplog.messages)
    assert open_folder(archive, class_map={"dog": 0, "cat": 1}).info.class_names == ["dog", "cat"]


@pytest.mark.slow
def test_archives_of_splits_have_their_classes_above_images(tmp_path):
    for split in ("train", "val"):
        root = write_classes(tmp_path / split, "cat/images", "dog/images")
        write_tar(tmp_path / "data" / f"{split}.tar", root)
    module = open_folder(tmp_path / "data")
    assert module.info.class_names == ["cat", "dog"]
    assert module.info.sizes == {"train": 8, "val": 8, "test": 8}
    for inner in ("fold1/images", "fold2/images"):
        write_classes(tmp_path / "folds", inner)
    with pytest.raises(ValueError, match="of one class alone, images"):
        open_folder(write_tar(tmp_path / "folds.tar", tmp_path / "folds"))


@pytest.mark.slow
def test_folders_that_macos_packs_are_no_classes(packed, tmp_path, caplog):
    root = tmp_path / "archives"
    write_image(root / "__MACOSX" / "cat" / "0.png", 0)
    write_image(root / ".thumbs" / "cat" / "0.png", 0)
    shutil.copy(packed, root / "s0.tar")
    assert sum(open_folder(root).info.sizes[split] for split in ("train", "val")) == 4
    assert f"{root}: 2 passed over (2 hidden: .thumbs/, __MACOSX/)" in caplog.messages
    folders = write_classes(tmp_path / "images", "cat", "dog", "__MACOSX/elk", "__MACOSX")
    assert open_folder(folders).info.class_names == ["cat", "dog"]
    assert f"{folders}: 1 passed over (1 hidden: __MACOSX/)" in caplog.messages
    archive = write_tar(tmp_path / "images.tar", folders)
    assert open_folder(archive).info.class_names == ["cat", "dog"]
    splits = write_classes(tmp_path / "splits", "train/cat", "train/dog", "Test/__MACOSX/cat", "train/__MACOSX/cat")
    module = open_folder(splits)
    assert module.info.class_names == ["cat", "dog"]
    assert sum(module.info.sizes[split] for split in ("train", "val")) == 8


@pytest.mark.slow
def test_archives_in_the_folders_of_splits_and_further_above_are_passed_over(packed, tmp_path, caplog):
    root = write_classes(tmp_path / "images", "train/cat", "train/dog", "val/cat", "val/dog")
    shutil.copy(packed, root / "train" / "more.tar")
    shutil.copy(packed, root / "val" / "old.tar")
    assert open_folder(root).info.sizes == {"train": 8, "val": 8, "test": 8}
    for split, name in (("train", "more.tar"), ("val", "old.tar")):
        assert f"{root / split}: 1 passed over (1 .tar: {name})" in caplog.messages
    nested = write_classes(tmp_path / "nested", "pets/cat", "pets/dog", "wild/elk")
    shutil.copy(packed, nested / "pets.tar")
    assert open_folder(nested).info.class_names == ["cat", "dog", "elk"]
    assert f"{nested}: 1 passed over (1 .tar: pets.tar)" in caplog.messages


@pytest.mark.slow
def test_an_evaluation_measures_the_class_folders(packed, tmp_path, caplog):
    trained = open_folder(write_classes(tmp_path / "images", "cat", "dog"))
    other = write_classes(tmp_path / "other", "cat", "dog", first=50)

    def measure() -> Any:
        changes = {"root": str(other)}
        known = {"data": vars(trained.keys)}
        return ImageDataModule.for_evaluation(known, changes, split="test", trained=trained.info, batch_size=4)

    shutil.copy(packed, other / "some.tar")
    assert measure().info.sizes == {"test": 8}
    assert f"{other}: 1 passed over (1 .tar: some.tar)" in caplog.messages
    (other / "some.tar").rename(other / "test.tar")  # the name of a split, which is measured then
    assert measure().info.sizes == {"test": 4}
    assert f"{other}: the images of cat/, dog/ are in no split, beside test.tar" in caplog.text


@pytest.mark.slow
def test_a_hidden_archive_is_none(tmp_path, packed, caplog):
    root = write_classes(tmp_path / "images", "cat", "dog")
    (root / "._backup.tar").write_bytes(b"Mac OS X        ")
    assert sum(open_folder(root).info.sizes[split] for split in ("train", "val")) == 8
    assert f"{root}: 1 passed over (1 hidden: ._backup.tar)" in caplog.messages
    archives = tmp_path / "archives"
    archives.mkdir()
    shutil.copy(packed, archives)
    shutil.copy(root / "._backup.tar", archives)
    assert open_folder(archives).info.class_names == ["cat", "dog"]
    (archives / "packed.tar").unlink()
    with pytest.raises(ValueError, match=r"holds no images in class folders \(1 passed over: 1 hidden: \._backup"):
        open_folder(archives)


@pytest.mark.slow
def test_an_archive_without_images_is_told_in_one_line(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("")
    archive = write_tar(tmp_path / "code.tar", tmp_path / "code")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(archive, alone)
    for root in (archive, alone):
        with pytest.raises(ValueError, match=r"holds no images in class folders: give a folder") as error:
            open_folder(root)
        assert str(error.value).startswith(f"{root} holds")
    folders = write_classes(tmp_path / "images", "cat", "dog")
    shutil.copy(archive, folders)
    assert open_folder(folders).info.class_names == ["cat", "dog"]


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, {"cat": 0, "dog": 1}])
def test_archives_and_images_outside_class_folders_are_refused(given, packed, tmp_path):
    root = tmp_path / "mixed"
    write_image(root / "one.png", 0)
    shutil.copy(packed, root)
    with pytest.raises(
        ValueError, match=r"mixed holds packed\.tar and images outside class folders \(one\.png\): move"
    ):
        open_folder(root, class_map=given)


@pytest.mark.slow
def test_what_lies_beside_archives_is_told(packed, tmp_path, caplog):
    root = tmp_path / "archives"
    (root / "elk").mkdir(parents=True)
    shutil.copy(packed, root)
    for name in ("notes.txt", "more.zip", "part.tar.gz"):
        (root / name).write_bytes(b"any")
    assert sum(open_folder(root).info.sizes[split] for split in ("train", "val")) == 4
    told = "4 passed over (1 .zip, 1 .txt, 1 .gz, 1 empty: more.zip, notes.txt, part.tar.gz, elk/)"
    assert f"{root}: {told}" in caplog.messages


@pytest.mark.slow
def test_class_folders_of_broken_images_are_no_archive(packed, tmp_path):
    root = tmp_path / "images"
    for name in ("cat", "dog"):
        for index in range(4):
            write_image(root / name / f"{index}.png", 0)
            (root / name / f"{index}.png").write_bytes(b"")
    shutil.copy(packed, root)
    with pytest.raises(ValueError, match="none of the 2 validation images can be read"):
        open_folder(root, val_fraction=0.25)


@pytest.mark.slow
def test_archives_beside_splits_are_told(packed, tmp_path, caplog):
    root = write_classes(tmp_path / "images", "train/cat", "train/dog", "val/cat", "val/dog")
    shutil.copy(packed, root / "more.tar")
    (root / "most.zip").write_bytes(b"packed")
    open_folder(root)
    assert f"{root}: the images of more.tar, most.zip are in no split, beside train, val" in caplog.text


@pytest.mark.slow
def test_pooled_splits_beside_an_archive_are_refused_as_folders(packed, tmp_path):
    root = write_classes(tmp_path / "years", "train2017/cat", "train2017/dog", "val2017/cat", "val2017/dog")
    shutil.copy(packed, root)
    with pytest.raises(ValueError, match=r"or give data\.train_split=train2017 data\.val_split=val2017$"):
        open_folder(root)
