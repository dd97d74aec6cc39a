"""Every recipe trains on a GPU, in the precision and with the optimizer that it gets there."""

from __future__ import annotations

import json
import math

import pytest

from longseq.tasks import train
from longseq.tasks.lm import data as lm_data

IMAGE = ("mixer=deltanet", "model.embed_dim=64", "model.depth=2", "recipe.batch_size=64")
TEXT = ("task=lm", "model.d_model=64", "model.depth=2", "data.window=64", "data.validation=0.2", "data.test=0.2")
PROBE = ("task=probe", "mixer=deltanet", "recipe.batch_size=64")

RECIPES = {
    **{name: (*IMAGE, f"recipe={name}") for name in ("digits", "cifar10", "deit", "deit3", "vim")},
    **{name: (*TEXT, f"recipe={name}") for name in ("standard_library", "lm")},
    **{name: (*PROBE, f"recipe={name}") for name in ("probe",)},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_a_gpu(name, compose_config, tmp_path, monkeypatch):
    files = lm_data.standard_library_files()[:20]
    monkeypatch.setattr(lm_data, "standard_library_files", lambda: files)
    length = ("recipe.epochs=null", "recipe.updates=3", "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1")
    if "task=lm" in RECIPES[name]:
        length += (
            f"data.cache={tmp_path}",
            "recipe.batch_size=1024",
            "recipe.tokens=null",
            "recipe.validate_every_updates=null",
        )
    config = compose_config("train", *RECIPES[name], "trainer=gpu", *length, f"output={tmp_path / 'run'}")
    assert math.isfinite(train.run(config))
    assert 0 < json.loads((tmp_path / "run" / "metrics.json").read_text())["gpu_memory_gib"] < 4
