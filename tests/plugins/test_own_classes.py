"""Classes that a configuration names in a plug-in: the user's model and Dataset."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.utils import save_image

import longseq
from longseq import plugins
from longseq.tasks import ImageDataKeys
from longseq.tasks.data.labels import LabelError
from longseq.tasks.image.sources import OwnLayout, Source

MODULE = "own_shapes"
NET = ("model=own", f"model._target_={MODULE}.Net", "data=own", f"plugins=[{MODULE}]")
SMALL = ("data.img_size=8", "data.crop_pct=1.0", "data.num_workers=0", "trainer=cpu", "logger=none")
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
    assert command_here(folder, "evaluate", BEST).returncode == 2
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


def open_test_set(node: dict[str, Any]) -> Source | None:
    train = {"_target_": "own_shapes.Squares", "samples": 9}
    keys = ImageDataKeys(name="own", source="own", img_size=8, train_set=train, test_set=node)
    return OwnLayout(keys).open_held_out("test", [], foreign=False)


def test_only_classes_of_plug_ins_are_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plugins.load([MODULE])
    for target in ("os.system", "own_shapes.Net", "own_shapes.Dataset", "builtins.dict"):
        with pytest.raises(ValueError, match="plug-in"):
            open_test_set({"_target_": target})


def test_labels_that_do_not_fit_the_classes_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plugins.load([MODULE])
    for wrong in ({"wrong": 0}, {"told": 1}):
        source = open_test_set({"_target_": "own_shapes.Squares", "samples": 9, **wrong})
        assert source is not None
        with pytest.raises(LabelError, match="label"):
            source.read(0)
