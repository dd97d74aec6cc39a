"""Splits that lie elsewhere than a run looks for them: no image is trained on that was set apart."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from image_data import image_data, open_folder, write_tar
from PIL import Image

from longseq.tasks.image.data import ImageDataModule
from longseq.tasks.image.folder import TarImages
from longseq.tasks.image.sources import held_out_split
from longseq.tasks.image.split_folders import refuse_pooled
from longseq.tasks.image.torchvision_sets import parts_of


def write_images(folder: Path, shade: int = 0) -> Path:
    """Class folders cat and dog, each with four pictures that no other shade has."""
    for number, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for index in range(4):
            pixels = np.full((8, 8, 3), 8 * shade + 4 * number + index, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


def write_splits(root: Path, *names: str) -> Path:
    for shade, name in enumerate(names):
        write_images(root / name, shade)
    return root


def refusal(root: Path, **keys) -> str:
    with pytest.raises(ValueError, match=r"split|compressed") as error:
        open_folder(root, **keys)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_archive_of_several_splits_is_not_one_training_set(tmp_path):
    splits = write_splits(tmp_path / "images", "train", "test")
    archive = write_tar(tmp_path / "all.tar", splits)
    assert refusal(archive) == (
        f"{archive} holds the splits test and train, which would be one set: unpack it and give "
        "data.root=FOLDER, or put a .tar of each split into a folder, such as train.tar and val.tar"
    )
    write_tar(tmp_path / "tars" / "train.tar", splits)
    assert f"{tmp_path / 'tars' / 'train.tar'} holds the splits test and train" in refusal(tmp_path / "tars")
    for part in range(2):
        write_tar(tmp_path / "parts" / f"{part}.tar", splits)
    assert "holds the splits test and train in 0, which" in refusal(tmp_path / "parts")
    for name in ("train", "test"):
        write_tar(tmp_path / "numbered" / f"{name}-0.tar", splits / name)
    assert "holds the splits test-0 and train-0, which" in refusal(tmp_path / "numbered")
    assert open_folder(write_tar(tmp_path / "one.tar", splits / "train")).info.sizes["train"] == 6


def test_the_folder_above_the_splits_is_not_one_training_set(tmp_path, caplog):
    inner = write_splits(tmp_path / "above" / "animals", "Train", "val", "test")
    assert refusal(tmp_path / "above") == (
        f"{tmp_path / 'above'} holds the splits Train, test and val in animals, which would be one set: give "
        f"data.root={inner}"
    )
    years = write_splits(tmp_path / "other" / "years", "train2017", "val2017")
    remedy = "data.train_split=train2017 data.val_split=val2017"
    assert refusal(years).endswith(f"which would be one set: rename them to train and val, or give {remedy}")
    assert refusal(tmp_path / "other").endswith(f"or give data.root={years} {remedy}")
    assert not caplog.messages, "the refusal alone is told"
    assert open_folder(inner).info.sizes == {"train": 8, "val": 8, "test": 8}
    given = dict(one.removeprefix("data.").split("=") for one in remedy.split())
    assert open_folder(years, **given).info.sizes == {"train": 8, "val": 8, "test": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("training_set", "test_set"),
        ("Training_Set", "Test_Set"),
        ("train-set", "testing-set"),
        ("trainset", "testing"),
        ("Train Data", "Test Data"),
    ],
)
def test_sets_that_are_called_otherwise_are_not_one_training_set(train, test, tmp_path):
    root = write_splits(tmp_path / "images", train, test)
    told = refusal(root)
    assert f"{root} holds the splits " in told
    given = dict(one.removeprefix("data.").split("=") for one in shlex.split(told[told.index("or give ") + 8 :]))
    assert given == {"train_split": train, "test_split": test}
    assert open_folder(root, val_split=None, **given).info.sizes == {"train": 6, "val": 2, "test": 8}
    for folder in (root / test).iterdir():  # test images without labels are no class
        shutil.rmtree(folder)
    Image.new("RGB", (8, 8)).save(root / test / "0.png")
    assert "which would be one set" in refusal(root)


@pytest.mark.slow
def test_splits_with_one_beginning_are_not_one_training_set(tmp_path):
    """Kaggle's Intel scenes: seg_train/seg_train/CLASS, and images without labels in seg_pred/seg_pred."""
    root = write_splits(tmp_path / "intel", "seg_train/seg_train", "seg_test/seg_test")
    (root / "seg_pred" / "seg_pred").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(root / "seg_pred" / "seg_pred" / "0.png")
    told = refusal(root)
    assert told == (
        f"{root} holds the splits seg_test and seg_train, which would be one set, and seg_pred in no split: rename "
        "them to test and train, or give data.train_split=seg_train data.test_split=seg_test"
    )
    given = {"train_split": "seg_train", "test_split": "seg_test"}
    assert open_folder(root, **given).info.sizes == {"train": 6, "val": 2, "test": 8}
    module = open_folder(root, train_split="seg_train", val_split="seg_test", test_split=None)
    assert module.info.class_names == ["cat", "dog"]
    assert module.info.sizes == {"train": 8, "val": 8, "test": 8}
    assert "holds the splits seg_test and seg_train" in refusal(write_tar(tmp_path / "all.tar", root))


@pytest.mark.slow
def test_a_class_may_be_called_as_a_split_with_another_beginning(tmp_path):
    root = write_images(tmp_path / "trains")
    for name in ("bullet_train", "steam_train", "crash_test", "bullet_test"):
        shutil.copytree(root / "cat", root / name)
    for name, inner in (("model_train", "engine"), ("model_test", "bench"), ("toy_train", "cat")):
        shutil.copytree(root / "cat", root / name / inner)
    names = ["bench", "bullet_test", "bullet_train", "cat", "crash_test", "dog", "engine", "steam_train"]
    assert open_folder(root).info.class_names == names


@pytest.mark.slow
@pytest.mark.parametrize(("images", "masks"), [("images", "masks"), ("Images", "annotations"), ("img", "seg_labels")])
def test_masks_are_not_trained_on(images, masks, tmp_path, caplog):
    root = write_splits(tmp_path / "pets", images, masks)
    told = f"{root} holds {masks} beside {images}, and both would be images to classify: move {masks} out of {root}"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}, or give data.root={root / images}$"):
        open_folder(root)
    assert not caplog.messages
    assert open_folder(root / images).info.class_names == ["cat", "dog"]
    with pytest.raises(ValueError, match=f"would be images to classify: pack it anew without {masks}$"):
        open_folder(write_tar(tmp_path / "all.tar", root))
    inner = tmp_path / "radiography"
    for name, folder in ((images, "cat"), (masks, "dog")):
        for kind in ("covid", "normal"):
            shutil.copytree(root / images / folder, inner / kind / name)
    with pytest.raises(ValueError, match=f"holds {masks} beside {images} in covid, .*: move {masks} out of {inner}$"):
        open_folder(inner)
    for kind in ("covid", "normal"):  # among other classes one may be called so
        shutil.copytree(root / images / "cat", inner / kind / "cat")
    assert {images, masks, "cat"} == set(open_folder(inner).info.class_names)


@pytest.mark.slow
def test_folds_are_pooled_in_one_line(tmp_path, caplog):
    root = write_splits(tmp_path / "folds", "fold1", "fold2")
    assert open_folder(root).info.class_names == ["cat", "dog"]
    (told,) = (one for one in caplog.messages if "one class" in one)
    assert told == (
        f"{root}: fold1/cat and fold2/cat are one class, because the innermost folder names it, and so are those of 1 "
        "more"
    )


def write_tiny(root: Path) -> Path:
    """The layout of Tiny ImageNet: train/CLASS/images, and the images of val/ and test/ in one folder."""
    write_images(root / "made")
    for name in ("cat", "dog"):
        shutil.move(root / "made" / name, root / "train" / name / "images")
        (root / "train" / name / f"{name}_boxes.txt").write_text("0.png 0 0 8 8")
    shutil.rmtree(root / "made")
    for number, split in enumerate(("val", "test")):
        (root / split / "images").mkdir(parents=True)
        for index in range(2):
            shade = np.full((8, 8, 3), 90 + 20 * number + index, dtype=np.uint8)
            Image.fromarray(shade).save(root / split / "images" / f"{index}.png")
    return root


@pytest.mark.slow
def test_the_class_of_tiny_imagenet_is_the_folder_above_images(tmp_path, caplog):
    root = write_tiny(tmp_path / "tiny")
    told = refusal_of_unsorted(root, test_split="test")
    assert told == (
        f"{root / 'val'} has images outside class folders, and so has {root / 'test'}: move each into the folder of "
        "its class, list all images and their classes in tables train.csv and val.csv (data.source=csv "
        "data.root=FOLDER), or give data.val_split=null data.test_split=null, which leaves them out"
    )
    caplog.clear()
    module = open_folder(root, val_split=None, test_split=None, val_fraction=0.25)
    assert module.info.class_names == ["cat", "dog"]
    assert module.info.sizes["train"] == 6
    source = module.splits.train.source
    found = {Path(source.path(index)).parts[-3]: int(target) for index, target in enumerate(source.targets())}
    assert found == {"cat": 0, "dog": 1}
    line = "all images lie in folders called images, so the folders above these are the classes: cat, dog"
    assert f"{root / 'train'}: {line}" in caplog.messages
    picked = open_folder(root / "train", class_map={"dog": 0, "cat": 1})
    assert picked.info.class_names == ["dog", "cat"]
    for name in ("cat", "dog"):  # sorted as the training images are
        shutil.copytree(root / "val" / "images", root / "sorted" / name / "images")
    assert open_folder(root, val_split="sorted").info.sizes["val"] == 4
    assert evaluated(module, root=str(root / "sorted")).info.sizes == {"test": 4}
    with pytest.raises(ValueError, match=r"val has 1 class folder.* lack \(images\): .*\(data\.source=csv data\.root="):
        evaluated(module, root=str(root / "val"))


def refusal_of_unsorted(root: Path, **keys) -> str:
    with pytest.raises(ValueError, match="outside class folders") as error:
        open_folder(root, **keys)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("fold1/images", "fold2/images"), ("a/cat", "b/cat"), ("a/images", "b/c/images")])
def test_the_folder_above_is_no_class_where_it_may_be_none(names, tmp_path):
    for name in names:
        shutil.move(write_images(tmp_path / "made") / "cat", tmp_path / "root" / name)
        shutil.rmtree(tmp_path / "made")
    with pytest.raises(ValueError, match=r"one class alone, (images|cat), .*, or, if no folder tells the class, list "):
        open_folder(tmp_path / "root")


@pytest.mark.slow
def test_images_in_no_class_folder_are_told_of_a_table(tmp_path):
    root = write_splits(tmp_path / "imagenet", "train", "val")
    flat = [path.rename(root / "val" / f"{path.parent.name}{path.name}") for path in sorted(root.glob("val/*/*"))]
    shutil.rmtree(root / "val" / "cat")
    shutil.rmtree(root / "val" / "dog")
    assert refusal_of_unsorted(root).endswith(
        "(data.source=csv data.root=FOLDER), or give data.val_split=null, which leaves them out"
    )
    assert open_folder(root, val_split=None).info.sizes == {"train": 6, "val": 2, "test": 2}
    assert refusal_of_unsorted(root / "val") == (
        f"{root / 'val'} has images outside class folders: move each into the folder of its class, or list the files "
        "and their classes in a table (data.source=csv data.root=FILE.csv)"
    )
    rows = {
        "train": [f"train/{path.parent.name}/{path.name},{path.parent.name}" for path in root.glob("train/*/*")],
        "val": [f"val/{path.name},{path.name[:3]}" for path in flat],
    }
    for split, lines in rows.items():
        (root / f"{split}.csv").write_text("\n".join(["file_name,label", *lines]))
    assert open_folder(root, source="csv").info.sizes == {"train": 8, "val": 8, "test": 8}


@pytest.mark.slow
def test_a_folder_on_the_way_to_a_split_is_in_it(tmp_path, caplog):
    root = write_splits(tmp_path / "intel", "seg_train/seg_train", "seg_test/seg_test", "seg_test/more", "seg_pred")
    open_folder(root, train_split="seg_train/seg_train", val_split="seg_test/seg_test", test_split=None)
    (told,) = (one for one in caplog.messages if "in no split" in one)
    assert "the images of seg_pred/, seg_test/more/ are in no split, beside seg_train/seg_train, seg_test/seg_" in told


@pytest.mark.slow
def test_among_other_classes_one_may_be_called_as_a_set_is(tmp_path):
    root = write_images(tmp_path / "images")
    for name in ("test", "training_set", "Validation"):
        shutil.copytree(root / "cat", root / name)
    assert open_folder(root).info.class_names == ["cat", "dog", "test", "training_set", "Validation"]


@pytest.mark.slow
@pytest.mark.parametrize(("key", "kind"), [("val_split", "val"), ("test_split", "test")])
def test_no_split_is_measured_that_is_the_training(key, kind, tmp_path):
    root = write_splits(tmp_path / "images", "train", "val", "test")
    told = refusal(root, **{key: "train"})
    assert told.startswith(f"data.{key}=train and data.train_split=train are the same images ({root / 'train'}): give ")
    assert f"or data.{key}=null, which measures" in told
    shutil.rmtree(root / kind)
    (root / kind).symlink_to("train")
    names = {"val_split": "validation", "test_split": "test"}
    assert f"data.{key}={names[key]} and data.train_split=train are the same images" in refusal(root, **names)


@pytest.mark.slow
def test_a_split_of_two_kinds_is_named_once(tmp_path, caplog):
    root = write_splits(tmp_path / "images", "train", "val", "other")
    open_folder(root, test_split="val")
    assert "the images of other/ are in no split, beside train, val: name a split" in caplog.text


def test_splits_without_classes_are_not_the_classes(tmp_path):
    for name in ("train", "test"):
        shutil.move(write_images(tmp_path / "made" / name) / "cat", tmp_path / "above" / "flat" / name)
    for root in (tmp_path / "above", write_tar(tmp_path / "flat.tar", tmp_path / "above" / "flat")):
        assert "holds the splits test and train without class folders, and they would be the classes" in refusal(root)


def test_classes_may_be_called_as_splits_are(tmp_path):
    vehicles = write_splits(tmp_path / "vehicles", "land", "air")
    for name in ("train", "test"):
        shutil.move(write_images(tmp_path / "made" / name) / "cat", vehicles / "land" / name)
    assert open_folder(vehicles).info.class_names == ["cat", "dog", "test", "train"]


def test_of_a_large_archive_a_sample_is_compared(tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr("longseq.tasks.image.folder._COMPARED", 4)
    monkeypatch.setattr(
        "longseq.tasks.image.folder._folder_in_archives", lambda *sample: compared.append(sample[0].path) or "cat"
    )
    TarImages(str(write_tar(tmp_path / "all.tar", write_images(tmp_path / "images"))))
    assert compared == ["./cat/0.png", "./cat/2.png", "./dog/0.png", "./dog/2.png"]


@pytest.mark.parametrize("folders", [["train/cat", "steam/cat"], ["a/train/cat", "b/val/cat"], ["cat", "dog"], [""]])
def test_one_split_alone_is_not_refused(folders):
    refuse_pooled("images", folders)


@pytest.mark.parametrize("kind", ["folder", "tar", "csv"])
@pytest.mark.parametrize("key", ["train_split", "val_split", "test_split"])
def test_a_split_that_is_not_there_is_refused_by_its_name(key, kind, tmp_path):
    root = write_splits(tmp_path / "images", "train", "val", "mine")
    if kind == "tar":
        root = write_tar(tmp_path / "all.tar", root / "train")
    elif kind == "csv":
        files = [f"{path.relative_to(root)},{path.parent.name}" for path in sorted((root / "train").rglob("*.png"))]
        (root / "train.csv").write_text("\n".join(["file_name,label", *files]))
    told = refusal(root, source="csv" if kind == "csv" else "folder", **{key: "mime"})
    assert told == f"data.{key}=mime: {root} holds no mime: name a split that it holds, or leave the key out"


@pytest.mark.parametrize("ending", ["tar.gz", "tgz", "zip", "tar.xz", "7z"])
def test_a_compressed_split_is_not_passed_over(ending, tmp_path):
    root = write_splits(tmp_path / "images", "train", "val")
    archive = root / f"test.{ending}"
    archive.write_bytes(b"packed")
    assert refusal(root, test_split="test") == (
        f"{archive} is compressed, and its images would be in no split: unpack it to {root / 'test'}, or pack it anew "
        "as test.tar, or leave it out by data.test_split=null"
    )
    assert open_folder(root).info.sizes == {"train": 8, "val": 8, "test": 8}
    write_splits(root, "test")
    assert open_folder(root, test_split="test").info.sizes["test"] == 8  # unpacked beside the archive
    shutil.rmtree(root / "train")
    archive.rename(root / f"train.{ending}")
    assert refusal(root).endswith(f"unpack it to {root / 'train'}, or pack it anew as train.tar")
    assert f"data.root={root / f'train.{ending}'} is compressed: unpack it" in refusal(root / f"train.{ending}")


def test_an_evaluation_takes_no_other_split_for_a_compressed_one(tmp_path):
    root = write_splits(tmp_path / "images", "train", "val")
    module = open_folder(root)
    (root / "test.zip").write_bytes(b"packed")
    config = {"data": vars(module.keys)}
    with pytest.raises(ValueError, match=r"test\.zip is compressed"):
        module.for_evaluation(config, {"test_split": "test"}, split="test", trained=module.info, batch_size=2)


def test_an_evaluation_names_the_split_that_it_takes_for_one_that_is_not_there(tmp_path, caplog):
    root = write_splits(tmp_path, "train", "val", "test")
    for name, measured in (("mime", "val"), ("test", "test")):
        caplog.clear()
        options = {"names": {"validation": "val", "test": name}, "class_map": None, "download": False, "whole": True}
        split = held_out_split("folder", str(root), kind="test", class_names=["cat", "dog"], **options)
        assert split.source.label == str(root / measured)
        told = f"{root} holds no mime, and {root / 'val'} is measured: name a split that it holds"
        assert (told in caplog.messages) == (name == "mime")


def open_torch(root: Path, **options):
    options = {"val_split": "validation", "test_split": "test"} | options
    module = image_data(name="t", source="torch/image_folder", root=str(root), img_size=8, batch_size=2, **options)
    module.setup()
    return module


@pytest.mark.slow
def test_folders_of_torchvision_are_measured_on_no_training_image(tmp_path, caplog):
    flat = write_images(tmp_path / "flat")
    write_splits(tmp_path / "alone", "train")
    for root in (flat, tmp_path / "alone"):
        with pytest.raises(ValueError, match=r"holds no validation images: add .*/val, or .*data\.source=folder"):
            open_torch(root)
        splits = open_torch(root, val_split=None, val_fraction=0.25).splits
        trained, measured = (
            {split.source.path(index) for index in split.indices} for split in (splits.train, splits.test)
        )
        assert (len(trained), len(measured)) == (6, 2)
        assert not trained & measured
        assert splits.test is splits.validation
    assert "alone has no test split: the validation images are also the test images" in caplog.text
    assert "flat has no test split: the validation images are also the test images" in caplog.text
    write_splits(tmp_path / "years", "train2017", "val2017")
    with pytest.raises(ValueError, match="holds the splits train2017 and val2017"):
        open_torch(tmp_path / "years", val_split=None)


@pytest.mark.slow
def test_a_missing_folder_of_torchvision_is_not_the_whole_of_the_root(tmp_path, caplog):
    root = write_splits(tmp_path / "root", "train", "val")
    for folder in root.glob("*/cat"):
        folder.rename(folder.with_name("0"))
    for folder in root.glob("*/dog"):
        folder.rename(folder.with_name("1"))
    module = open_torch(root)
    assert module.info.class_names == ["0", "1"]
    assert module.info.sizes == {"train": 8, "val": 8, "test": 8}
    assert module.splits.test is module.splits.validation
    assert caplog.text.count("has no test split: the validation images are also the test images") == 1
    for key, name in (("train_split", "trian"), ("val_split", "vall"), ("test_split", "tset")):
        with pytest.raises(ValueError, match=rf"data\.{key}={name}: .* holds no {name}: name a split that it holds"):
            open_torch(root, **{key: name})
    again = evaluated(module)
    assert {again.splits.test.source.path(index) for index in range(8)} == {str(one) for one in root.glob("val/*/*")}
    other = write_images(tmp_path / "other", 5)
    for one, number in (("cat", "0"), ("dog", "1")):
        (other / one).rename(other / number)
    assert evaluated(module, root=str(other)).info.sizes == {"test": 8}
    (root / "val").rename(root / "later")
    with pytest.raises(ValueError, match=r"holds training images only: give data\.root="):
        evaluated(module, root=str(shutil.copytree(root, tmp_path / "copy")))
    (root / "later" / "0").rename(root / "later" / "2")
    (root / "later").rename(root / "val")
    with pytest.raises(
        ValueError, match="the validation images have the classes 1, 2, and the training images have 0, 1"
    ):
        open_torch(root)
    for key in ("val_split", "test_split"):
        with pytest.raises(ValueError, match=rf"data\.{key}=train and data\.train_split=train are the same images"):
            open_torch(root, **{key: "train"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "train", "measured"),
    [
        ("torch/imagenet", "val", "validation"),
        ("torch/imagenet", "train", "train"),
        ("torch/places365", "train", "train-standard"),
        ("torch/inaturalist", "full/2021_train", "training"),
        ("torch/INAT", "2021_valid", "kingdom/val"),
    ],
)
def test_sets_of_torchvision_are_not_measured_on_their_training_images(source, train, measured):
    names = {"train": train, "validation": measured, "test": None}
    told = f"data.train_split={train} and data.val_split={measured} are the same images of data.source={source}: give"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        parts_of(source, names)
    named = names | {"validation": "2021_train_mini"}
    assert parts_of(source, named) == {"train": train, "validation": "2021_train_mini"}


@pytest.mark.slow
@pytest.mark.parametrize("key", ["val_split", "test_split"])
def test_no_table_is_measured_that_is_the_training(key, tmp_path):
    write_images(tmp_path)
    rows = [f"{name}/{index}.png,{name}" for name in ("cat", "dog") for index in range(4)]
    (tmp_path / "train.csv").write_text("\n".join(["file,label", *rows, ""]))
    module = image_data(name="t", source="csv", root=str(tmp_path), img_size=8, **{key: "train"})
    with pytest.raises(ValueError, match=rf"^data\.{key}=train and data\.train_split=train are the same images \("):
        module.setup()


def evaluated(module, **changes):
    known = {"data": vars(module.keys)}
    return ImageDataModule.for_evaluation(known, changes, split="test", trained=module.info, batch_size=4)


@pytest.mark.slow
def test_sets_of_two_parts_tell_what_they_measure(fashion_mnist, caplog):
    def open_set(**options):
        options = {"val_split": "validation", "test_split": "test", "in_chans": 1} | options
        module = image_data(name="t", source="torch/fashion_mnist", root=str(fashion_mnist), img_size=8, **options)
        module.setup()
        return module

    module = open_set()
    assert module.info.sizes == {"train": 64, "val": 64, "test": 64}
    assert "the validation images are also the test images; data.val_split=null sets a part" in caplog.text
    assert open_set(val_split=None, val_fraction=0.25).info.sizes == {"train": 44, "val": 20, "test": 64}
    for key, name in (("train_split", "Train"), ("val_split", "vall"), ("test_split", "tset")):
        with pytest.raises(
            ValueError, match=rf"data\.{key}={name}: .*called train or training, and test images"
        ) as error:
            open_set(**{key: name})
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"data\.train_split=test and data\.val_split=validation are the same images"):
        open_set(train_split="test")
    assert evaluated(module).info.sizes == {"test": 64}
    with pytest.raises(ValueError, match=r"data\.test_split=tset"):
        evaluated(module, test_split="tset")
