"""Processes of a run that read different configurations, data or checkpoints: each ends with the same line."""

from __future__ import annotations

import os
import re
import shutil
import sys
import types

import pytest
import torch

from longseq.tasks import train

IMAGES = (
    "data=image_folder",
    "recipe=digits",
    "data.img_size=16",
    "data.num_workers=0",
    "recipe.batch_size=8",
    "recipe.epochs=1",
    "callbacks.samples=null",
    "callbacks.worst=null",
    "trainer=ddp_sim",
    "output=run",
)


@pytest.fixture
def two(tmp_path, tiny_overrides, image_folder, command, monkeypatch):
    """two(change, *words): a run of two processes, the second of which has its configuration from `change`."""
    shutil.copytree(image_folder, tmp_path / "images")
    others = [word for word in tiny_overrides if word != "trainer=cpu"]
    resolve = train.resolve

    def call(change, *words):
        def resolve_here(cfg):
            config = resolve(cfg)
            if os.environ.get("LOCAL_RANK") == "1":
                change(config)
            return config

        monkeypatch.setattr(train, "resolve", resolve_here)  # the processes are forks of this one
        return command(tmp_path, "train", *others, *IMAGES, "data.root=images", *words)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_process_that_lacks_an_image_is_named(split, tmp_path, two):
    shutil.copytree(tmp_path / "images", tmp_path / "there")
    (tmp_path / "there" / split / "class0" / "3.jpg").unlink()
    result = two(lambda config: config["data"].update(root="there"))
    count = {"train": 24, "val": 12}[split]
    told = rf"process 1 of this run \(on .+\) and process 0 \(on .+\) read different data: {split} has {count - 1} and "
    assert re.search(rf"^longseq: error: {told}{count} samples; give all machines the same files$", result.stderr, re.M)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "epoch 1" not in result.stdout


@pytest.mark.slow
def test_other_keys_and_checkpoints_are_named_and_places_may_differ(tmp_path, two):
    result = two(lambda config: config["recipe"].update(learning_rate=0.5))
    assert "differ in recipe.learning_rate, 0.5 and 0.002: give all processes the same" in result.stderr
    assert result.returncode == 2

    shutil.copytree(tmp_path / "images", tmp_path / "there")
    result = two(lambda config: config["data"].update(root="there", num_workers=1))
    assert result.returncode == 0, result.stderr

    (tmp_path / "run" / "metrics.json").unlink()
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    older = tmp_path / "older" / "checkpoints" / "last.ckpt"
    older.parent.mkdir(parents=True)
    torch.save({**saved, "global_step": saved["global_step"] - 1}, older)
    result = two(lambda config: config.update(resume=str(older)), "resume=true")
    assert f"differ in the update to go on from, {saved['global_step'] - 1} and {saved['global_step']}" in result.stderr
    assert result.returncode == 2


@pytest.mark.slow
def test_the_error_of_another_process_is_one_line_that_names_it(tmp_path, two):
    shutil.copytree(tmp_path / "images", tmp_path / "there")
    for path in (tmp_path / "there" / "train").glob("*/*.jpg"):
        path.write_bytes(bytes(path.stat().st_size))
    result = two(lambda config: config["data"].update(root="there"), "data.on_error=raise", "recipe.epochs=9")
    told = [line for line in result.stderr.splitlines() if "warning" not in line and not line.startswith("stopped;")]
    assert len(told) == 1, result.stderr
    assert re.match(r"longseq: error: process 1 of this run: .*there/train/class\d/\d\.jpg", told[0])
    assert result.returncode == 2


def test_a_program_without_a_file_is_refused_before_it_would_be_started_again(tiny, monkeypatch, tmp_path):
    """As `python -c "..."`: Lightning starts other processes by the name of the program."""
    config = tiny("trainer.devices=2", "+trainer.strategy=ddp")
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", ["-c", "train"])
    monkeypatch.setattr(train, "_open", None)  # what follows would end this process
    with pytest.raises(
        ValueError, match=r"^trainer\.devices=2 .* no file to start \('-c' is none\): put it into a FILE"
    ):
        train.run(config)
    assert not list(tmp_path.iterdir())
