"""What a configuration may name to be built, and that nothing else named in a file is called."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext, suppress

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from PIL import Image

from longseq.tasks import evaluate, predict, train
from longseq.tasks.training import targets
from longseq.tasks.training.checkpoint import load
from longseq.tasks.training.configuration import resolve
from longseq.tools import describe, export


@pytest.fixture(scope="module")
def trained(tmp_path_factory, compose_config, tiny_overrides):
    """The folder of a run of one epoch."""
    folder = tmp_path_factory.mktemp("named") / "run"
    train.run(compose_config("train", *tiny_overrides, "recipe.epochs=1", f"output={folder}"))
    return folder


PLACES = [
    "recipe.optimizer",
    "recipe.schedule",
    "recipe.optimizer.betas",
    "recipe.ema",
    "callbacks.best",
    "callbacks.other",
    "callbacks.samples.count",
    "logger",
    "logger.tensorboard",
    "logger.tensorboard.folder",
    "load",
    "data.root",
    "data.mean",
    "model.drop_rate",
    "mixer.options.num_heads",
    "trainer.strategy",
]


TINY_INIT = (
    "mixer=attention",
    "trainer=cpu",
    "model.embed_dim=16",
    "model.depth=2",
    "recipe.epochs=1",
    "recipe.schedule.warmup_epochs=0",
    "recipe.batch_size=64",
    "trainer.fast_dev_run=true",
)


def plant(config, place, node, *, in_list=False):
    config = copy.deepcopy(config)
    *path, last = place.split(".")
    inner = config
    for key in path:
        inner = inner[key] if isinstance(inner.get(key), dict) else inner.setdefault(key, {})
    inner[last] = [node] if in_list else node
    return config


def test_training_calls_nothing_that_is_not_listed(tiny, tmp_path):
    made = tmp_path / "made"
    config = resolve(tiny("recipe.epochs=1"))
    for place, in_list, partial in itertools.product(PLACES, (False, True), (False, True)):
        node = {"_target_": "os.mkdir", "path": str(made)} | ({"_partial_": True} if partial else {})
        with pytest.raises(ValueError, match=r"_target_") as caught:
            train.run(plant(config, place, node, in_list=in_list))
        assert place.split(".")[0] in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not made.exists()
    assert not (tmp_path / "run").exists()


# A name in place of a number that a model or its data needs: such a checkpoint is refused.
NEEDED = ["data.root", "data.mean", "model.drop_rate", "mixer.options.num_heads"]


@pytest.mark.slow
@pytest.mark.parametrize("places", [[place for place in PLACES if place not in NEEDED], *([one] for one in NEEDED)])
def test_nothing_that_a_checkpoint_names_is_called(places, trained, tmp_path, compose_config, tiny):
    made = tmp_path / "made"
    content = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    stored = content["hyper_parameters"]
    for place in places:
        stored["config"] = plant(stored["config"], place, {"_target_": "os.mkdir", "path": str(made)})
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    torch.save(content, path)
    picture = tmp_path / "picture.png"
    Image.new("L", (8, 8)).save(picture)
    commands = {
        evaluate: ("evaluate", f"checkpoint={path}", "trainer=cpu"),
        predict: ("predict", f"checkpoint={path}", f"input={picture}", f"output={tmp_path / 'p.csv'}"),
        export: ("export", f"checkpoint={path}", "format=torchscript", "batch_sizes=[1]", "latency=false"),
        describe: ("describe", f"checkpoint={path}"),
        train: ("train", *TINY_INIT, f"init={path}", f"output={tmp_path / 'new'}"),
    }
    for module, (verb, *overrides) in commands.items():
        with suppress(ValueError, TypeError) if places[0] in NEEDED else nullcontext():
            module.run(compose_config(verb, *overrides))
        assert not made.exists(), verb
    with pytest.raises(ValueError, match="another configuration"):
        train.run(tiny("recipe.epochs=1", f"resume={path}"))
    assert not made.exists()


@pytest.mark.parametrize("name", ["EarlyStopping", "lightning.pytorch.callbacks.EarlyStopping"])
def test_listed_names_are_taken_whole_or_by_their_last_word(name):
    node = {"_target_": name, "monitor": "val/top1", "patience": 3}
    assert isinstance(targets.build(node, targets.CALLBACKS, "callbacks.stop"), EarlyStopping)


@pytest.mark.parametrize(
    "name",
    [
        "lightning.pytorch.callbacks",
        "lightning.pytorch.callbacks.EarlyStopping.load_state_dict",
        "lightning.pytorch.callbacks.Callback",
        "torch.hub.load",
        "callbacks.EarlyStopping",
        None,
        ["EarlyStopping"],
    ],
)
def test_modules_prefixes_and_other_names_are_refused_with_those_allowed(name):
    node = {"_target_": name}
    with pytest.raises(ValueError, match=r"callbacks\.mine\._target_=.*must be one of .*EarlyStopping"):
        targets.build(node, targets.CALLBACKS, "callbacks.mine")
    with pytest.raises(ValueError, match="not called"):
        targets.check({"callbacks": {"mine": node}})


def test_every_listed_name_exists():
    for names in (targets.OPTIMIZERS, targets.SCHEDULES, targets.CALLBACKS, targets.LOGGERS):
        for name in names:
            assert callable(targets.build({"_target_": name, "_partial_": True}, names, "place"))


def test_options_that_a_callback_does_not_take_are_one_line():
    with pytest.raises(ValueError, match=r"callbacks\.stop: EarlyStopping does not take these options"):
        targets.build({"_target_": "EarlyStopping", "patients": 3}, targets.CALLBACKS, "callbacks.stop")


@pytest.mark.slow
def test_a_checkpoint_does_not_read_the_weights_it_was_trained_from(trained, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("the weights are in the checkpoint")

    monkeypatch.setattr("timm.models._factory.load_checkpoint", refuse)
    monkeypatch.setattr("timm.models._builder.load_pretrained", refuse)
    content = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    config = content["hyper_parameters"]["config"]
    config["model"] |= {"checkpoint_path": "elsewhere.pth", "cache_dir": "elsewhere"}
    config["recipe"]["model"] = {**(config["recipe"].get("model") or {}), "pretrained": True}
    torch.save(content, tmp_path / "c.ckpt")
    load(tmp_path / "c.ckpt")
