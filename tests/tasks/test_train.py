"""`longseq train`: the results of a run, its resume, and several processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq.tasks import train
from longseq.tasks.image.module import ImageClassifier
from longseq.tasks.training import runs
from longseq.tasks.training.callbacks.nonfinite import NonFiniteError


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
    events = EventAccumulator(str(run), size_guidance={"images": 0}).Reload().Tags()
    wanted = {"train/loss", "train/lr", "train/gradient_norm", "val/top1", "val/loss", "test/top1", "test/top5"}
    wanted |= {"throughput/images_per_second", "throughput/data_wait_ms"}
    assert wanted <= set(events["scalars"])
    assert {"val/samples", "test/confusion_matrix"} <= set(events["images"])
    board = EventAccumulator(str(run)).Reload()
    assert "_hparams_/session_start_info" in board.summary_metadata
    for tag in events["scalars"]:
        steps = [event.step for event in board.Scalars(tag)]
        assert steps == sorted(steps), tag


@pytest.mark.slow
def test_the_metrics_are_those_of_the_best_checkpoint(tiny, tmp_path):
    train.run(tiny("recipe.epochs=4", "recipe.learning_rate=0.02"))
    run = tmp_path / "run"
    metrics = json.loads((run / "metrics.json").read_text())
    board = EventAccumulator(str(run)).Reload()
    epoch = read(run / "checkpoints" / "best.ckpt")["epoch"]
    for tag in ("val/top1", "val/top5", "val/loss"):
        assert metrics[tag] == pytest.approx(board.Scalars(tag)[epoch].value)
    saved = read(run / "checkpoints" / "last.ckpt")["callbacks"]
    (best,) = (state["best_metrics"] for state in saved.values() if "best_metrics" in state)
    assert best == {tag: metrics[tag] for tag in best}


@pytest.mark.slow
def test_with_accumulation_the_rate_of_each_update_is_logged_once(tiny, tmp_path):
    train.run(
        tiny(
            "recipe.epochs=1",
            "trainer.accumulate_grad_batches=2",
            "trainer.log_every_n_steps=1",
            "recipe.schedule.warmup_epochs=0.5",
        )
    )
    rates = EventAccumulator(str(tmp_path / "run")).Reload().Scalars("train/lr")
    updates = read(tmp_path / "run" / "checkpoints" / "last.ckpt")["global_step"]
    assert [event.step for event in rates] == list(range(updates))
    assert rates[0].value == pytest.approx(1e-6)


@pytest.mark.slow
def test_with_accumulation_the_loss_of_each_update_is_that_of_its_whole_batch(tiny, tmp_path):
    losses = []
    for parts in (1, 4):
        folder = tmp_path / str(parts)
        words = (f"trainer.accumulate_grad_batches={parts}", "trainer.log_every_n_steps=1", f"output={folder}")
        # mixing is drawn for each part of a batch
        train.run(tiny("recipe.epochs=1", "recipe.augment.mixing.prob=0", *words))
        losses.append([event.value for event in EventAccumulator(str(folder)).Reload().Scalars("train/loss")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.slow
def test_trainings_of_one_process_leave_no_writer_behind(tiny, tmp_path):
    before = threading.active_count()
    for number in range(3):
        train.run(tiny("recipe.epochs=1", f"output={tmp_path / str(number)}"))
    with pytest.raises(NonFiniteError):  # as a trial of a sweep fails
        train.run(tiny("recipe.epochs=1", f"output={tmp_path / 'failed'}", "recipe.learning_rate=1e29"))
    assert list((tmp_path / "failed").glob("events.*"))
    assert threading.active_count() == before


@pytest.mark.slow
def test_a_training_that_logs_to_csv(tiny, tmp_path):
    train.run(tiny("recipe.epochs=1", "logger=csv"))
    header = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]
    assert {"val/top1", "test/top1"} <= set(header.split(","))


@pytest.mark.slow
def test_a_run_too_short_for_a_rate_names_none(tiny, capsys):
    train.run(tiny("recipe.epochs=1", "trainer.log_every_n_steps=50"))
    assert "images/s in training" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_ends_before_its_model_is_written_is_finished_by_resume(tmp_path, command_here, tiny_overrides):
    words = ("train", *tiny_overrides, "recipe.epochs=1", "output=run")
    with pytest.MonkeyPatch.context() as patch:

        def end(*_):  # as SIGTERM does it there
            raise KeyboardInterrupt

        patch.setattr(train, "_save_model", end)
        assert command_here(tmp_path, *words).returncode != 0
    resumed = command_here(tmp_path, *words, "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert "this run is finished" not in resumed.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "classes_val.csv").is_file()
    assert "this run is finished" in command_here(tmp_path, *words, "resume=true").stdout


@pytest.mark.slow
def test_a_finished_run_of_another_configuration_is_not_taken_for_this_one(tmp_path, command_here, tiny_overrides):
    words = ("train", *tiny_overrides, "recipe.epochs=1", "output=run", "data.num_workers=0")
    assert command_here(tmp_path, *words).returncode == 0
    again = command_here(tmp_path, *words, "resume=true")
    assert again.returncode == 0, again.stderr
    assert "this run is finished: run; without resume=true, and with another output, it trains anew" in again.stdout
    other = command_here(tmp_path, *words, "resume=true", "recipe.epochs=2", "seed=5")
    assert other.returncode == 2
    told = "last.ckpt was trained with another configuration (recipe.epochs: 1 there, 2 here; seed: 0 there, 5 here)"
    assert told in other.stderr


@pytest.mark.slow
def test_a_run_without_an_end_in_sight_is_ended_by_its_time(tmp_path, command_here, tiny_overrides):
    words = ("recipe.epochs=100000000000000000000", "+trainer.max_time={seconds:3}", "output=run", "model.depth=1")
    done = command_here(tmp_path, "train", *tiny_overrides, *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_pixels_that_no_patch_reads_are_told_once(tmp_path, command_here, tiny_overrides):
    words = ("model.depth=1", "model.patch_size=4", "trainer.fast_dev_run=true", "data.img_size=10")
    cut = command_here(tmp_path, "train", *tiny_overrides, *words)
    assert cut.returncode == 0, cut.stderr
    told = "data.img_size=10: patches of 4 px leave the last 2 row(s) and 2 column(s) of pixels unread"
    remedy = "sizes that fit are 8 and 12; model.dynamic_img_pad=true completes them by zeros"
    warned = [line for line in cut.stderr.splitlines() if "warning" in line]
    assert warned == [f"longseq: warning: {told}; {remedy}"]
    padded = command_here(tmp_path, "train", *tiny_overrides, *words, "model.dynamic_img_pad=true")
    assert padded.returncode == 0, padded.stderr
    assert "warning" not in padded.stderr
    apart = command_here(tmp_path, "train", *tiny_overrides, *words, "data.img_size=9", "model.stride=5")
    assert apart.returncode == 0, apart.stderr
    told = "model.stride=5 is larger than the patches of 4 px, and the pixels between these are not read"
    assert f"longseq: warning: {told}" in apart.stderr


@pytest.mark.slow
def test_resume_finds_runs_beside_what_else_lies_there(tmp_path, command_here, tiny_overrides):
    arguments = ("train", *tiny_overrides, "recipe.epochs=1")
    for name, content in (("foreign", "- 1\n"), ("half", "seed: [0,"), ("lacks", "seed: 0\n")):
        (tmp_path / "outputs" / "image" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "outputs" / "image" / name / "config.yaml").write_text(content)
        (tmp_path / "outputs" / "image" / name / "checkpoints" / "last.ckpt").write_bytes(b"")
    first = command_here(tmp_path, *arguments, "resume=true")
    assert first.returncode == 0, first.stderr
    assert "nothing to resume: no run of this configuration; starting anew" in first.stdout
    run = only(tmp_path, "outputs/image/*/metrics.json").parent
    again = command_here(tmp_path, *arguments, "resume=true")
    assert again.returncode == 0, again.stderr
    assert f"this run is finished: outputs/image/{run.name}" in again.stdout
    assert len(list(tmp_path.glob("outputs/image/*/metrics.json"))) == 1


@pytest.mark.slow
def test_warnings_reach_the_user_one_line_each(tmp_path, command_here, tiny_overrides, image_folder):
    shutil.copytree(image_folder, tmp_path / "images")
    broken = Path("images/train/class1/3.jpg")
    (tmp_path / broken).write_bytes(b"not an image")
    arguments = ("data=image_folder", "recipe=digits", "data.root=images", "data.img_size=16", "data.num_workers=0")
    result = command_here(tmp_path, "train", *arguments, *tiny_overrides, "recipe.batch_size=8", "recipe.epochs=1")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("longseq: warning: ")]
    assert any(f"skipped unreadable image {broken} (" in line for line in lines)
    assert any("the validation images are also the test images" in line for line in lines)
    assert result.stdout.count("skipped unreadable images: 1 (") == 1
    assert only(tmp_path, "outputs/image/*/unreadable.txt").read_text() == f"{broken}\n"


INTERRUPTIBLE = (
    "recipe.epochs=3",
    "model.drop_path_rate=0.2",
    "++recipe.ema={decay: 0.9, warmup: true}",
    "trainer.accumulate_grad_batches=2",
    "callbacks.checkpoint.every_n_train_steps=3",
    "callbacks.samples=null",
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, compose_config, tiny_overrides):
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    train.run(compose_config("train", *tiny_overrides, *INTERRUPTIBLE, f"output={folder / 'run'}"))
    return folder / "run"


def told_to_end_at(update, training_step):
    """A training step in which the process is sent SIGTERM."""

    def step(module, *arguments):
        if module.global_step == update:
            os.kill(os.getpid(), signal.SIGTERM)
        return training_step(module, *arguments)

    return step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_an_interrupted_run_resumes_to_the_weights_of_an_uninterrupted_one(
    name, tmp_path, uninterrupted, start, command_here, tiny_overrides
):
    """Mid-epoch, with an average of the weights, accumulation, drop path, and gradients clipped."""
    words = ("train", *tiny_overrides, *INTERRUPTIBLE)
    if name == "SIGTERM":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ImageClassifier, "training_step", told_to_end_at(7, ImageClassifier.training_step))
            stopped = command_here(tmp_path, *words)
        code, errors = stopped.returncode, stopped.stderr
    else:
        process = start(tmp_path, *words)
        while not list(tmp_path.glob("outputs/image/*/checkpoints/last.ckpt")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.kill()
        _, errors = process.communicate(timeout=60)
        code = process.returncode
    run = only(tmp_path, "outputs/image/*")
    assert code == {"SIGKILL": -9, "SIGTERM": 143}[name], errors
    assert ("resume=true" in errors) == (name == "SIGTERM")
    assert (run / "run.lock").exists() == (name == "SIGKILL")
    saved = read(run / "checkpoints" / "last.ckpt")
    assert 0 < saved["global_step"] < 60
    saved["seconds"] += 1000  # as if its first leg had taken so long
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
def test_commands_of_one_second_have_folders_of_their_own(tmp_path):
    wanted, config = str(tmp_path / "run"), OmegaConf.create({"resume": False})
    assert runs.run_folder(wanted, _root_=config) == wanted
    Path(wanted).mkdir()
    assert runs.run_folder(wanted, _root_=config) == wanted, "Hydra asks several times"
    runs.forget_folders()
    assert runs.run_folder(wanted, _root_=config) == f"{wanted}_2"
    runs.forget_folders()


@pytest.mark.slow
def test_resuming_under_another_configuration_names_the_keys(tiny, tmp_path):
    train.run(tiny("recipe.epochs=1"))
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match=r"recipe\.learning_rate: 0\.\d+ there, 0\.5 here"):
        train.run(tiny("recipe.epochs=1", "recipe.learning_rate=0.5", f"resume={path}"))


@pytest.mark.slow
def test_a_run_of_a_gpu_goes_on_with_another_trainer(tmp_path, monkeypatch, command_here, tiny_overrides):
    """What `trainer=fsdp` sets for GPUs, and what the run's weights depend on, stays; the accelerator need not."""
    words = ("recipe.epochs=1", "model.depth=1", "callbacks.checkpoint.every_n_train_steps=1")
    words += tuple(f"+trainer.limit_{part}_batches={count}" for part, count in (("train", 2), ("val", 1), ("test", 1)))
    words += ("callbacks.samples=null", "callbacks.worst=null")
    others = [word for word in tiny_overrides if word != "trainer=cpu"]
    half, step = tmp_path / "run" / "checkpoints" / "half.ckpt", ImageClassifier.training_step

    def keep_the_half(self: ImageClassifier, *batch: Any) -> Any:
        if self.trainer.global_step == 1:
            shutil.copy(half.with_name("last.ckpt"), half)
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(ImageClassifier, "training_step", keep_the_half)
        begun = ("trainer=fsdp", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.strategy=auto")
        trained = command_here(tmp_path, "train", *others, *words, *begun, "output=run")
    assert trained.returncode == 0, trained.stderr
    assert not (tmp_path / "outputs").exists()  # where a run has its folder that is given none
    saved = read(half)
    assert saved["global_step"] == 1
    saved["hyper_parameters"]["config"]["trainer"]["accelerator"] = "gpu"
    torch.save(saved, half)
    whole = read(half.with_name("last.ckpt"))["state_dict"]
    (tmp_path / "run" / "metrics.json").unlink()

    resume = ("train", *others, *words, "trainer=cpu", f"resume={half}")
    refused = command_here(tmp_path, *resume, "trainer.precision=32-true")
    assert "trainer.precision: 'bf16-mixed' there, '32-true' here" in refused.stderr
    resumed = command_here(tmp_path, *resume)
    assert resumed.returncode == 0, resumed.stderr
    assert "as the run began: trainer.log_every_n_steps=50, trainer.precision=bf16-mixed" in resumed.stdout
    assert only(tmp_path, "**/metrics.json").parent == tmp_path / "run"
    trainer = OmegaConf.load(tmp_path / "run" / "config.yaml").trainer
    assert (trainer.accelerator, trainer.precision, trainer.log_every_n_steps) == ("cpu", "bf16-mixed", 50)
    after = read(half.with_name("last.ckpt"))
    assert after["global_step"] == 2
    assert all(torch.equal(value, whole[key]) for key, value in after["state_dict"].items())


@pytest.mark.slow
def test_what_a_run_logs_may_change_when_it_goes_on(tiny, tmp_path):
    saved = OmegaConf.to_container(tiny(), resolve=True)
    logged = OmegaConf.to_container(tiny("trainer.log_every_n_steps=3"), resolve=True)
    assert not runs.differences(saved, logged)
    kept = runs.as_begun(logged, saved, ["mixer=attention"])["trainer"]["log_every_n_steps"]
    assert kept == saved["trainer"]["log_every_n_steps"]
    assert runs.as_begun(logged, saved, ["trainer.log_every_n_steps=3"])["trainer"]["log_every_n_steps"] == 3


@pytest.mark.slow
def test_resuming_layers_that_compute_something_else_by_now_is_refused(tiny, tmp_path):
    train.run(tiny("recipe.epochs=1", "+trainer.limit_train_batches=1"))
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    contents = read(path)
    revisions = contents["model_config"]["revisions"]
    contents["model_config"]["revisions"] = dict.fromkeys(revisions, 0)
    torch.save(contents, path)
    (tmp_path / "run" / "metrics.json").unlink()
    with pytest.raises(ValueError, match=r"its .* are of revision 0, and this"):
        train.run(tiny("recipe.epochs=1", "+trainer.limit_train_batches=1", f"resume={path}"))
    contents["model_config"]["revisions"] = revisions
    contents["model_config"]["model_args"]["merge"] = "mean"
    torch.save(contents, path)
    with pytest.raises(ValueError, match=r"was built with merge=mean, this one with merge=sum"):
        train.run(tiny("recipe.epochs=1", "+trainer.limit_train_batches=1", f"resume={path}"))


@pytest.mark.slow
def test_a_run_that_is_refused_leaves_no_folder(tiny, tmp_path):
    few = ("recipe.epochs=1", "+trainer.limit_train_batches=1")
    train.run(tiny(*few))
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    contents = read(path)
    elsewhere = (*few, f"resume={path}", f"output={tmp_path / 'second'}")

    def refused(told: str, *words: str, **changes: Any) -> None:
        torch.save({**contents, **changes}, path)
        with pytest.raises(ValueError, match=told):
            train.run(tiny(*elsewhere, *words))
        assert not (tmp_path / "second").exists()

    described = contents["model_config"]
    other = {**described, "revisions": dict.fromkeys(described["revisions"], 0)}
    refused("its .* are of revision 0", model_config=other)
    parameters = contents["hyper_parameters"]
    names = [f"another {name}" for name in parameters["data"]["class_names"]]
    of_others = {**parameters, "data": {**parameters["data"], "class_names": names}}
    refused("was trained on other data: ", hyper_parameters=of_others)
    torch.save(contents, path)
    train.run(tiny(*elsewhere))
    assert (tmp_path / "second" / "checkpoints" / "best.ckpt").is_file()


@pytest.mark.slow
def test_a_finished_run_is_neither_repeated_nor_overwritten(tiny, tmp_path):
    value = train.run(tiny("recipe.epochs=1"))
    before = (tmp_path / "run" / "checkpoints" / "last.ckpt").stat().st_mtime_ns
    assert train.run(tiny("recipe.epochs=1", "resume=true")) == value
    with pytest.raises(ValueError, match="holds a run already"):
        train.run(tiny("recipe.epochs=1"))
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").stat().st_mtime_ns == before


@pytest.mark.slow
def test_two_processes_count_each_test_image_once(tmp_path, command, command_here, tiny_overrides):
    """359 test images are not divisible by two. Only one process watches the mixers."""
    watched = ("mixer=linear_attention", "callbacks.telemetry.every_n_steps=5")
    result = command(tmp_path, "train", *tiny_overrides, "trainer=ddp_sim", *watched)
    assert result.returncode == 0, result.stderr
    run = only(tmp_path, "outputs/image/*")
    board = EventAccumulator(str(run)).Reload()
    assert board.Scalars("watch/blocks.0.forward/state_norm")[0].step == 4
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
    words += ("callbacks.checkpoint.every_n_train_steps=5", "callbacks.samples=null")
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
    words += ("recipe.epochs=1", "recipe.batch_size=8", "callbacks.samples=null", "callbacks.worst=null")
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
    gone = command_here(home, *evaluate)
    assert gone.returncode == 2
    assert f"data.root={home / 'images'} does not exist" in gone.stderr
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    names = [sorted(path.name for path in (tmp_path / run).iterdir()) for run in ("first", "second")]
    plain = [[name for name in run if "tfevents" not in name] for run in names]
    assert plain[0] == plain[1]
    assert_same_weights(*(read(tmp_path / run / "checkpoints" / "last.ckpt") for run in ("first", "second")))
    records = [(tmp_path / run / "config.yaml").read_text() for run in ("first", "second")]
    kept = [[line for line in record.splitlines() if not line.startswith("output: ")] for record in records]
    assert kept[0] == kept[1]

    changed = ("seed=1", "recipe.learning_rate=0.5", "output=third")
    other = command_here(tmp_path, "train", "--config-name", "config", "-cd", "second", *changed)
    assert other.returncode == 0, other.stderr
    record = OmegaConf.load(tmp_path / "third" / "config.yaml")
    assert (record.seed, record.recipe.learning_rate) == (1, 0.5)

    same_place = command_here(tmp_path, "train", "--config-dir=first", "--config-name", "config")
    assert same_place.returncode == 2
    assert "first holds a run already" in same_place.stderr


@pytest.mark.slow
def test_a_sweep_trains_each_choice(tmp_path, command_here, tiny_overrides):
    result = command_here(tmp_path, "train", "-m", *tiny_overrides, "seed=0,1", "recipe.epochs=1")
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob("outputs/image/sweep_*/*/metrics.json"))) == 2


@pytest.mark.slow
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
    name = "backbone.blocks.1.mixer.in_proj.weight"
    torch.testing.assert_close(second["state_dict"][name], first["state_dict"][name], atol=1e-3, rtol=0)
    with pytest.raises(ValueError, match=r"init: \d+ weights do not fit the model"):
        train.run(tiny(f"output={tmp_path / 'wider'}", f"init={trained}", "model.embed_dim=32"))
