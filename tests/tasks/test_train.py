"""`longseq train`: what a run leaves behind, how it resumes, and several processes."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq.tasks import train


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
    events = EventAccumulator(str(run), size_guidance={"images": 0}).Reload().Tags()
    wanted = {"train/loss", "train/lr", "val/top1", "val/loss", "test/top1", "test/top5"}
    wanted |= {"throughput/images_per_second", "throughput/data_wait_ms"}
    assert wanted <= set(events["scalars"])
    assert {"val/samples", "test/confusion_matrix"} <= set(events["images"])
    assert "_hparams_/session_start_info" in EventAccumulator(str(run)).Reload().summary_metadata


INTERRUPTIBLE = (
    "recipe.epochs=3",
    "model.drop_path_rate=0.2",
    "++recipe.ema={decay: 0.9, warmup: true}",
    "trainer.accumulate_grad_batches=2",
    "callbacks.checkpoint.every_n_train_steps=3",
    "callbacks.samples=null",
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, command, tiny_overrides):
    """The folder of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    result = command(folder, "train", *tiny_overrides, *INTERRUPTIBLE)
    assert result.returncode == 0, result.stderr
    return only(folder, "outputs/image/*")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_an_interrupted_run_resumes_to_the_weights_of_an_uninterrupted_one(
    name, tmp_path, uninterrupted, start, command, tiny_overrides
):
    """Mid-epoch, with an average of the weights, accumulation, drop path, and gradients clipped."""
    process = start(tmp_path, "train", *tiny_overrides, *INTERRUPTIBLE)
    while not list(tmp_path.glob("outputs/image/*/checkpoints/last.ckpt")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == {"SIGKILL": -9, "SIGTERM": 143}[name], errors
    assert ("resume=true" in errors) == (name == "SIGTERM")
    run = only(tmp_path, "outputs/image/*")
    assert 0 < read(run / "checkpoints" / "last.ckpt")["global_step"] < 60

    resumed = command(tmp_path, "train", *tiny_overrides, *INTERRUPTIBLE, "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing from" in resumed.stdout
    assert_same_weights(*(read(folder / "checkpoints" / "last.ckpt") for folder in (uninterrupted, run)))
    metrics = [json.loads((folder / "metrics.json").read_text()) for folder in (uninterrupted, run)]
    assert metrics[0]["test/top1"] == metrics[1]["test/top1"]


def test_resuming_under_another_configuration_names_the_keys(tiny, tmp_path):
    train.run(tiny("recipe.epochs=1"))
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match=r"recipe\.learning_rate: 0\.\d+ there, 0\.5 here"):
        train.run(tiny("recipe.epochs=1", "recipe.learning_rate=0.5", f"resume={path}"))


def test_a_finished_run_is_neither_repeated_nor_overwritten(tiny, tmp_path):
    value = train.run(tiny("recipe.epochs=1"))
    before = (tmp_path / "run" / "checkpoints" / "last.ckpt").stat().st_mtime_ns
    assert train.run(tiny("recipe.epochs=1", "resume=true")) == value
    with pytest.raises(ValueError, match="holds a run already"):
        train.run(tiny("recipe.epochs=1"))
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").stat().st_mtime_ns == before


def test_two_processes_count_each_test_image_once(tmp_path, command, tiny_overrides):
    """359 test images do not divide by two."""
    result = command(tmp_path, "train", *tiny_overrides, "trainer=ddp_sim")
    assert result.returncode == 0, result.stderr
    run = only(tmp_path, "outputs/image/*")
    tested = json.loads((run / "metrics.json").read_text())
    alone = command(tmp_path, "evaluate", f"checkpoint={run / 'checkpoints' / 'best.ckpt'}", "trainer=cpu")
    assert alone.returncode == 0, alone.stderr
    evaluated = json.loads((run / "evaluation_test.json").read_text())
    assert tested["test/top1"] == evaluated["test/top1"]
    assert round(tested["test/top1"] * 359, 3) == round(tested["test/top1"] * 359)
    assert result.stdout.count("effective batch 64 = 32 per device x 2 device(s)") == 1


def test_a_sweep_trains_each_choice(tmp_path, command, tiny_overrides):
    result = command(tmp_path, "train", "-m", *tiny_overrides, "seed=0,1", "recipe.epochs=1")
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob("outputs/image/sweep_*/*/metrics.json"))) == 2


def test_fine_tuning_starts_from_a_checkpoint_at_another_stride(tiny, tmp_path):
    train.run(tiny("recipe.epochs=1"))
    trained = tmp_path / "run" / "checkpoints" / "best.ckpt"
    value = train.run(
        tiny(
            f"output={tmp_path / 'finer'}",
            f"init={trained}",
            "model.stride=2",
            "recipe.epochs=1",
            "recipe.learning_rate=0",
        )
    )
    assert value > 0.05
    first, second = read(trained), read(tmp_path / "finer" / "checkpoints" / "best.ckpt")
    assert second["state_dict"]["backbone.pos_embed"].shape[1] < first["state_dict"]["backbone.pos_embed"].shape[1]
    name = "backbone.blocks.1.mixer.mixers.0.in_proj.weight"
    torch.testing.assert_close(second["state_dict"][name], first["state_dict"][name], atol=1e-3, rtol=0)
    with pytest.raises(ValueError, match="init: the checkpoint's model differs"):
        train.run(tiny(f"output={tmp_path / 'wider'}", f"init={trained}", "model.embed_dim=32"))
