"""`longseq train task=document init=...`: from checkpoints and folders of language models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

import longseq
from longseq.backbones.tokens import TokenBackbone
from longseq.models import describe
from longseq.tasks import train

WORDS = ["[SEP]", "[UNK]", "a", "text", "about", "cats", "dogs", "and", "more"]
VOCABULARY = {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(WORDS)}, "unk_token": "[UNK]"}
TOKENIZER = {
    "kind": "file",
    "separator": "[SEP]",
    "json": json.dumps({"version": "1.0", "model": VOCABULARY, "pre_tokenizer": {"type": "Whitespace"}}),
}

Configure = Callable[..., DictConfig]


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    """The words of a small training on texts about cats and about dogs."""
    rows = [{"text": f"a text about {kind} {'and more ' * (number % 5)}", "label": kind}
            for number in range(30) for kind in ("cats", "dogs")]  # fmt: skip
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("data=documents", f"data.root={tmp_path / 'texts.jsonl'}", f"data.cache={tmp_path / 'cache'}")
    recipe = ("recipe.batch_size=128", "recipe.epochs=1", "recipe.schedule.warmup_updates=0")
    quiet = ("trainer=cpu", "logger=csv")
    return "task=document", *data, *recipe, *quiet, f"output={tmp_path / 'run'}"


@pytest.fixture
def configure(words: tuple[str, ...], compose_config: Any) -> Configure:
    """The configuration of such a training, with the model of `language_model` and further overrides."""
    model = ("mixer=gla", "model.d_model=16", "model.depth=2", "model.mlp_ratio=1.0")
    return lambda *overrides: compose_config("train", *words, *model, *overrides)


def language_model(**options: Any) -> TokenBackbone:
    torch.manual_seed(1)
    model = TokenBackbone(vocab_size=len(WORDS), d_model=16, depth=2, mlp_ratio=1.0, **{"mixer": "gla", **options})
    model.text = {"tokenizer": dict(TOKENIZER), "window": 32}
    return model


def as_checkpoint(model: TokenBackbone, path: Path) -> Path:
    """What a training of the model writes, as far as a new one reads it."""
    assert model.text is not None
    data = {**model.text, "vocab_size": model.vocab_size, "separator": 0}
    run = {"config": {"task": {"name": "lm"}}, "data": data}
    state = {f"backbone.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "model_config": describe(model), "hyper_parameters": run}, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("source", ["checkpoint", "folder"])
def test_a_classifier_starts_from(source: str, configure: Configure, tmp_path: Path) -> None:
    model, path = language_model(), tmp_path / "model"
    if source == "checkpoint":
        as_checkpoint(model, path)
    else:
        model.save_pretrained(path)
    parts = train.build(configure(f"init={path}"))
    info, built = parts.datamodule.info, parts.module.backbone
    assert (info.vocab_size, info.class_names) == (len(WORDS), ["cats", "dogs"])
    trained, state = model.state_dict(), built.state_dict()
    for name, value in state.items():
        if name.startswith("body."):
            assert torch.equal(
                value, trained[name.removeprefix("body.").replace("mixers.0.", "").replace("mixers.1.", "")]
            )


@pytest.mark.slow
def test_a_frozen_part_stays_that_of_the_language_model(configure: Configure, tmp_path: Path) -> None:
    model = language_model()
    path = as_checkpoint(model, tmp_path / "run.ckpt")
    train.run(configure(f"init={path}", "recipe.freeze=1"))
    tuned = longseq.from_pretrained(tmp_path / "run" / "model")
    before, after = model.state_dict(), tuned.body.state_dict()
    assert torch.equal(before["embedding.weight"], after["embedding.weight"])
    for name in ("norm1.weight", "mixer.{}out_proj.weight"):
        first, second = (f"blocks.{index}.{name}" for index in (0, 1))
        assert torch.equal(before[first.format("")], after[first.format("mixers.0.")])
        assert not torch.equal(before[second.format("")], after[second.format("mixers.0.")])
    assert tuned.text["class_names"] == ["cats", "dogs"]
    # and a classifier starts from the classifier
    again = train.build(configure(f"init={tmp_path / 'run' / 'checkpoints' / 'best.ckpt'}")).module.backbone
    assert torch.equal(again.head.weight, tuned.head.weight)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["data.tokenizer=bytes", "model.norm_eps=1e-3", "model.depth=1"])
def test_weights_that_do_not_fit_the_model_are_an_error(configure: Configure, tmp_path: Path, word: str) -> None:
    language_model().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"tokenizer|norm_eps|depth"):
        train.build(configure(f"init={tmp_path / 'model'}", word))
