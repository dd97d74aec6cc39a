"""Models saved by earlier commits load and compute the logits that were saved with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from longseq import mixers, models

FOLDER = Path(__file__).parent / "frozen"


@pytest.mark.parametrize("mixer", mixers.mixer_names())
@torch.no_grad()
def test_a_frozen_model_computes_its_logits(mixer: str) -> None:
    path = FOLDER / f"vim_{mixer}.safetensors"
    assert path.exists(), "run python tests/frozen/freeze.py and add the file that it writes"
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state = {name.removeprefix("weights."): value for name, value in tensors.items() if name.startswith("weights.")}
    model = models.restore(models.SavedModel(path.name, config, state))
    logits = tensors["logits"]
    tolerance = 1e-5 * max(1.0, float(logits.abs().max()))
    torch.testing.assert_close(model(tensors["inputs"]), logits, rtol=0.0, atol=tolerance)
