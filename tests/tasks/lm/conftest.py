"""A language model that was trained for a moment on a few documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from omegaconf import DictConfig

from longseq.tasks import train


class TrainedModel(NamedTuple):
    """The folder of a run and its checkpoint."""

    folder: Path
    checkpoint: Path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, compose_config: Callable[..., DictConfig]) -> TrainedModel:
    folder = tmp_path_factory.mktemp("language_model")
    documents = [f"Document {number} says: {'la ' * (number % 7)}and ends." for number in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    data = ("data=text", f"data.root={folder / 'text.jsonl'}", f"data.cache={folder / 'cache'}", "data.window=16")
    splits = ("data.validation=0.2", "data.test=0.2", "data.packing=documents")
    model = ("mixer=gated_deltanet", "model.d_model=16", "model.depth=1")
    recipe = ("recipe.batch_size=64", "recipe.updates=3", "recipe.schedule.warmup_updates=0")
    words = (*data, *splits, *model, *recipe, "trainer=cpu", f"output={folder / 'run'}")
    train.run(compose_config("train", "task=lm", *words))
    return TrainedModel(folder / "run", folder / "run" / "checkpoints" / "best.ckpt")
