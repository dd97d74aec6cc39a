"""The loader of checkpoints: what it gives back, and what it says of files that it cannot use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longseq import mixers
from longseq.mixers import Mixer
from longseq.tasks.training.checkpoint import load, sha256


def change(checkpoint: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    contents = torch.load(checkpoint, weights_only=True)
    edit(contents)
    torch.save(contents, target)
    return target


def test_loads_the_averaged_weights_or_the_raw_ones(checkpoint: Path) -> None:
    contents = torch.load(checkpoint, weights_only=True)
    loaded = {weights: load(checkpoint, weights=weights) for weights in ("auto", "ema", "model")}
    assert [loaded[weights].weights for weights in loaded] == ["ema", "ema", "model"]
    for weights, key in (("auto", "state_dict"), ("ema", "state_dict"), ("model", "current_model_state")):
        head = loaded[weights].backbone.get_parameter("head.weight")
        assert torch.equal(head, contents[key]["backbone.head.weight"])
    assert not torch.equal(*(loaded[weights].backbone.get_parameter("head.weight") for weights in ("ema", "model")))


def test_knows_what_the_run_knew(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    assert loaded.task_name == "image"
    assert loaded.config["mixer"]["name"] == "attention"
    assert loaded.data["class_names"] == [str(digit) for digit in range(10)]
    assert loaded.global_step == 2
    assert not loaded.backbone.training
    assert loaded.backbone(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_without_an_average_the_weights_are_the_models(checkpoint: Path, tmp_path: Path) -> None:
    plain = change(checkpoint, tmp_path / "plain.ckpt", lambda contents: contents.pop("current_model_state"))
    assert load(plain).weights == "model"
    with pytest.raises(ValueError, match="holds no averaged weights: take weights=model"):
        load(plain, weights="ema")


def test_model_options_replace_those_of_the_configuration(checkpoint: Path) -> None:
    backbone = load(checkpoint, model_options={"dynamic_img_size": True}).backbone
    assert backbone(torch.zeros(1, 1, 12, 16)).shape == (1, 10)


@pytest.mark.parametrize("switch", [True, False])
def test_recompute_was_a_switch_once(checkpoint: Path, tmp_path: Path, switch: bool) -> None:
    def write_as_before(contents: dict[str, Any]) -> None:
        config = contents["hyper_parameters"]["config"]
        config["model"]["recompute"] = switch
        config["mixer"]["options"]["recompute"] = switch

    backbone = load(change(checkpoint, tmp_path / "before.ckpt", write_as_before)).backbone
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(backbone(x), load(checkpoint).backbone(x))
    assert {module.recompute for module in backbone.modules() if isinstance(module, Mixer)} == {switch}


def test_layers_that_compute_something_else_by_now_are_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.load(checkpoint, weights_only=True)["mixer_revisions"] == {"attention": 1}
    before = change(checkpoint, tmp_path / "before.ckpt", lambda contents: contents.pop("mixer_revisions"))
    assert load(before).task_name == "image"  # attention is what it was
    monkeypatch.setattr(mixers.get("attention"), "revision", 2)
    for path in (before, checkpoint):
        with pytest.raises(
            ValueError, match=r"its attention layers are of revision 1, .* computes revision 2"
        ) as raised:
            load(path, key="init")
        assert str(raised.value).startswith(f"init={path}: ")
        assert "\n" not in str(raised.value)


def test_pretrained_weights_are_not_fetched_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the weights are in the checkpoint")

    def pretrain(contents: dict[str, Any]) -> None:
        contents["hyper_parameters"]["config"]["model"]["pretrained"] = True

    monkeypatch.setattr("timm.models._builder.load_pretrained", refuse)
    load(change(checkpoint, tmp_path / "pretrained.ckpt", pretrain))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path, checkpoint: None, r"no such file; `longseq train` writes"),
        (lambda path, checkpoint: path.mkdir(), "is a folder: name a file in it"),
        (lambda path, checkpoint: path.write_text("weights"), "damaged, cut short or no checkpoint"),
        (lambda path, checkpoint: path.write_bytes(b""), "damaged, cut short or no checkpoint"),
        (lambda path, checkpoint: path.write_bytes(checkpoint.read_bytes()[:9000]), "damaged, cut short"),
        (lambda path, checkpoint: torch.save(torch.nn.Linear(1, 1), path), "no checkpoint of longseq: it holds"),
        (lambda path, checkpoint: torch.save([1, 2], path), "no Lightning checkpoint"),
        (lambda path, checkpoint: torch.save({"state_dict": {}}, path), "of another program"),
        (
            lambda path, checkpoint: torch.save({"state_dict": {}, "hyper_parameters": {"lr": 1.0}}, path),
            "of another program",
        ),
    ],
    ids=["missing", "folder", "text", "empty", "cut", "pickle", "list", "weights", "foreign"],
)
def test_files_that_are_no_checkpoint(
    write: Callable[[Path, Path], None], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "file.ckpt"
    write(path, checkpoint)
    with pytest.raises(ValueError, match=message) as raised:
        load(path)
    assert "\n" not in str(raised.value)
    assert "file.ckpt" in str(raised.value)


def test_damaged_bytes_are_noticed(checkpoint: Path, tmp_path: Path) -> None:
    contents = bytearray(checkpoint.read_bytes())
    weights = load(checkpoint).backbone.get_parameter("blocks.0.mixer.mixers.0.in_proj.weight")
    place = contents.find(weights.detach().numpy().tobytes())
    assert place > 0
    contents[place] ^= 0xFF
    damaged = tmp_path / "damaged.ckpt"
    damaged.write_bytes(contents)
    with pytest.raises(ValueError, match="damaged"):
        load(damaged)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda state: state.pop("backbone.head.bias"),
            r"1 missing \(head\.bias\); it was probably written by another version",
        ),
        (
            lambda state: state.update({"backbone.extra": torch.zeros(1), "backbone.more": torch.zeros(1)}),
            r"2 unexpected \(extra, more\)",
        ),
        (
            lambda state: state.update({"backbone.head.bias": torch.zeros(7)}),
            r"head\.bias have other shapes .*\[7\], not \[10\]",
        ),
    ],
)
def test_weights_of_another_model(
    edit: Callable[[dict[str, Any]], Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    path = change(checkpoint, tmp_path / "other.ckpt", lambda contents: edit(contents["state_dict"]))
    with pytest.raises(ValueError, match=message) as raised:
        load(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda config: config.update(task={"name": "document"}), "belongs to task=document.*of task=image"),
        (lambda config: config.pop("model"), "written by another version of longseq.* tell model"),
        (lambda config: config["recipe"].clear() or config["model"].pop("name"), "another version.*'name'"),
        (lambda config: config.clear(), "written by another version of longseq.* tell task, model"),
    ],
)
def test_configurations_that_name_no_model_of_ours(
    edit: Callable[[dict[str, Any]], Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    path = change(checkpoint, tmp_path / "other.ckpt", lambda contents: edit(contents["hyper_parameters"]["config"]))
    with pytest.raises(ValueError, match=message) as raised:
        load(path, key="init")
    assert str(raised.value).startswith(f"init={path}")
    assert "\n" not in str(raised.value)


def test_class_names_that_do_not_fit_the_head(checkpoint: Path, tmp_path: Path) -> None:
    def shorten(contents: dict[str, Any]) -> None:
        contents["hyper_parameters"]["data"]["class_names"].pop()

    path = change(checkpoint, tmp_path / "other.ckpt", shorten)
    with pytest.raises(ValueError, match="names 9 classes, and its model has 10"):
        load(path)


def test_the_callers_random_state_stays(checkpoint: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    load(checkpoint)
    assert torch.equal(torch.rand(1), expected)


def test_any_resolution_is_refused_by_models_that_have_one(checkpoint: Path, tmp_path: Path) -> None:
    def fix(contents: dict[str, Any]) -> None:
        contents["hyper_parameters"]["config"]["model"] = {"name": "cait_xxs24_224", "label": "timm"}
        contents["hyper_parameters"]["data"]["img_size"] = 32
        contents["hyper_parameters"]["config"]["recipe"]["model"] = {}

    path = change(checkpoint, tmp_path / "fixed.ckpt", fix)
    with pytest.raises(ValueError, match="holds a cait_xxs24_224, which takes images of 32 px only"):
        load(path, any_resolution=True)


def test_unknown_weights_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="take one of auto, ema, model"):
        load(checkpoint, weights="best")


def test_sha256(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * 2**20 + 1))
    assert sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()
