"""Every image data set and every recipe composes, with the published values."""

from importlib import resources

import pytest
import torch
from group_tasks import task_of
from hydra import compose, initialize_config_module
from image_data import image_data

from longseq.tasks.image.transforms import BatchMixing
from longseq.tasks.registry import with_any_choice
from longseq.tasks.training import targets
from longseq.tasks.training.configuration import resolve
from longseq.tasks.training.schedule import WARMUPS


def names(group):
    folder = resources.files("longseq.conf") / group
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load(*overrides):
    with initialize_config_module("longseq.conf", version_base=None):
        config = compose("train", overrides=[*overrides, "output=run"])
    sections = with_any_choice(resolve(config))
    return {key: sections[key] for key in ("data", "recipe")}


def built(recipe, name):
    allowed = {"optimizer": targets.OPTIMIZERS, "schedule": targets.SCHEDULES}[name]
    options = {key: value for key, value in recipe[name].items() if key not in WARMUPS}  # the run's length has those
    return targets.build(options, allowed, f"recipe.{name}")


@pytest.mark.parametrize("name", [name for name in names("data") if task_of("data", name) == "image"])
def test_every_data_set_builds_with_its_recipe(name):
    config = load(f"data={name}")
    if name == "own":  # a person names the class
        config["data"]["train_set"] = {"_target_": "my_module.MyDataset"}
    module = image_data(**config["data"], augment=config["recipe"]["augment"], batch_size=4, seed=0)
    assert module.keys.name == name


@pytest.mark.parametrize(("task", "name"), [(task_of("recipe", name), name) for name in names("recipe")])
def test_every_recipe_trains_a_step(task, name):
    config = load(f"task={task}", f"recipe={name}")
    recipe = config["recipe"]
    if recipe.get("augment") is not None:
        module = image_data(**config["data"], augment=recipe["augment"], batch_size=8, seed=0)
        module.setup()
        images, targets = module.on_after_batch_transfer(next(iter(module.train_dataloader())), 0)
        smoothing = recipe["loss"]["label_smoothing"]
        mixing = BatchMixing(10, seed=0, label_smoothing=smoothing, **recipe["augment"]["mixing"])
        _, soft_targets, _ = mixing(images, targets, update=0)
        torch.testing.assert_close(soft_targets.sum(1), torch.ones(8))
    model = torch.nn.ModuleDict({"blocks": torch.nn.Sequential(torch.nn.Linear(4, 2))})
    optimizer = built(recipe, "optimizer")(model, lr=1e-3)
    decays = {group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {0.0, recipe["optimizer"]["weight_decay"]}
    length = recipe["epochs"] or 20  # of language models in tokens or updates, which the run makes epochs
    scheduler, epochs = built(recipe, "schedule")(optimizer, num_epochs=length, updates_per_epoch=10)
    assert epochs == length
    scheduler.step_update(length * 5)
    assert 0 < optimizer.param_groups[0]["lr"] <= 1e-3


@pytest.mark.parametrize(("scale", "weight_decay", "drop_path"), [("tiny", 0.1, 0.0), ("small", 0.05, 0.05)])
def test_vim_decays_by_scale(scale, weight_decay, drop_path):
    recipe = load("recipe=vim", f"scale={scale}")["recipe"]
    assert recipe["optimizer"]["weight_decay"] == weight_decay
    assert recipe["model"]["drop_path_rate"] == drop_path
    assert (recipe["epochs"], recipe["batch_size"], recipe["learning_rate"]) == (300, 1024, 1e-3)
    assert recipe["ema"]["decay"] == 0.99996
    assert recipe["augment"]["repeats"] == 3
