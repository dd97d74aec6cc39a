"""Models that were saved in the past load, and give the same logits as then."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import longseq
from longseq import mixers, models

FOLDER = Path(__file__).parent / "frozen"
COMMAND = "run python tests/frozen/freeze.py and add the file that it writes"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("freeze", FOLDER / "freeze.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


freeze = load_script()


@pytest.mark.parametrize("mixer", mixers.mixer_names())
def test_every_mixer_is_frozen_in_every_chassis_and_computes_what_it_did(mixer: str) -> None:
    for chassis in (*freeze.CHASSIS, *(freeze.ONCE if mixer == freeze.ONCE_MIXER else ())):
        path = freeze.file_of(chassis, mixer)
        assert path.exists(), f"there is no frozen {chassis} of {mixer}: {COMMAND}"
        with safe_open(path, "pt") as file:
            config = json.loads(file.metadata()["config"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state = {name.removeprefix("weights."): value for name, value in tensors.items() if name.startswith("weights.")}
        model = models.restore(models.SavedModel(path.name, config, state))
        scored = freeze.score(model, tensors["inputs"])
        difference = float((scored - tensors["logits"]).abs().max())
        assert difference < 1e-5 * max(1.0, float(tensors["logits"].abs().max())), f"{path.name}: {difference}"


@pytest.mark.parametrize("weights", ["ema", "model"])
def test_a_checkpoint_of_a_training_is_read(weights: str) -> None:
    tensors = load_file(freeze.RUN.with_suffix(".safetensors"))
    scored = freeze.score(longseq.from_pretrained(freeze.RUN, weights=weights), tensors["inputs"])
    assert float((scored - tensors[weights]).abs().max()) < 1e-5
    assert not torch.equal(tensors["ema"], tensors["model"])


def test_frozen_files_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    assert max(sizes.values()) < 64_000, max(sizes, key=lambda name: sizes[name])
