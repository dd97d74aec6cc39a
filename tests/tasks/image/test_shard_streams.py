"""WebDataset shards of which something cannot be read: counted, named, and never trained on in silence."""

import io
import math
import tarfile

import numpy as np
import pytest
import torch
from image_data import image_data
from lightning.pytorch import Trainer
from PIL import Image

from longseq.tasks import ImageClassifier, Training, train
from longseq.tasks.image import data
from longseq.tasks.report import quiet_libraries

pytest.importorskip("webdataset", reason="wds/ sources need longseq[datasets]")
pytestmark = pytest.mark.slow


def picture(shade):
    stream = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), shade, dtype=np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def write_shard(path, samples):
    """A shard of samples, each with its files by their endings."""
    with tarfile.open(path, "w") as archive:
        for number, files in enumerate(samples):
            for ending, content in files.items():
                member = tarfile.TarInfo(f"{number:02}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def samples(count=8, **changes):
    """Samples of two classes; `changes` has by number (as s3) what takes the place of a sample."""
    usual = [{"png": picture(40 + 160 * (number % 2)), "cls": str(number % 2).encode()} for number in range(count)]
    return [changes.get(f"s{number}", sample) for number, sample in enumerate(usual)]


def open_shards(folder, **options):
    options = {"val_split": "good.tar|8", "train_split": "good.tar|8", "num_workers": 0, "batch_size": 4} | options
    options |= {"img_size": 8, "mean": [0.0], "std": [1.0], "num_classes": 2, "test_split": None}
    write_shard(folder / "good.tar", samples())
    module = image_data(name="test", source="wds/data", root=str(folder), **options)
    module.setup("fit")
    return module


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_cannot_be_read_are_counted_and_named(tmp_path, workers):
    broken = {"s1": {"png": b"no image", "cls": b"1"}, "s6": {"txt": b"no picture", "cls": b"0"}}
    for shard in range(2):
        write_shard(tmp_path / f"bad-{shard}.tar", samples(**broken))
    splits = {"val_split": "bad-{0..1}.tar|16", "train_split": "bad-{0..1}.tar|16"}
    module = open_shards(tmp_path, **splits, num_workers=workers)
    assert sum(len(targets) for _, targets in module.val_dataloader()) == 12
    names = {f"bad-{shard}.tar/{name}" for shard in range(2) for name in ("01", "06")}
    assert set(module.unreadable) == names
    again = open_shards(tmp_path, **splits, num_workers=workers)
    assert sum(len(targets) for _, targets in again.train_dataloader()) == 16
    assert set(again.unreadable) == names
    strict = open_shards(tmp_path, **splits, num_workers=workers, on_error="raise")
    for loader in (strict.val_dataloader(), strict.train_dataloader()):
        with pytest.raises(ValueError, match=r"bad-\d.tar/0[16] is not readable \(.*data.on_error=skip$"):
            list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_broken_images_of_a_hugging_face_stream_are_counted_and_named(tmp_path, workers):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "light"])})
    pictures = [{"bytes": picture(40 + 160 * (number % 2)), "path": f"{number}.png"} for number in range(8)]
    pictures[3]["bytes"] = b"no image"
    rows = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1] * 4}, features=features)
    for split in ("train", "validation"):
        rows.to_parquet(tmp_path / "data" / f"{split}.parquet")

    def open_stream(**options):
        options |= {"root": str(tmp_path / "cache"), "img_size": 8, "mean": [0.0], "std": [1.0], "batch_size": 4}
        options |= {"num_workers": workers, "train_samples": 8, "val_split": "validation", "test_split": None}
        module = image_data(name="test", source=f"hfids/{tmp_path / 'data'}", **options)
        module.setup("fit")
        return module

    module = open_stream()
    for loader, count in ((module.val_dataloader(), 7), (module.train_dataloader(), 8)):
        batches = list(loader)
        assert sum(len(targets) for _, targets in batches) == count
        for images, targets in batches:
            assert ((images.float().mean((1, 2, 3)) > 100).long() == targets).all()
    assert module.unreadable == ["3.png"]
    strict = open_stream(on_error="raise")
    for loader in (strict.val_dataloader(), strict.train_dataloader()):
        with pytest.raises(ValueError, match=r"3.png is not readable \(.*data.on_error=skip$"):
            list(loader)


def test_images_with_values_out_of_range_shorten_no_epoch(tmp_path):
    stream = io.BytesIO()
    Image.fromarray(np.full((8, 8), 1e6, dtype=np.float32)).save(stream, "TIFF")
    write_shard(tmp_path / "wild.tar", samples(s2={"tif": stream.getvalue(), "cls": b"0"}))
    module = open_shards(tmp_path, train_split="wild.tar|8")
    assert [len(targets) for _, targets in module.train_dataloader()] == [4, 4]
    assert module.num_unreadable == 1


def test_shards_of_unequal_sizes_have_few_workers(tmp_path, caplog, monkeypatch):
    """With a worker for each of two shards, the images of the smaller one would make up half of an epoch."""
    monkeypatch.setattr(data, "usable_cores", lambda: 8)
    for shard, count in enumerate([40, 40, 40, 40, 40, 40, 40, 8]):
        write_shard(tmp_path / f"u-{shard}.tar", samples(count))
        write_shard(tmp_path / f"e-{shard}.tar", samples(40))
    uneven = "of which {} data worker(s) of 1 device(s) take equal parts"
    for split, given, workers, told in (
        ("u-{0..7}.tar|288", None, 2, None),
        ("u-{6..7}.tar|48", None, 1, None),
        ("e-{0..7}.tar|320", None, 8, None),
        ("u-{6..7}.tar|48", 2, 2, uneven.format(2)),
        ("e-{6..7}.tar|80", 2, 2, None),
    ):
        caplog.clear()
        module = open_shards(tmp_path, train_split=split, num_workers=given)
        assert [module.train_dataloader().num_workers for _ in range(2)] == [workers] * 2
        found = [record.message for record in caplog.records if "take equal parts" in record.message]
        assert len(found) == (told is not None)
        assert told is None or (told in found[0] and found[0].endswith("give data.num_workers=1, or files of one size"))


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        ({"png": picture(9), "json": b'{"label": 1}'}, "shard.tar/03: it has no cls, the number of its class"),
        ({"png": picture(9), "cls": b"cat\n"}, "shard.tar/03: its cls is 'cat', which is no number of a class"),
    ],
)
def test_a_sample_without_the_number_of_its_class_stops_a_run(tmp_path, sample, told):
    write_shard(tmp_path / "shard.tar", samples(s3=sample))
    module = open_shards(tmp_path, train_split="shard.tar|8", val_split="shard.tar|8")
    for loader in (module.train_dataloader(), module.val_dataloader()):
        with pytest.raises(ValueError, match=told):
            list(loader)


def test_a_shard_that_is_cut_off_is_told(tmp_path, caplog):
    """Between two files a reader finds nothing wrong: the end of a tar file is missing, and samples that were told."""
    write_shard(tmp_path / "cut.tar", samples())
    content, left = (tmp_path / "cut.tar").read_bytes(), 3
    (tmp_path / "cut.tar").write_bytes(content[: left * 2 * 1024])  # a file takes 1,024 bytes, its header included
    module = open_shards(tmp_path, val_split="cut.tar|8")
    end = "cut.tar does not end as a tar file ends: it may be cut off"
    assert sum(end in record.message for record in caplog.records) == 1
    for _ in range(2):
        assert sum(len(targets) for _, targets in module.val_dataloader()) == left
    told = [record.message for record in caplog.records if "its shards hold" in record.message]
    assert told == [f"the split cut.tar|8 says 8 images, and its shards hold {left}: is a shard cut off?"]
    with pytest.raises(ValueError, match=end):
        open_shards(tmp_path, val_split="cut.tar|8", on_error="raise")
    module = open_shards(tmp_path, val_split="good.tar|9", on_error="raise")
    with pytest.raises(ValueError, match=r"the split good.tar\|9 says 9 images, and its shards hold 8"):
        list(module.val_dataloader())


def test_a_shard_that_is_cut_off_within_a_file_is_named_once(tmp_path):
    write_shard(tmp_path / "cut.tar", samples())
    content = (tmp_path / "cut.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[: 3 * 2 * 1024 + 512 + 20])  # within the data of the fourth image
    module = open_shards(tmp_path, val_split="cut.tar|8")
    assert sum(len(targets) for _, targets in module.val_dataloader()) == 3
    assert module.unreadable == ["cut.tar"]


def test_an_archive_of_class_folders_that_is_cut_off_is_told(tmp_path, caplog):
    for name, stop in (("whole", None), ("cut", 6 * 1024)):
        (tmp_path / name).mkdir()
        archive = tmp_path / name / "train.tar"
        with tarfile.open(archive, "w") as opened:
            for number in range(12):
                content = picture(number)
                member = tarfile.TarInfo(f"{'ab'[number % 2]}/{number:02}.png")
                member.size = len(content)
                opened.addfile(member, io.BytesIO(content))
        archive.write_bytes(archive.read_bytes()[:stop])
        caplog.clear()
        options = {"img_size": 8, "mean": [0.0], "std": [1.0], "num_workers": 0, "batch_size": 2}
        image_data(name="test", source="folder", root=str(archive), val_fraction=0.25, **options).setup("fit")
        told = [record for record in caplog.records if "does not end as a tar file ends" in record.message]
        assert len(told) == (name == "cut")


def test_absent_shards_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the split good-\{0..2\}.tar\|24 has shards that do not exist: .*good-0.tar"):
        open_shards(tmp_path, train_split="good-{0..2}.tar|24")


@pytest.mark.parametrize("workers", [0, 2])
def test_training_without_the_samples_of_an_epoch_stops(tmp_path, tiny, workers):
    """One of two shards has nothing to read, or the only one has."""
    write_shard(tmp_path / "a-0.tar", samples())
    write_shard(tmp_path / "a-1.tar", [{"png": b"no image", "cls": b"0"}] * 8)
    split = "a-{0..1}.tar|16" if workers else "a-1.tar|8"
    data = ["data=image_folder", "recipe=digits", "data.source=wds/data", f"data.root={tmp_path}", "data.img_size=8"]
    data += [f"data.train_split='{split}'", "data.val_split='a-0.tar|8'", "data.test_split=null"]
    data += ["data.num_classes=2", f"data.num_workers={workers}", "recipe.batch_size=4", "recipe.epochs=2"]
    planned, found = (4, r"[12]") if workers else (2, "0")
    told = f"the training images end after {found} of the {planned} batches of an epoch: no sample of a data worker's"
    with pytest.raises(ValueError, match=told):
        train.run(tiny(*data))


def test_a_class_map_of_lines_gives_numbers_to_numbers(tmp_path):
    (tmp_path / "classes.txt").write_text("1\n0\n")
    module = open_shards(tmp_path, class_map=str(tmp_path / "classes.txt"))
    for images, targets in module.val_dataloader():
        assert ((images[:, 0, 0, 0] > 100).long() == 1 - targets).all()
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    told = r"shards have numbers of classes, and data.class_map has cat, dog: give .*, such as \{0: 1, 1: 0\}"
    with pytest.raises(ValueError, match=told):
        open_shards(tmp_path, class_map=str(tmp_path / "classes.txt"))


def test_commands_do_not_tell_of_a_file_that_shards_need_not_have(tmp_path, capfd, caplog):
    with quiet_libraries():
        open_shards(tmp_path)
    assert "info file" not in capfd.readouterr().err + caplog.text
    open_shards(tmp_path)
    assert "info file" in caplog.text, "a program's own logging is as before"


def test_shards_that_are_trained_on_and_measured_are_told(tmp_path, caplog):
    open_shards(tmp_path)
    assert "data.val_split and data.train_split are the same images of data.source=wds/data" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_a_stream_serves_a_trainer_without_its_data_module(tmp_path):
    module = open_shards(tmp_path)
    info = module.info
    shape = (info.in_chans, info.img_size, info.img_size)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(shape), info.num_classes))
    task = ImageClassifier(model, num_classes=info.num_classes, training=Training(learning_rate=1e-3))
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", max_epochs=1, **silent)
    trainer.fit(task, module.train_dataloader(), module.val_dataloader())
    whole = torch.cat(trainer.predict(task, datamodule=module))
    assert len(whole) == sum(len(targets) for _, targets in module.test_dataloader())
    torch.testing.assert_close(torch.cat(trainer.predict(task, module.val_dataloader())), whole)


def test_repeats_of_an_image_have_no_effect_on_a_stream_and_that_is_told_once(tmp_path, caplog):
    module = open_shards(tmp_path, augment={"repeats": 3})
    assert [len(targets) for _, targets in module.train_dataloader()] == [4, 4]
    list(module.train_dataloader())
    assert caplog.text.count("recipe.augment.repeats=3 has no effect on a stream, and data.source=wds/data is one") == 1
    caplog.clear()
    list(open_shards(tmp_path).train_dataloader())
    assert "augment.repeats" not in caplog.text
