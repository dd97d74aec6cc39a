"""Every key of a training has a type and a range; an unread key or an impossible value gives one line."""

from __future__ import annotations

import copy
import os
import re
from typing import Any

import pytest

from longseq.tasks import train
from longseq.tasks.experiment import check_experiment
from longseq.tasks.training import targets
from longseq.tasks.training.configuration import resolve

GONE = object()  # in place of a value: the key is absent


def name_part(part: object) -> str:
    """A part of a case's name, the same in each process."""
    return "gone" if part is GONE else str(part)[:40]


@pytest.fixture(scope="module")
def configurations(compose_config) -> dict[str, dict[str, Any]]:
    """A configuration of each task, as `longseq train` composes it."""
    chosen = {"image": [], "probe": ["task=probe"], "timm": ["model=timm"]}
    return {name: resolve(compose_config("train", "output=here", *given)) for name, given in chosen.items()}


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    *path, last = key.split(".")
    node = config
    for part in path:
        node = node[part]
    if value is GONE:
        del node[last]
    else:
        node[last] = value
    return config


NOT_A_NUMBER, WITHOUT_END = float("nan"), float("inf")

MISTAKES = [
    # keys that nothing reads, and keys that are missing
    ("image", "colour", "red", "colour is unknown: the keys are "),
    ("image", "data.colour", 3, "data.colour is unknown: the keys of data are name, "),
    ("image", "recipe.epoch", 3, "recipe.epoch is unknown: did you mean recipe.epochs?"),
    ("image", "recipe.optimizer.weigth_decay", 0.1, "did you mean recipe.optimizer.weight_decay?"),
    ("image", "recipe.schedule.warm_up", 1, "recipe.schedule.warm_up is unknown: "),
    (
        "image",
        "recipe.optimizer._target_",
        "create_muon",
        "recipe.optimizer.opt is no option of recipe.optimizer._target_=create_muon: leave it out with "
        "~recipe.optimizer.opt",
    ),
    ("image", "recipe.augment.hflipp", 1, "recipe.augment.hflipp is unknown: did you mean recipe.augment.hflip?"),
    ("image", "recipe.loss.smoothing", 0.1, "recipe.loss.smoothing is unknown: "),
    (
        "image",
        "recipe.model.drop_path",
        0.1,
        "recipe.model.drop_path is unknown: did you mean recipe.model.drop_path_r",
    ),
    ("image", "trainer.max_stepps", 3, "trainer.max_stepps is unknown: did you mean trainer.max_steps?"),
    ("image", "trainer.logger", True, "trainer.logger=true: loggers are a group of their own"),
    ("image", "mixer.options.num_heads", 4, "mixer.options.num_heads is unknown: "),
    ("image", "callbacks.telemetry.every", 3, "did you mean callbacks.telemetry.every_n_steps?"),
    ("image", "callbacks.best.mode", "max", "callbacks.best.mode=max: the metric tells its direction"),
    ("image", "logger.tensorboard.colour", "red", "logger.tensorboard.colour is unknown"),
    ("image", "task.colour", "red", "task.colour is unknown"),
    ("image", "model.mixer", "mamba", "model.mixer is unknown"),
    ("timm", "model.widht", 3, "model.widht is unknown"),
    ("probe", "recipe.loss", {"bce": True}, "recipe.loss is read by no part of this task"),
    ("probe", "model.directions", "forward", "model.directions is unknown: did you mean model.direction?"),
    ("probe", "data.options.pair", 3, "has no option pair"),
    ("image", "data.source", GONE, "data.source is missing: give data.source=..."),
    ("image", "seed", GONE, "seed is missing: give seed=..."),
    ("image", "recipe", GONE, "recipe is missing: give recipe=..."),
    # values
    ("image", "recipe.learning_rate", NOT_A_NUMBER, "recipe.learning_rate=nan must be a number of at least 0"),
    ("image", "recipe.learning_rate", WITHOUT_END, "recipe.learning_rate=inf must be a number of at least 0"),
    ("image", "recipe.learning_rate", -1, "recipe.learning_rate=-1 must be a number of at least 0"),
    ("image", "recipe.learning_rate", "fast", "recipe.learning_rate=fast must be a number of at least 0"),
    ("image", "recipe.batch_size", -4, "recipe.batch_size=-4 must be a whole number of at least 1"),
    ("image", "recipe.batch_size", 32.0, "recipe.batch_size=32.0 must be a whole number of at least 1"),
    ("image", "recipe.gradient_clip", 0, "recipe.gradient_clip=0 must be a number above 0 or null"),
    ("image", "recipe.ema", {"decay": 2}, "recipe.ema.decay=2 must be a number of at least 0 and below 1"),
    ("image", "recipe.schedule.sched", "cosin", "recipe.schedule.sched=cosin must be one of cosine, tanh, step"),
    ("image", "recipe.schedule.min_lr", -1, "recipe.schedule.min_lr=-1 must be a number of at least 0"),
    ("image", "recipe.optimizer.opt", "admw", "did you mean adamw?"),
    ("image", "recipe.optimizer.opt", "sgd", "recipe.optimizer.betas is no option of recipe.optimizer.opt=sgd"),
    ("image", "recipe.optimizer.weight_decay", -0.1, "recipe.optimizer.weight_decay=-0.1 must be a number of at leas"),
    (
        "image",
        "recipe.augment.mixing.mode",
        "pairs",
        "recipe.augment.mixing.mode=pairs must be one of batch, pair, elem",
    ),
    ("image", "recipe.loss.label_smoothing", 1, "recipe.loss.label_smoothing=1 must be a number of at least 0 and"),
    ("image", "data.img_size", -8, "data.img_size=-8 must be a whole number of at least 1"),
    ("image", "data.mean", "0.5,0.5,0.5", "data.mean=0.5,0.5,0.5 must be a list of at least 1, each entry a number"),
    ("image", "data.on_error", "ignore", "data.on_error=ignore must be one of skip, raise"),
    ("image", "data.num_workers", 1.5, "data.num_workers=1.5 must be a whole number of at least 0 or null"),
    ("image", "model.depth", 2.5, "model.depth=2.5 must be a whole number of at least 1"),
    ("image", "model.direction", "both", "model.direction=both must be one of bidirectional, forward, cross, alternat"),
    ("image", "model.drop_path_rate", 1, "model.drop_path_rate=1 must be a number of at least 0 and below 1"),
    ("image", "model.name", "longseq_tinny", "unknown model.name='longseq_tinny'"),
    ("image", "mixer.options.state_size", -1, "mixer.options.state_size=-1 must be a whole number of at least 0"),
    ("image", "mixer.options.expand", "two", "mixer.options.expand=two must be a"),
    ("image", "mixer.name", "longhron", "did you mean 'longhorn'?"),
    ("image", "mixer.name", [1, 2], "mixer=[1, 2] is no pattern: write a name"),
    ("image", "mixer.options", 3, "mixer.options=3 must be a dictionary or null"),
    ("image", "scale.depth", 0, "scale.depth=0 must be a whole number of at least 1"),
    ("image", "scale.mixer", {"head_dim": -3}, "scale.mixer.head_dim=-3 must be a number above 0"),
    ("image", "trainer.devices", 1.5, "trainer.devices=1.5 must be a whole number of at least -1 or text or a list"),
    ("image", "trainer.precision", "bf17", "trainer.precision=bf17 must be"),
    ("image", "trainer.accumulate_grad_batches", 0, "trainer.accumulate_grad_batches=0 must be a whole number of at"),
    ("image", "callbacks.telemetry.every_n_steps", "often", "callbacks.telemetry.every_n_steps=often must be a whole"),
    ("image", "callbacks.telemetry", 3, "callbacks.telemetry names nothing to build"),
    ("image", "seed", -1, "seed=-1 must be a whole number from 0 to 4294967295"),
    ("image", "compile", "fast", "compile=fast must be one of default, "),
    ("image", "matmul_precision", "hihg", "did you mean high?"),
    ("image", "resume", 3, "resume=3 must be true or false or text"),
    ("probe", "data.options.pairs", "few", "data.options.pairs='few' must be a whole number"),
    ("probe", "data.train", [], "data.train=[] must be a list of at least 1"),
    ("probe", "data.test", [{"tokens": 64}], "data.test: a slice needs samples=N of at least 1"),
    ("probe", "data.generator", "mqra", "data.generator=mqra is unknown"),
    ("probe", "model.mlp", "relu", "model.mlp=relu must be one of swiglu, gelu, rwkv, none or null"),
    # what only the constructors of models and callbacks know
    ("image", "mixer", {"name": "deltanet", "options": {"num_heads": 7}}, "num_heads=7"),
    ("probe", "mixer", {"name": "deltanet", "options": {"num_heads": 7}}, "num_heads=7"),
    ("probe", "mixer", {"name": "5xdeltanet+attention", "options": None}, "5xdeltanet+attention"),
    ("image", "callbacks.telemetry.examples", 0, "callbacks.telemetry.examples=0 must be a whole number of at least 1"),
    ("image", "callbacks.nonfinite.every_n_steps", 0, "callbacks.nonfinite.every_n_steps=0 must be"),
    ("image", "callbacks.checkpoint.every_n_train_steps", 0, "callbacks.checkpoint.every_n_train_steps=0 must be"),
    ("image", "callbacks.samples.count", 0, "callbacks.samples.count=0 must be"),
]


@pytest.mark.parametrize(("task", "key", "value", "words"), MISTAKES, ids=name_part)
@pytest.mark.slow
def test_a_mistake_is_one_line_before_anything_is_opened(configurations, task, key, value, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        check_experiment(changed(configurations[task], key, value))
    assert "\n" not in str(caught.value)


def own_schedule(optimizer: Any, num_epochs: int, updates_per_epoch: int, min_lr: float = 0.0) -> Any:
    """A schedule as a plug-in registers it; nothing calls it here."""


def test_a_key_of_the_recipe_that_an_own_schedule_does_not_take_is_told_with_what_leaves_it_out(
    configurations, monkeypatch
):
    monkeypatch.setattr(targets, "SCHEDULES", [*targets.SCHEDULES, "mine.own_schedule"])
    monkeypatch.setitem(targets._REGISTERED, "mine.own_schedule", own_schedule)
    config = changed(configurations["image"], "recipe.schedule._target_", "own_schedule")
    said = "recipe.schedule.sched is no option of recipe.schedule._target_=own_schedule: leave it out with ~recipe."
    with pytest.raises(ValueError, match=re.escape(f"{said}schedule.sched, and likewise ~recipe.")) as caught:
        check_experiment(config)
    assert str(caught.value).endswith("~recipe.schedule.warmup_prefix ~recipe.schedule.step_on_epochs")
    left = {key: config["recipe"]["schedule"][key] for key in ("_target_", "_partial_", "min_lr", "warmup_epochs")}
    check_experiment(changed(config, "recipe.schedule", left))


ACCEPTED = [
    ("image", "recipe.learning_rate", 1),
    ("image", "trainer.devices", "0,1"),
    ("image", "trainer.devices", [0]),
    ("image", "trainer.limit_train_batches", 2),
    ("image", "trainer.max_time", "00:01:00:00"),
    ("image", "recipe.ema", {"decay": 0.9}),
    ("image", "mixer.options.rate_rank", None),
    ("image", "callbacks.best", None),
    ("image", "logger", None),
    ("image", "resume", "last.ckpt"),
    ("image", "data.mean", GONE),
    ("timm", "model.embed_dim", 96),
    ("probe", "data.test", [{"samples": 3, "tokens": 128, "name": "long"}]),
]


@pytest.mark.parametrize(("task", "key", "value"), ACCEPTED, ids=name_part)
def test_what_can_be_is_taken(configurations, task, key, value):
    check_experiment(changed(configurations[task], key, value))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["data=image_folder"], ["task=lm", "data=text"], ["task=document", "data=documents"]]
)
def test_a_pipe_is_neither_a_folder_nor_a_file(words, compose_config, tmp_path):
    """That of a shell, /dev/stdin, has no path of its own."""
    os.mkfifo(tmp_path / "pipe")
    reading, writing = os.pipe()
    try:
        for given in (tmp_path / "pipe", f"/dev/fd/{reading}", os.devnull):
            config = resolve(compose_config("train", *words, f"data.root={given}", "output=here"))
            with pytest.raises(
                ValueError, match=f"^data.root={given} is a pipe or a device, .*: give a folder or a file$"
            ):
                check_experiment(config)
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.slow
def test_a_split_of_documents_is_no_pipe(compose_config, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\nred,a\nblue,b\n")
    words = ("task=document", "data=documents", f"data.root={tmp_path / 'train.csv'}", "data.test=/dev/null")
    with pytest.raises(ValueError, match=r"^data.test=/dev/null is a pipe or a device"):
        train.build(compose_config("train", *words, f"data.cache={tmp_path}", "output=here"))
