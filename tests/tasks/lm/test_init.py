"""A run starts from a converted model or a checkpoint, and has its model and its tokenizer."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import longseq
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks import train
from longseq.tasks.training.words import complete
from longseq.tokenizer_files import BYTES, same_tokenizer
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
    words = complete("train", [*shlex.split(command), "data.window=16", "trainer=cpu", f"output={tmp_path / 'run'}"])
    built = train.build(compose_config("train", *words)).module.backbone
    wanted = longseq.from_pretrained(output)
    for name, weight in wanted.state_dict().items():
        assert torch.equal(built.state_dict()[name], weight), name

    with pytest.raises(ValueError, match="norm_eps"):
        train.build(compose_config("train", *words, "model.norm_eps=1e-5"))


@pytest.mark.slow
def test_a_run_on_text_takes_model_and_tokenizer_of_a_run(tmp_path: Path, command: Any) -> None:
    texts = "".join(json.dumps({"text": f"text {number} {'more ' * number}"}) + "\n" for number in range(60))
    (tmp_path / "text.jsonl").write_text(texts)
    data = ("data=text", "data.root=text.jsonl", "data.cache=cache", "data.validation=0.2", "data.test=0.2")
    recipe = ("recipe.batch_size=64", "recipe.updates=2", "recipe.schedule.warmup_updates=0")
    quiet = ("trainer=cpu", "logger=none")
    words = ("task=lm", *data, "data.window=16", *recipe, *quiet)
    model = ("data.tokenizer=train:270", "mixer=gsa", "model.d_model=16", "model.depth=1")
    for own in ((*model, "model.mlp=gelu", "output=one"), ("init=one/checkpoints/best.ckpt", "output=two")):
        done = command(tmp_path, "train", *words, *own)
        assert done.returncode == 0, done.stderr
    one, two = (longseq.from_pretrained(tmp_path / name / "model") for name in ("one", "two"))
    assert one.arguments == two.arguments
    assert same_tokenizer(one.text["tokenizer"], two.text["tokenizer"])
    measured = command(tmp_path, "evaluate", "checkpoint=two/checkpoints/best.ckpt")
    assert measured.returncode == 0, measured.stderr
