"""The loader of checkpoints, and folders that serve as checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hydra import compose, initialize_config_module
from PIL import Image

import longseq
from longseq.tasks import predict, train
from longseq.tasks.training.checkpoint import load
from longseq.tools import export


def change(checkpoint: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    contents = torch.load(checkpoint, weights_only=True)
    edit(contents)
    torch.save(contents, target)
    return target


@pytest.mark.slow
def test_loads_the_averaged_weights_or_the_raw_ones(checkpoint: Path) -> None:
    contents = torch.load(checkpoint, weights_only=True)
    loaded = {weights: load(checkpoint, weights=weights) for weights in ("auto", "ema", "model")}
    assert [loaded[weights].weights for weights in loaded] == ["ema", "ema", "model"]
    for weights, key in (("auto", "state_dict"), ("ema", "state_dict"), ("model", "current_model_state")):
        head = loaded[weights].backbone.get_parameter("head.weight")
        assert torch.equal(head, contents[key]["backbone.head.weight"])
    assert not torch.equal(*(loaded[weights].backbone.get_parameter("head.weight") for weights in ("ema", "model")))


def test_without_an_average_the_weights_are_the_models(checkpoint: Path, tmp_path: Path) -> None:
    plain = change(checkpoint, tmp_path / "plain.ckpt", lambda contents: contents.pop("current_model_state"))
    assert load(plain).weights == "model"
    with pytest.raises(ValueError, match="averaged weights"):
        load(plain, weights="ema")


def test_a_model_can_be_loaded_for_images_of_any_size(checkpoint: Path) -> None:
    backbone = load(checkpoint, any_resolution=True).backbone
    assert backbone(torch.zeros(1, 1, 12, 16)).shape == (1, 10)


@pytest.mark.parametrize("count", [9, 11])
def test_names_that_do_not_fit_the_head_are_refused(count: int, checkpoint: Path, tmp_path: Path) -> None:
    def name(contents: dict[str, Any]) -> None:
        contents["hyper_parameters"]["data"].update(class_names=[str(i) for i in range(count)], num_classes=count)

    path = change(checkpoint, tmp_path / "named.ckpt", name)
    with pytest.raises(ValueError, match="10 classes"):
        load(path)


@pytest.mark.parametrize(
    "edit",
    [
        lambda state: state.pop("backbone.head.bias"),
        lambda state: state.update({"backbone.extra": torch.zeros(1)}),
        lambda state: state.update({"backbone.head.bias": torch.zeros(7)}),
    ],
)
def test_weights_of_another_model(edit: Callable[[dict[str, Any]], Any], checkpoint: Path, tmp_path: Path) -> None:
    path = change(checkpoint, tmp_path / "other.ckpt", lambda contents: edit(contents["state_dict"]))
    with pytest.raises((RuntimeError, ValueError), match=r"head\.bias|extra"):
        load(path)


def same_data(told: dict[str, Any], trained: dict[str, Any]) -> bool:
    """True if a model tells of its data what the run knows, but for the sizes of splits and what acts in training."""
    absent = {key: value for key, value in trained.items() if key not in told}
    extra = {key: value for key, value in absent.items() if key != "sizes"}
    return {**absent, **told, "sizes": trained["sizes"]} == trained and not any(extra.values())


def test_a_run_leaves_its_model(checkpoint: Path) -> None:
    run = checkpoint.parents[1]
    x = torch.randn(3, 1, 8, 8)
    model = load(checkpoint).backbone
    assert torch.equal(longseq.from_pretrained(run / "model")(x), model(x))
    assert torch.equal(timm.create_model(f"local-dir:{run / 'model'}", pretrained=True).eval()(x), model(x))
    assert "| test/top1 |" in (run / "model" / "README.md").read_text()


def test_a_saved_folder_serves_as_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    from_run = load(checkpoint)
    longseq.save_pretrained(from_run.backbone, tmp_path)
    loaded = load(tmp_path)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(loaded.backbone(x), from_run.backbone(x))
    assert same_data(loaded.data, from_run.data)
    assert loaded.file == tmp_path / "model.safetensors"


@pytest.mark.slow
def test_a_repository_of_the_hub_serves_as_a_checkpoint(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def snapshot(repo_id: str, revision: str | None = None, **_: Any) -> str:
        asked.append((repo_id, revision))
        return str(tmp_path / "hub" / repo_id)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    model = load(checkpoint).backbone
    longseq.save_pretrained(model, tmp_path / "hub" / "user" / "ours")
    Image.new("L", (8, 8), 200).save("image.png")

    def command(run: Callable[..., Any], name: str, *overrides: str) -> Any:
        with initialize_config_module("longseq.conf", version_base="1.3"):
            return run(compose(name, list(overrides)))

    tables = []
    for source in ("hub/user/ours", "hf-hub:user/ours", "hf-hub:user/ours@v1"):
        command(predict.run, "predict", f"checkpoint={source}", "input=image.png", "output=found.csv", "device=cpu")
        tables.append(Path("found.csv").read_text())
    assert len(set(tables)) == 1
    assert asked[0] == ("user/ours", None)
    assert asked[-1] == ("user/ours", "v1")
    command(export.run, "export", "checkpoint=hf-hub:user/ours", "output=model.pt", "latency=false")
    assert Path("model.pt").is_file()
    overrides = ["mixer=attention", "model.depth=2", "init=hf-hub:user/ours", "data.num_workers=0", "output=run"]
    begun = command(train.build, "train", *overrides).module.backbone
    for one in (begun, longseq.from_pretrained("user/ours"), longseq.from_pretrained("hf-hub:user/ours@v1")):
        assert torch.equal(one.head.weight, model.get_parameter("head.weight"))
