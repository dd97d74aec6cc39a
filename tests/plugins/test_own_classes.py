"""Classes that a configuration names in a plug-in: the user's model, Dataset and LightningDataModule."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import start_fork
from torchvision.utils import save_image

import longseq
from longseq import plugins
from longseq.tasks import ImageDataKeys
from longseq.tasks.image.own_dataset import own_held_out
from longseq.tasks.training import targets

MODULE = "own_shapes"
NET = ("model=own", f"model._target_={MODULE}.Net", "data=own", f"plugins=[{MODULE}]")
SMALL = (
    "data.img_size=8",
    "data.crop_pct=1.0",
    "data.num_workers=0",
    "trainer=cpu",
    "logger=none",
    "callbacks.worst=null",
)
SQUARES = f"data.train_set={{_target_: {MODULE}.Squares, samples: 40}}"
BEST = "checkpoint=run/checkpoints/best.ckpt"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the plug-in, which is forgotten afterwards."""
    shutil.copy(Path(__file__).with_name(f"{MODULE}.py"), tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_LOADED", dict(plugins._LOADED))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return tmp_path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, no plug-in is loaded."""
    plugins._LOADED.pop(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)


@pytest.mark.slow
def test_own_model_and_dataset_train_and_are_used(
    folder: Path, command_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = f"data.test_set={{_target_: {MODULE}.Squares, samples: 20, first: 100}}"
    long = ("recipe.epochs=4", "recipe.learning_rate=0.1", "recipe.loss.label_smoothing=0", "recipe.ema=null")
    trained = command_here(folder, "train", *NET, "+model.width=4", *SMALL, SQUARES, test, *long, "output=run")
    assert trained.returncode == 0, trained.stderr
    metrics = json.loads((folder / "run/metrics.json").read_text())
    assert metrics["test/top1"] == 1.0
    assert f"longseq evaluate {BEST} 'plugins=[{MODULE}]'" in trained.stdout

    forget(monkeypatch)
    refused = command_here(folder, "evaluate", BEST)
    assert refused.returncode == 2
    assert f"needs the plug-in {MODULE}, which nothing declares" in refused.stderr
    assert MODULE not in sys.modules

    declared = f"plugins=[{MODULE}]"
    assert command_here(folder, "evaluate", BEST, declared, "output=again.json").returncode == 0
    again = json.loads((folder / "again.json").read_text())
    assert again["test/images"] == 20
    assert again["test/loss"] == pytest.approx(metrics["test/loss"], rel=1e-6)

    save_image(torch.full((3, 8, 8), 0.9), folder / "white.png")
    assert command_here(folder, "predict", BEST, declared, "input=white.png").returncode == 0
    assert "white.png,bright,0.9" in (folder / "predictions.csv").read_text()

    exported = command_here(folder, "export", BEST, declared, "format=torchscript", "latency=false", "output=own.pt")
    assert exported.returncode == 0, exported.stderr
    model = longseq.from_pretrained(folder / "run/model")
    images = torch.rand(3, 3, 8, 8)
    torch.testing.assert_close(torch.jit.load(folder / "own.pt")(images), model(images))


@pytest.mark.slow
def test_own_datamodule_trains_and_resumes(folder: Path, command_here: Any) -> None:
    data = f"data.datamodule={{_target_: {MODULE}.Batches}}"
    words = ("train", *NET, *SMALL, data, "recipe.batch_size=8", "recipe.epochs=2", "output=run")
    (folder / "stop").touch()
    assert command_here(folder, *words).returncode == 128 + signal.SIGTERM
    last = folder / "run/checkpoints/last.ckpt"
    before = torch.load(last, weights_only=True)
    assert before["OwnDataModule"]["stages"] == ["fit"]
    again = command_here(folder, *words, f"resume={last}")
    assert again.returncode == 0, again.stderr
    assert "own_shapes.Batches has no test split: the validation images are also the test images" in again.stderr
    after = torch.load(last, weights_only=True)
    assert before["global_step"] < after["global_step"] == 8
    assert after["OwnDataModule"]["loaders"] > before["OwnDataModule"]["loaders"]
    evaluated = command_here(folder, "evaluate", BEST, f"plugins=[{MODULE}]", "output=again.json")
    assert evaluated.returncode == 0, evaluated.stderr
    told, found = (json.loads((folder / name).read_text()) for name in ("run/metrics.json", "again.json"))
    assert found["test/images"] == 32
    assert found["test/loss"] == pytest.approx(told["test/loss"], rel=1e-6)


# A class for each place of a user's code; the environment says which one fails, and how.
FAILING = """
import os
import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

def fail(place):
    if os.environ["FAIL"] == place:
        raise KeyError("my own words")

class Images(Dataset):
    classes = ["a", "b"]
    def __init__(self):
        fail("the set")
    def __len__(self):
        return 40
    def __getitem__(self, number):
        if number == 5:
            fail("a sample")
        return np.full((8, 8, 3), number, np.uint8), number % 2

class Batches(LightningDataModule):
    num_classes = 2
    def setup(self, stage):
        fail("setup")
        self.pairs = TensorDataset(torch.rand(32, 3, 8, 8), torch.arange(32) % 2)
    def train_dataloader(self):
        few = os.environ["FAIL"] == "empty"
        return DataLoader(self.pairs, batch_size=64 if few else 8, drop_last=True)
    def val_dataloader(self):
        fail("loader")
        if os.environ["FAIL"] == "none":
            return None
        whole = DataLoader(self.pairs, batch_size=8)
        return [whole, whole] if os.environ["FAIL"] == "several" else whole

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        fail("the model")
        self.head = nn.Linear(192, num_classes)
    def forward(self, images):
        fail("forward")
        return self.head(images.flatten(1))
"""
IMAGES, BATCHES = ("data.train_set={_target_: failing.Images}",), ("data.datamodule={_target_: failing.Batches}",)
PLACE = "(failing.py, line 11, in fail; LONGSEQ_TRACEBACK=1 shows the full traceback)"


@pytest.mark.parametrize(
    ("place", "data", "message"),
    [
        ("the set", IMAGES, f"KeyError: 'my own words' {PLACE}"),
        ("a sample", IMAGES, f"failing.Images#5: KeyError: 'my own words' {PLACE}"),
        ("a sample", (*IMAGES, "data.num_workers=1"), f"failing.Images#5: KeyError: 'my own words' {PLACE}"),
        ("setup", BATCHES, f"KeyError: 'my own words' {PLACE}"),
        ("loader", BATCHES, f"KeyError: 'my own words' {PLACE}"),
        ("none", BATCHES, "failing.Batches.val_dataloader returns NoneType, and one loader is needed: return a"),
        ("several", BATCHES, "failing.Batches.val_dataloader returns several loaders, and one loader is needed"),
        ("empty", BATCHES, "failing.Batches.train_dataloader returns a loader without a batch: give its data set"),
        ("the model", IMAGES, f"KeyError: 'my own words' {PLACE}"),
        ("forward", IMAGES, f"KeyError: 'my own words' {PLACE}"),
    ],
)
@pytest.mark.slow
def test_an_error_of_the_users_code_is_one_line_with_its_place(
    tmp_path: Path, place: str, data: tuple[str, ...], message: str
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    net = ("data=own", "model=own", "model._target_=failing.Net", "plugins=[failing]")
    words = ("train", *net, *SMALL, "recipe.epochs=1", "recipe.batch_size=8", "output=run", *data)
    environment = {**os.environ, "FAIL": place}
    process = start_fork(words, tmp_path, environment=environment)
    _, errors = process.communicate()
    assert process.returncode == 2, errors
    assert errors.splitlines()[-1].startswith(f"longseq: error: {message}"), errors
    assert "Traceback" not in errors
    if place == "a sample":
        environment["LONGSEQ_TRACEBACK"] = "1"
        process = start_fork((*words, "output=again"), tmp_path, environment=environment)
        assert 'failing.py", line 11, in fail' in process.communicate()[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([SQUARES, "model._target_=own_shapes.Features"], "must become logits [2, 2], and it gives [2, 4, 6, 6]"),
        (
            ["data.train_set={_target_: own_shapes.Squares, samples: 40, wrong: 5}"],
            "own_shapes.Squares#5: its label 7 is not among the classes 0 to 1",
        ),
        (
            ["data.train_set={_target_: own_shapes.Squares, samples: 40, told: 0}", "data.num_workers=1"],
            "its label is not targets[",
        ),
        (["data.datamodule={_target_: own_shapes.Batches, labels: 3}"], "the label 2 is not among the classes 0 to 1"),
        (["data.datamodule={_target_: own_shapes.Batches}", "data.img_size=9"], "images must be floats ['B', 3, 9, 9]"),
        (
            ["data.datamodule={_target_: own_shapes.Batches, raw: true}"],
            "own_shapes.Batches: images must be floats ['B', 3, 8, 8]",
        ),
    ],
)
@pytest.mark.slow
def test_what_does_not_fit_the_task_is_one_line(
    folder: Path, command_here: Any, words: list[str], message: str
) -> None:
    done = command_here(folder, "train", *NET, *SMALL, "output=run", *words)
    assert done.returncode == 2
    (error,) = [line for line in done.stderr.splitlines() if not line.startswith("longseq: warning")]
    assert message in error


def test_a_datamodule_has_all_splits() -> None:
    batches, squares = ({"_target_": f"{MODULE}.{name}"} for name in ("Batches", "Squares"))
    with pytest.raises(ValueError, match=r"data\.datamodule has all splits: leave data\.train_set out"):
        ImageDataKeys(name="own", source="own", img_size=8, datamodule=batches, train_set=squares)


def open_test_set(node: dict[str, Any]) -> None:
    targets.check({"data": {"test_set": {"_target_": node["_target_"]}}})
    train = {"_target_": "own_shapes.Squares", "samples": 9}
    own_held_out(ImageDataKeys(name="own", source="own", img_size=8, train_set=train, test_set=node), "test")


def test_a_set_is_measured_without_one_to_train_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plugins.load([MODULE])
    keys = ImageDataKeys(
        name="own", source="own", img_size=8, test_set={"_target_": "own_shapes.Squares", "samples": 9}
    )
    found = own_held_out(keys, "test")
    assert found is not None
    assert len(found) == 9
    assert own_held_out(keys, "validation") is None


def test_wrong_names_and_samples_are_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plugins.load([MODULE])
    for node, message in (
        ({"_target_": None}, "data.test_set._target_=null names no class: give its full name in a plug-in"),
        ({"_target_": "own_shapes.Circles"}, "defines no class Circles; its classes of this kind are Squares, Stream"),
        ({"_target_": "own_shapes.Net"}, "is no Dataset of torch: derive Net from it"),
        ({"_target_": "own_shapes.TensorDataset"}, "own_shapes defines no class TensorDataset"),
        ({"_target_": "os.system", "command": "ls"}, "is not called: it must be a class of a module of yours"),
        ({"_target_": "own_shapes.os.popen"}, "there is no module own_shapes.os"),
        ({"_target_": "own_shapes.Squares", "sample": 3}, "did you mean data.test_set.samples?"),
        ({"_target_": "own_shapes.Squares", "samples": {"_target_": "a.b"}}, "nothing is built from a name here"),
        ({"_target_": "own_shapes.Squares", "samples": 9, "shape": "float"}, "of float32 must be uint8 with 1 or 3"),
        ({"_target_": "own_shapes.Squares", "samples": 9, "shape": "four"}, "must be uint8 with 1 or 3 channels"),
        ({"_target_": "own_shapes.Squares", "samples": 9, "shape": "three"}, "(image, label)"),
        ({"_target_": "own_shapes.Squares", "samples": 9, "wrong": 0}, "its label 7 is not among the classes"),
        ({"_target_": "own_shapes.Squares", "samples": 9, "told": 1}, "its label is not targets[0], which is 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            open_test_set(node)
        assert "\n" not in str(error.value)
