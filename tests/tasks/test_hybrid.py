"""A hybrid through a training: its options, its name, its checkpoint and its hyper-parameters."""

from __future__ import annotations

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longseq.tasks import train
from longseq.tasks.image.info import DataInfo
from longseq.tasks.image.model import ImageModel
from longseq.tasks.training import checkpoint
from longseq.tasks.training.configuration import resolve

SMALL = DataInfo(["a", "b"], 2, 32, 3, [0.5] * 3, [0.5] * 3, "bicubic", 1.0)
LAYERS = "{default: deltanet, layers: {1: attention}}"


@pytest.mark.slow
def test_a_trained_hybrid_comes_back_from_its_checkpoint(tiny, tmp_path):
    config = tiny("mixer=hybrid", f"mixer.name={LAYERS}", "+mixer.options.attention.num_heads=2", "recipe.epochs=1")
    train.run(config)
    loaded = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights="model")
    assert loaded.backbone.mixer_name == "deltanet+attention@1"
    assert loaded.config["mixer"]["name"] == {"default": "deltanet", "layers": {1: "attention"}}
    assert loaded.backbone.blocks[1].mixer.readers[0].num_heads == 2
    board = EventAccumulator(str(tmp_path / "run")).Reload()
    shown = board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"deltanet+attention@1" in shown
    with pytest.raises(ValueError, match="holds a run already"):
        train.run(config)
    assert train.run(tiny("mixer=hybrid", f"mixer.name={LAYERS}", "+mixer.options.attention.num_heads=2",
                          "recipe.epochs=1", "resume=true")) is not None  # fmt: skip


def test_the_scale_fills_in_the_options_of_each_mixer(compose_config, tmp_path):
    overrides = ("mixer=hybrid", "mixer.name=deltanet+attention+longhorn", "+mixer.options.attention.num_heads=2")
    with torch.device("meta"):
        model = ImageModel().build(resolve(compose_config("train", *overrides, f"output={tmp_path}")), SMALL)
    layers = [block.mixer.readers[0] for block in model.blocks]
    assert [getattr(layer, "head_dim", None) for layer in layers] == [16, 32, None, 16]
