"""A run starts from a converted model, with the options that `longseq convert` prints, and with no others."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import longseq
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks import train
from longseq.tokenizer_files import BYTES
from longseq.tools.cli import main

SCALED = {"rope_type": "linear", "factor": 2.0}
ROTARY: dict[str, Any] = {"qkv_bias": False, "out_bias": False, "rotary": True, "rotary_scaling": SCALED}


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [None, "gla", "retnet+attention"])
def test_a_converted_model_is_trained_further(
    mixer: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    compose_config: Any,
) -> None:  # fmt: skip
    options = {**ROTARY, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
    model = TokenBackbone(
        vocab_size=257, d_model=16, depth=2, mixer="attention", mixer_options=options, norm_eps=1e-3, mlp_ratio=1.25
    )
    model.text = {"tokenizer": BYTES, "window": 16}
    model.save_pretrained(tmp_path / "attention")
    new = [] if mixer is None else [f"mixer={mixer}"]
    output = tmp_path / "converted"
    monkeypatch.setattr(
        "sys.argv", ["longseq", "convert", f"source={tmp_path / 'attention'}", f"output={output}", *new]
    )
    assert main() == 0
    command = capsys.readouterr().out.strip().splitlines()[-1].partition("longseq train ")[2]
    overrides = [word for word in shlex.split(command) if word not in ("task=lm",)]
    rest = ["task=lm", "data.window=16", "trainer=cpu", f"output={tmp_path / 'run'}"]
    config = compose_config("train", *overrides, *rest)
    built = train.build(config).module.backbone
    wanted = longseq.from_pretrained(output)
    for name, weight in wanted.state_dict().items():
        assert torch.equal(built.state_dict()[name], weight), name

    config = compose_config("train", *[word for word in overrides if "norm_eps" not in word], *rest)
    with pytest.raises(ValueError, match="norm_eps"):
        train.build(config)
