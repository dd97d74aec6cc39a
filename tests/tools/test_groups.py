"""Every option of every group states its tasks, and under another task it gives one line with the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module

import longseq.conf
from longseq.tasks import train  # noqa: F401  registers the resolvers that train.yaml names
from longseq.tools.groups import check_choices

CONF = Path(longseq.conf.__file__).parent
TASKS = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
# Groups whose options are for some tasks; those of the other groups are for every task.
MARKED = ("callbacks", "data", "experiment", "model", "recipe", "scale")
FREE = ("comparison", "hparams_search", "logger", "mixer", "trainer")


def tasks_of(path: Path) -> list[str]:
    return yaml.safe_load(path.read_text()).get("tasks")


OPTIONS = {
    (group, path.relative_to(CONF / group).with_suffix("").as_posix()): tasks_of(path)
    for group in MARKED
    for path in sorted((CONF / group).rglob("*.yaml"))
}
WRONG = [(group, option, task) for (group, option), tasks in OPTIONS.items() for task in TASKS if task not in tasks]


@pytest.fixture(scope="module", autouse=True)
def hydra_is_initialized() -> Iterator[None]:
    with initialize_config_module("longseq.conf", version_base="1.3"):
        yield


def check(*overrides: str) -> None:
    cfg = compose("train", list(overrides), return_hydra_config=True)
    check_choices(cfg, cfg.hydra.runtime)


def test_every_file_of_a_marked_group_names_tasks_that_there_are():
    assert {path.name for path in CONF.iterdir() if path.is_dir()} - {"__pycache__"} == {*MARKED, *FREE, "task"}
    assert {key: tasks for key, tasks in OPTIONS.items() if not tasks or set(tasks) - set(TASKS)} == {}
    assert WRONG


@pytest.mark.parametrize(("group", "option", "task"), WRONG, ids=[f"{g}-{o}-{t}" for g, o, t in WRONG])
def test_an_option_under_a_wrong_task_is_one_line_with_the_remedy(group, option, task):
    with pytest.raises(ValueError, match="belongs to") as caught:
        check(f"task={task}", f"{group}={option}")
    wanted = " or ".join(f"task={name}" for name in OPTIONS[group, option])
    message = str(caught.value)
    here = [name for (other, name), tasks in OPTIONS.items() if other == group and task in tasks]
    assert message.startswith(f"{group}={option} belongs to {wanted}: add {wanted}")
    assert f"; for task={task}, give {group}=" in message or not here
    assert "\n" not in message
    assert all(name in message for name in here)


@pytest.mark.parametrize("task", TASKS)
def test_what_a_task_chooses_by_itself_is_for_it(task):
    check(f"task={task}")


def test_an_option_that_does_not_exist_names_the_nearest():
    with pytest.raises(ValueError, match=r"recipe=zology is unknown: did you mean recipe=zoology\? for task=image"):
        check("recipe=zology")


@pytest.mark.slow
def test_data_without_a_recipe_of_its_name_asks_for_one(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("defaults:\n  - digits\n  - _self_\n\nname: mine\n")
    with pytest.raises(ValueError, match=r"data=mine has no recipe of its own name: give recipe=auto, cifar10, "):
        check(f"hydra.searchpath=[file://{tmp_path}]", "data=mine")
    check(f"hydra.searchpath=[file://{tmp_path}]", "data=mine", "recipe=digits")


@pytest.mark.slow
def test_a_task_can_take_the_options_of_another(tmp_path):
    (tmp_path / "task").mkdir()
    task = tmp_path / "task" / "mine.yaml"
    lines = ["# @package _global_", "defaults:", "  - override /data: mqar", "  - override /recipe: probe"]
    lines += ["  - override /model: token", "  - override /scale: probe", "  - override /callbacks: probe", ""]
    task.write_text("\n".join([*lines, "task: {name: mine, metric: val/accuracy, unit: rows, like: [probe]}", ""]))
    check(f"hydra.searchpath=[file://{tmp_path}]", "task=mine", "data=copy")
    with pytest.raises(ValueError, match=r"data=digits belongs to task=image: add task=image; for task=mine"):
        check(f"hydra.searchpath=[file://{tmp_path}]", "task=mine", "data=digits")
