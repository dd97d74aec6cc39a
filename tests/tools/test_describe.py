"""`longseq describe`: the figures are right, and the command prints them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from representatives import REPRESENTATIVES
from torch.utils.flop_counter import FlopCounterMode

import longseq  # noqa: F401  registers the models
from longseq.tools.describe import describe_model, run

DATA = {"img_size": 224, "in_chans": 3}
SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 4, "in_chans": 1, "embed_dim": 32, "depth": 2, "num_classes": 5}


def describe_small(**options: Any) -> dict[str, Any]:
    return describe_model(
        timm.create_model("longseq_tiny_patch16_224", **{**SMALL, **options}), {"img_size": 16, "in_chans": 1}
    )


@pytest.mark.slow
def test_timm_model_and_ours_count_alike() -> None:
    ours = describe_model(timm.create_model("longseq_vit_tiny_patch16_224", mixer="attention"), DATA)
    timms = describe_model(timm.create_model("deit_tiny_patch16_224"), DATA)
    assert ours["tokens"] == timms["tokens"] == 197
    for part in ("mixers", "mlp", "norms", "head"):
        assert ours["parameters"]["parts"][part] == timms["parameters"]["parts"][part]
    assert ours["flops"]["forward"] == pytest.approx(timms["flops"]["forward"], rel=1e-3)
    assert (ours["flops"]["source"], timms["flops"]["source"]) == ("analytic", "counted by torch")


def test_flops_without_data_are_those_of_a_real_pass() -> None:
    model = timm.create_model("resnet10t").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 64, 96))
    facts = describe_model(model, {"img_size": [64, 96], "in_chans": 3})
    assert facts["flops"]["forward"] == counter.get_total_flops() > 0
    assert facts["tokens"] is None
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("mixer", REPRESENTATIVES)
def test_facts_of_mixers(mixer: str) -> None:
    facts = describe_small(mixer=mixer)
    parameters = facts["parameters"]
    assert sum(parameters["parts"].values()) == parameters["total"] == parameters["trainable"]
    assert set(parameters["parts"]) == {"mixers", "embedding", "norms", "head"}
    assert sum(facts["weight_decay"].values()) == parameters["total"]
    for judged in facts["operations"].values():
        assert judged["runs"] == ["torch"]
        assert judged["backends"]["torch"] == []
        assert any("CUDA device" in reason for reason in judged["backends"].get("triton", ["CUDA device"]))
    json.dumps(facts)


def test_state_counts_every_reading() -> None:
    state = describe_small(mixer="longhorn", direction="cross", mixer_options={"state_size": 8})["state"]
    assert [layer["layer"] for layer in state] == ["blocks.0.mixer", "blocks.1.mixer"]
    assert state[0]["tensors"] == {"convolution": [64, 3], "memory": [64, 8]}
    assert state[0]["numbers"] == 4 * (64 * 3 + 64 * 8)
    assert describe_small(mixer="attention")["state"] == []


def compose_describe(*overrides: str) -> DictConfig:
    with initialize_config_module("longseq.conf", version_base="1.3"):
        return compose("describe", list(overrides))


@pytest.mark.slow
def test_describes_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"document {number} " * 20}) + "\n" for number in range(60)))
    words = ["task=lm", "data=text", f"data.root={text}", f"data.cache={tmp_path / 'cache'}", "data.window=64"]
    words += ["data.validation=0.2", "data.test=0.2", "recipe.batch_size=64", "scale=1m"]
    words += ["mixer=hybrid", "mixer.name=gla+attention", "format=json"]
    run(compose_describe(*words))
    facts = json.loads(capsys.readouterr().out)
    assert (facts["vocabulary"], facts["tokens"]) == (257, 64)
    assert sum(facts["parameters"]["parts"].values()) == facts["parameters"]["total"]
    assert facts["parameters"]["parts"]["embedding"] == 257 * 128
    fixed, growing = facts["state"][:2]
    assert (fixed["growth"], growing["growth"]) == (0, 2 * 128)
    assert "linear_attention" in facts["operations"]
    run(compose_describe(*words[:-1]))
    printed = capsys.readouterr().out
    assert "256 more" in printed
    assert "FLOPs of one sequence" in printed


@pytest.mark.slow
def test_a_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run(compose_describe("list=mixers"))
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("deltanet", "35,072", "0.73 M", "delta_rule"))
    run(compose_describe("list=mixers", "format=json"))
    assert json.loads(capsys.readouterr().out)
