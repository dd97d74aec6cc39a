"""`longseq train`: the results of a run, its resume, and several processes."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_longseq, start_fork
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq.tasks import train
from longseq.tasks.image.module import ImageClassifier


def read(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def assert_same_weights(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["global_step"] == other["global_step"]
    for part in ("state_dict", "current_model_state"):
        assert one[part].keys() == other[part].keys()
        for name, value in one[part].items():
            assert torch.equal(value, other[part][name]), f"{part}: {name}"


@pytest.mark.slow
def test_a_run_writes_checkpoints_events_metrics_and_its_configuration(tiny, tmp_path):
    value = train.run(tiny("++recipe.ema={decay: 0.9, warmup: true}", "trainer.log_every_n_steps=5"))
    run = tmp_path / "run"
    metrics = json.loads((run / "metrics.json").read_text())
    assert value == metrics["val/top1"]
    assert {"test/top1", "test/top5", "test/loss", "seconds", "parameters", "images_per_second"} <= metrics.keys()
    assert [row["class"] for row in metrics["test/per_class"]] == [str(digit) for digit in range(10)]

    checkpoint = read(run / "checkpoints" / "best.ckpt")
    assert checkpoint["hyper_parameters"]["config"]["mixer"]["name"] == "attention"
    assert checkpoint["hyper_parameters"]["data"]["class_names"] == [str(digit) for digit in range(10)]
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert "mixer:" in (run / "config.yaml").read_text()

    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    board = EventAccumulator(str(run)).Reload()
    events = board.Tags()
    wanted = {"train/loss", "train/lr", "train/gradient_norm", "val/top1", "val/loss", "test/top1", "test/top5"}
    wanted |= {"throughput/images_per_second", "throughput/data_wait_ms"}
    assert wanted <= set(events["scalars"])
    assert "_hparams_/session_start_info" in board.summary_metadata
    for tag in events["scalars"]:
        steps = [event.step for event in board.Scalars(tag)]
        assert steps == sorted(steps), tag


@pytest.mark.slow
def test_a_run_that_ends_before_its_model_is_written_is_finished_by_resume(
    tmp_path, monkeypatch, command_here, tiny_overrides
):
    monkeypatch.setenv("LOCAL_RANK", "1")  # left by another job, and ignored
    words = ("train", *tiny_overrides, "recipe.epochs=1", "output=run")
    with pytest.MonkeyPatch.context() as patch:

        def end(*_):  # as SIGTERM does it there
            raise KeyboardInterrupt

        patch.setattr(train, "save_pretrained", end)
        assert command_here(tmp_path, *words).returncode != 0
    resumed = command_here(tmp_path, *words, "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert "this run is finished" not in resumed.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert "this run is finished" in command_here(tmp_path, *words, "resume=true").stdout


INTERRUPTIBLE = (
    "recipe.epochs=3",
    "model.drop_path_rate=0.2",
    "++recipe.ema={decay: 0.9, warmup: true}",
    "trainer.accumulate_grad_batches=2",
    "callbacks.checkpoint.every_n_train_steps=3",
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, compose_config, tiny_overrides):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    train.run(compose_config("train", *tiny_overrides, *INTERRUPTIBLE, f"output={folder / 'run'}"))
    return folder / "run"


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_weights_of_an_uninterrupted_one(
    tmp_path, uninterrupted, start, command_here, tiny_overrides
):
    """Mid-epoch, with an average of the weights, accumulation, drop path, and gradients clipped."""
    words = ("train", *tiny_overrides, *INTERRUPTIBLE)
    process = start(tmp_path, *words)
    while not list(tmp_path.glob("outputs/image/*/checkpoints/last.ckpt")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)
    run = only(tmp_path, "outputs/image/*")
    assert (run / "run.lock").exists()
    saved = read(run / "checkpoints" / "last.ckpt")
    assert 0 < saved["global_step"] < 60
    saved["callbacks"]["RunClock"]["time_elapsed"]["train"] += 1000  # as if its first leg had taken so long
    torch.save(saved, run / "checkpoints" / "last.ckpt")

    resumed = command_here(tmp_path, "train", *tiny_overrides, *INTERRUPTIBLE, "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing from" in resumed.stdout
    assert not (run / "run.lock").exists()
    assert not (run / ".hydra").exists()
    assert_same_weights(*(read(folder / "checkpoints" / "last.ckpt") for folder in (uninterrupted, run)))
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (uninterrupted, run)]
    assert metrics[0]["test/top1"] == metrics[1]["test/top1"]
    assert metrics[0]["seconds"] < 1000 < metrics[1]["seconds"] < 1300


@pytest.mark.slow
def test_two_processes_count_each_test_image_once(tmp_path, command, command_here, tiny_overrides):
    """359 test images are not divisible by two."""
    result = command(tmp_path, "train", *tiny_overrides, "trainer=ddp_sim")
    assert result.returncode == 0, result.stderr
    run = only(tmp_path, "outputs/image/*")
    tested = json.loads((run / "metrics.json").read_text())
    alone = command_here(tmp_path, "evaluate", f"checkpoint={run / 'checkpoints' / 'best.ckpt'}", "trainer=cpu")
    assert alone.returncode == 0, alone.stderr
    evaluated = json.loads((run / "evaluation_test.json").read_text())
    assert tested["test/top1"] == evaluated["test/top1"]
    assert round(tested["test/top1"] * 359, 3) == round(tested["test/top1"] * 359)
    assert result.stdout.count("effective batch 64 = 32 per device x 2 device(s)") == 1


@pytest.mark.slow
def test_a_sharded_run_measures_what_one_process_does_and_goes_on_there(
    tiny, tmp_path, monkeypatch, command, command_here, tiny_overrides
):
    words = ("recipe.epochs=1", "recipe.batch_size=128", "recipe.ema=null", "trainer.precision=32-true")
    words += ("callbacks.checkpoint.every_n_train_steps=5",)
    # cutmix draws for the batch of a device
    words += ("recipe.augment.mixing.cutmix=0", "trainer.log_every_n_steps=1")
    train.run(tiny(*words))
    step = ImageClassifier.training_step

    def keep_the_half(self: ImageClassifier, *batch: Any) -> Any:
        if self.trainer.global_step == 7 and self.trainer.is_global_zero:
            shutil.copy("sharded/checkpoints/last.ckpt", "half.ckpt")
        return step(self, *batch)

    others = [word for word in tiny_overrides if word != "trainer=cpu"]
    sharded = ("trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=2", "output=sharded")
    with monkeypatch.context() as patch:
        patch.setattr(ImageClassifier, "training_step", keep_the_half)  # the processes are forks of this one
        result = command(tmp_path, "train", *others, *words, *sharded)
    assert result.returncode == 0, result.stderr
    assert read(tmp_path / "half.ckpt")["global_step"] == 5
    train.run(tiny(*words, f"output={tmp_path / 'other'}", f"resume={tmp_path / 'half.ckpt'}"))

    whole, *again = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("run", "sharded", "other"))
    weights = read(tmp_path / "run" / "checkpoints" / "last.ckpt")["state_dict"]
    for name, metrics in zip(("sharded", "other"), again, strict=True):
        own = read(tmp_path / name / "checkpoints" / "last.ckpt")["state_dict"]
        assert own.keys() == weights.keys()
        for key, value in weights.items():  # AdamW divides tiny gradients by their size, and so their rounding grows
            torch.testing.assert_close(own[key], value, rtol=1e-3, atol=1e-4)
        for key in ("val/loss", "val/top1", "test/loss", "test/top1", "test/f1"):
            assert metrics[key] == pytest.approx(whole[key], rel=1e-3), (name, key)
    boards = [EventAccumulator(str(tmp_path / name)).Reload() for name in ("run", "sharded")]
    losses = [[event.value for event in board.Scalars("train/loss")] for board in boards]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)

    alone = command_here(tmp_path, "evaluate", "checkpoint=sharded/checkpoints/best.ckpt", "trainer=cpu")
    assert alone.returncode == 0, alone.stderr
    evaluated = json.loads((tmp_path / "sharded" / "evaluation_test.json").read_text())
    assert evaluated["test/top1"] == pytest.approx(again[0]["test/top1"], rel=1e-6)


@pytest.mark.slow
def test_a_run_remembers_where_its_images_are(tmp_path, command_here, tiny_overrides, image_folder):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    shutil.copytree(image_folder, home / "images")
    shutil.copytree(image_folder / "val", elsewhere / "images" / "train")  # other images in a folder of the same name
    words = ("data=image_folder", "recipe=digits", "data.root=images", "data.img_size=16", "data.num_workers=0")
    words += ("recipe.epochs=1", "recipe.batch_size=8")
    trained = command_here(home, "train", *tiny_overrides, *words, f"output={home / 'run'}")
    assert trained.returncode == 0, trained.stderr
    checkpoint = home / "run" / "checkpoints" / "last.ckpt"
    assert read(checkpoint)["hyper_parameters"]["config"]["data"]["root"] == str(home / "images")

    evaluate = ("evaluate", f"checkpoint={checkpoint}", "trainer=cpu")
    measured = command_here(elsewhere, *evaluate, f"output={tmp_path / 'there.json'}")
    assert measured.returncode == 0, measured.stderr
    metrics = json.loads((home / "run" / "metrics.json").read_text())
    assert json.loads((tmp_path / "there.json").read_text())["test/loss"] == pytest.approx(metrics["test/loss"])

    again = ("train", *tiny_overrides, *words, f"resume={checkpoint}", f"output={home / 'run'}")
    refused = command_here(elsewhere, *again)
    assert refused.returncode == 2
    assert f"data.root: '{home / 'images'}' there, '{elsewhere / 'images'}' here" in refused.stderr

    (home / "images").rename(tmp_path / "images")
    moved = command_here(tmp_path, *again)
    assert moved.returncode == 0, moved.stderr


@pytest.mark.slow
def test_a_run_is_repeated_by_its_record(tmp_path, command_here, tiny_overrides):
    words = (*tiny_overrides, "recipe.epochs=1", "logger=[tensorboard,csv]", "data.num_workers=0")
    first = command_here(tmp_path, "train", *words, "output=first")
    assert first.returncode == 0, first.stderr
    before = {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()}

    again = command_here(tmp_path, "train", "--config-dir", "first", "--config-name", "config", "output=second")
    assert again.returncode == 0, again.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()} == before
    assert_same_weights(*(read(tmp_path / run / "checkpoints" / "last.ckpt") for run in ("first", "second")))
    records = [(tmp_path / run / "config.yaml").read_text() for run in ("first", "second")]
    kept = [[line for line in record.splitlines() if not line.startswith("output: ")] for record in records]
    assert kept[0] == kept[1]
    same_place = command_here(tmp_path, "train", "--config-dir=first", "--config-name", "config")
    assert same_place.returncode == 2
    assert "first holds a run already" in same_place.stderr


def run_with_little_shared_memory() -> int:
    """Run `longseq`, whose files, also those of shared memory, have at most 128 KiB; the images of a batch are 1 MB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as in a new process of Python
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, resource.RLIM_INFINITY))
    return run_longseq()


@pytest.mark.slow
def test_a_run_ends_if_its_workers_have_too_little_shared_memory(command, image_folder, tiny_overrides, tmp_path):
    words = ("data=image_folder", f"data.root={image_folder}", "data.img_size=224", "model.patch_size=56")
    train = ("train", *tiny_overrides, *words, "recipe.batch_size=8", "recipe.epochs=1")
    done = command(tmp_path, *train, "data.num_workers=0", "output=run")
    assert done.returncode == 0, done.stderr
    predict = ("predict", "checkpoint=run/checkpoints/best.ckpt", f"input={image_folder}", "output=predictions.csv")
    for limited in ((*train, "data.num_workers=2", "output=limited"), (*predict, "num_workers=2")):
        process = start_fork(limited, tmp_path, run=run_with_little_shared_memory)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 2
        *_, last = errors.splitlines()
        assert last.startswith("longseq: error: ")
        assert "Traceback" not in errors
        assert "File too large" in last
