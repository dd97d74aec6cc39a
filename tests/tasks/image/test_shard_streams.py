"""WebDataset shards, of which some are absent or have nothing to read."""

import io
import tarfile

import numpy as np
import pytest
from image_data import image_data
from PIL import Image

from longseq.tasks import train

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


def test_absent_shards_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"good-0.tar"):
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
    told = f"the training images end after {found} of the {planned} batches of an epoch"
    with pytest.raises(ValueError, match=told):
        train.run(tiny(*data))


def test_a_class_map_of_lines_gives_numbers_to_numbers(tmp_path):
    (tmp_path / "classes.txt").write_text("1\n0\n")
    module = open_shards(tmp_path, class_map=str(tmp_path / "classes.txt"))
    for images, targets in module.val_dataloader():
        assert ((images[:, 0, 0, 0] > 100).long() == 1 - targets).all()
