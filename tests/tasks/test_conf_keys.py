"""Each key of a YAML file is a field of the dataclass that reads it, and each field is a key of a file."""

from __future__ import annotations

import importlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import longseq.conf
from longseq.tasks import registry
from longseq.tasks.config import Train
from longseq.tasks.experiment import MixerKeys, RecipeKeys, ScaleKeys
from longseq.tasks.training.configuration import MARKS

CONF = Path(longseq.conf.__file__).parent
# Groups of whole configurations, which have the keys of other groups.
WHOLE = ("experiment", "comparison", "hparams_search", "hydra")

VERBS = {
    "evaluate": "longseq.tasks.evaluate:Evaluate",
    "predict": "longseq.tasks.predict:Predict",
    "generate": "longseq.tasks.generate:Generate",
    "harness": "longseq.tools.harness:Harness",
    "export": "longseq.tools.export:Export",
    "describe": "longseq.tools.describe:DescribeKeys",
}


def keys_of(path: Path) -> dict[str, Any]:
    """The keys of a file without Hydra's own, and without those that state its tasks."""
    content = yaml.safe_load(path.read_text()) or {}
    marks = () if path.parent == CONF else MARKS
    return {key: value for key, value in content.items() if key not in ("defaults", "hydra", *marks)}


def names(cls: type) -> set[str]:
    return {entry.name for entry in fields(cls)}


CLASSIFIERS = [
    (task, path.stem)
    for path in sorted((CONF / "recipe").glob("*.yaml"))
    for task in yaml.safe_load(path.read_text()).get("tasks", [])
    if task in ("document", "image")
]
GROUPS = {path.name for path in CONF.iterdir() if path.is_dir() and path.name not in ("__pycache__", *WHOLE)}


def test_the_keys_of_training_are_those_of_its_file_and_the_groups():
    assert names(Train) == set(keys_of(CONF / "train.yaml")) | GROUPS


@pytest.mark.parametrize("verb", VERBS)
def test_the_keys_of_a_verb_are_those_of_its_file(verb):
    module, _, name = VERBS[verb].partition(":")
    cls = getattr(importlib.import_module(module), name)
    inherited = names(Train) if issubclass(cls, Train) else {"trainer"} & names(cls)
    own = keys_of(CONF / f"{verb}.yaml")
    assert set(own) | inherited == names(cls)
    for key in ("image", "text"):  # of whole models
        if isinstance(own.get(key), dict):
            inner = importlib.import_module(module)
            cls_of = {"image": inner.ImageModelsKeys, "text": inner.LanguageModelsKeys}[key]
            assert set(own[key]) == names(cls_of)


def files(group: str, task: str) -> list[dict[str, Any]]:
    """The keys of the files of a group that name a task."""
    whole = [path for path in sorted((CONF / group).glob("*.yaml"))]
    return [keys_of(path) for path in whole if task in yaml.safe_load(path.read_text()).get("tasks", [task])]


@pytest.mark.parametrize("task", ["document", "image", "lm", "probe"])
def test_the_keys_of_a_task_are_those_of_its_files(task):
    keys = registry.get(task).config
    data, recipes = files("data", task), files("recipe", task)
    assert set().union(*data) == names(keys.data)
    assert set().union(*recipes) | {"loss", "augment", "model", "chosen"} == names(RecipeKeys)
    for part in ("loss", "augment"):
        written = set().union(*(recipe.get(part) or {} for recipe in recipes))
        assert written == (names(getattr(keys, part)) if getattr(keys, part) else set())


def test_the_keys_of_scales_mixers_and_tasks_are_those_of_their_files():
    assert set().union(*map(keys_of, (CONF / "scale").glob("*.yaml"))) == names(ScaleKeys)
    assert set().union(*map(keys_of, (CONF / "mixer").glob("*.yaml"))) == names(MixerKeys)
    for path in (CONF / "task").glob("*.yaml"):
        task = keys_of(path)
        assert set(task.get("task", task)) == names(registry.get(path.stem).config.group), path.stem


@pytest.mark.parametrize(("task", "recipe"), CLASSIFIERS, ids=[name for _, name in CLASSIFIERS])
def test_a_recipe_of_classifiers_has_the_key_that_the_pages_name_for_fine_tuning(task, recipe, compose_config):
    words = (f"task={task}", f"recipe={recipe}", "recipe.optimizer.layer_decay=0.75")
    assert compose_config("train", *words)["recipe"]["optimizer"]["layer_decay"] == 0.75


def test_a_recipe_knows_no_name_of_a_scale():
    scales = {path.stem for path in (CONF / "scale").glob("*.yaml")} - {"probe"}
    for path in (CONF / "recipe").glob("*.yaml"):
        text = "\n".join(line.split("#")[0] for line in path.read_text().splitlines())
        assert "scale.name" not in text
        assert not {f"{name}:" for name in scales} & set(text.replace("{", " ").split()), path.name
