"""Every option of every group composes and binds, and every experiment runs."""

from __future__ import annotations

import email
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from arena_files import write_arena
from group_tasks import task_of
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from representatives import REPRESENTATIVES

import longseq.conf
from longseq import mixers
from longseq.conf import SCALES
from longseq.mixers.pattern import options_by_name
from longseq.tasks import registry, train
from longseq.tasks.config import read
from longseq.tasks.document.config import DocumentInfo
from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.model import ImageModel
from longseq.tasks.lm import data as lm_data
from longseq.tasks.probe.data import ProbeInfo
from longseq.tasks.probe.generators import generator_options
from longseq.tasks.registry import with_any_choice
from longseq.tasks.text.tokenizer import TextInfo
from longseq.tasks.training import logger, targets
from longseq.tasks.training.configuration import resolve
from longseq.tasks.training.recipe import Training
from longseq.tasks.training.trainer import build_callbacks

CONF = Path(longseq.conf.__file__).parent
GROUPS = ("task", "mixer", "model", "data", "trainer", "callbacks", "logger")  # image/test_data_conf.py has recipes
# Those that name a class of the user's own are tested in tests/plugins/test_own_classes.py.
OWN = (("data", "own"), ("model", "own"))
EXPERIMENTS = sorted(path.relative_to(CONF / "experiment") for path in (CONF / "experiment").rglob("*.yaml"))
# What experiments choose is in a run of theirs; image/test_data_conf.py and probe/test_probe.py build their data.
RUN = {
    choice
    for path in EXPERIMENTS
    for choice in re.findall(
        r"override /(task|mixer|model|data|scale): (\w+)", (CONF / "experiment" / path).read_text()
    )
}
OPTIONS = [
    option
    for option in (
        *((group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))),
        *(("mixer", name) for name in REPRESENTATIVES),
        *(("scale", name) for name in SCALES),
        ("data", "state_tracking"),
    )
    if option not in OWN and option not in RUN and not (option[0] == "data" and task_of(*option) in ("image", "probe"))
]
SMALL = DataInfo(["a", "b"], 2, 32, 3, [0.5] * 3, [0.5] * 3, "bicubic", 1.0)
SMALL_PROBE = ProbeInfo("mqar", vocab_size=8, longest=16, rebuild=False)
SMALL_TEXT = TextInfo(vocab_size=8, separator=7, window=16, tokenizer={"kind": "bytes"})
SMALL_DOCUMENTS = DocumentInfo(
    class_names=["a", "b"], multi_label=False, vocab_size=257, separator=256, tokenizer={"kind": "bytes"}, window=16
)
SMALL_INFOS = {"image": SMALL, "probe": SMALL_PROBE, "lm": SMALL_TEXT, "document": SMALL_DOCUMENTS}


class Measured:
    """A module that has every metric."""

    has_gradients = True

    def higher_is_better(self, name, key):
        return True


def bind(target: Any, **arguments: Any) -> None:
    """Raise TypeError where the call would not bind; nothing is called."""
    inspect.signature(target).bind(**arguments)


def chosen(group: str, option: str) -> list[str]:
    """Overrides that choose an option, with the task that it belongs to."""
    task = option if group == "task" else task_of(group, option)
    return [f"task={task}"] if group == "task" else [f"task={task}", f"{group}={option}"]


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{group}-{option}" for group, option in OPTIONS])
def test_every_option_composes_and_binds(group, option, compose_config, tmp_path):
    config = resolve(compose_config("train", *chosen(group, option), f"output={tmp_path}"))
    # A person must name the folder of prepared tokens, or of text.
    told = {"root": "FOLDER"} if option in ("tokens", "text") else {}
    config = with_any_choice(config)
    read(registry.of(config).config.data, {**config["data"], **told}, "data")
    if config["task"]["name"] == "probe":
        assert config["data"]["options"].keys() <= generator_options(config["data"]["generator"]).keys()
    bind(Trainer, **config["trainer"])
    for name, options in options_by_name(config["mixer"]["name"], config["mixer"]["options"]).items():
        assert options.keys() <= mixers.options(name).keys()
    training = Training.from_config(config, SMALL_INFOS[config["task"]["name"]])
    inspect.signature(training.optimizer).bind(None, lr=0.1)
    inspect.signature(training.schedule).bind(None, num_epochs=1, warmup_epochs=0, updates_per_epoch=1)
    assert training.length is not None
    registry.of(config)  # the task registers callbacks of its own
    for name, options in (config.get("logger") or {}).items():
        bind(
            targets.find(options, targets.LOGGERS, name), **{key: options[key] for key in options if key != "_target_"}
        )
    if option not in ("wandb", "mlflow"):  # packages that need not be there
        assert all(isinstance(built, Logger) for built in logger.build_loggers(config.get("logger")))
    callbacks = build_callbacks(config, Measured())
    wanted = [options for options in config["callbacks"].values() if options is not None]
    assert len(callbacks) == len(wanted) + bool(config["recipe"]["ema"]) + 3
    if group in ("mixer", "model", "scale"):
        assert_model_builds(config)


def assert_model_builds(config):
    info = SMALL_INFOS[config["task"]["name"]]
    with torch.device("meta"):
        backbone = registry.of(config).model.build(config, info)
    assert sum(parameter.numel() for parameter in backbone.parameters()) > 0
    assert backbone.num_classes == 2 if info in (SMALL, SMALL_DOCUMENTS) else backbone.vocab_size == 8


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=str)
@pytest.mark.slow
def test_every_experiment_runs(experiment, compose_config, tmp_path, monkeypatch, image_folder, fashion_mnist):
    name = experiment.with_suffix("").as_posix()
    batch = evaluated = 2
    if name.startswith("lm/"):
        batch = 4  # tokens: two windows
        # So many that no split is empty, whatever they hold in a version of Python: each goes into one as a whole.
        files = [str(path) for part in (email, json) for path in Path(part.__file__).parent.glob("*.py")]
        monkeypatch.setattr(lm_data, "standard_library_files", lambda: sorted(files))
        small = [
            "data.validation=0.3",
            "data.test=0.3",
            "data.num_workers=0",
            "data.pin_memory=false",
            "model.d_model=16",
        ]
        data = [
            "data.source=standard_library",
            f"data.cache={tmp_path}",
            "data.window=2",
            *small,
        ]
    elif name.startswith("probe/"):
        data = [f"data.{split}=[{{samples: 4}}]" for split in ("train", "validation", "test")]
    elif name.startswith("document/"):
        batch, data = write_arena(name, tmp_path / "files")  # tokens
        evaluated = batch
        data += [f"data.cache={tmp_path}", "model.d_model=16", "mixer=attention"]
        data += ["data.pin_memory=false"]
        if name == "document/ngrams":
            data += ["data.source=files", "data.train=train.jsonl", "data.test=test.jsonl"]
            data += ["data.text_column=text", "data.label_column=label"]
    else:
        data = [f"data.root={fashion_mnist if 'fashion_mnist' in name else image_folder}", "data.num_workers=0"]
        data += ["data.source=folder", "data.test_split=null"] if "cifar10" in name else []
    config = compose_config(
        "train",
        f"experiment={name}",
        *data,
        f"data.eval_batch_size={evaluated}",
        "trainer=cpu",
        "trainer.fast_dev_run=true",
        f"recipe.batch_size={batch}",
        "++model.depth=2",
        "compile=null",
        f"output={tmp_path}",
    )
    train.run(config)


def test_the_scale_fills_in_the_options_of_each_mixer(compose_config, tmp_path):
    overrides = ("mixer=hybrid", "mixer.name=deltanet+attention+longhorn", "+mixer.options.attention.num_heads=2")
    with torch.device("meta"):
        model = ImageModel().build(resolve(compose_config("train", *overrides, f"output={tmp_path}")), SMALL)
    layers = [block.mixer.readers[0] for block in model.blocks]
    assert [getattr(layer, "head_dim", None) for layer in layers] == [16, 32, None, 16]
