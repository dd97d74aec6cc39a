"""Users' programs, as the type checker reads them; each of them runs."""

from __future__ import annotations

import csv
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import longseq
from longseq.backbones.classifier import TextClassifier
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks import (
    DataInfo,
    DocumentInfo,
    DocumentTask,
    ImageClassifier,
    LanguageModelTask,
    RunLength,
    TextInfo,
    Training,
)
from longseq.tasks.text.tokenizer import ByteTokenizer

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_layers_and_models_of_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(HERE / "user_script.py"))
    assert names["token"].shape == (2, 64)
    assert "torch.Size([1, 10])" in capsys.readouterr().out


@pytest.mark.slow
def test_a_program_trains_with_lightnings_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(HERE / "user_training.py"))
    assert names["trainer"].callback_metrics["test/top1"] > 0.6
    images, model = torch.randn(2, 1, 8, 8), names["model"].eval()
    torch.testing.assert_close(longseq.from_pretrained(tmp_path / "digits")(images), model(images))


def make_trainer(folder: Path, name: str, **options: Any) -> Trainer:
    """Lightning's Trainer with Lightning's own checkpoints."""
    best = ModelCheckpoint(folder, filename=name, enable_version_counter=False)
    shown = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(accelerator="cpu", callbacks=[best], **{"max_epochs": 1, **shown, **options})


def make_images() -> tuple[Any, DataInfo, list[dict[str, Any]]]:
    """An image model, what its data are, and samples: images that are bright or dark, with names of transformers."""
    options = {"mixer": "linear_attention", "img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 2}
    model = timm.create_model("longseq_tiny_patch16_224", embed_dim=32, depth=1, **options)
    info = DataInfo(
        class_names=["dark", "bright"],
        num_classes=2,
        img_size=8,
        in_chans=1,
        mean=[0.4],
        std=[0.2],
        interpolation="nearest",
        crop_pct=1.0,
    )
    pixels = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0)) / 2
    rows = [{"pixel_values": (image + i % 2 / 2 - 0.4) / 0.2, "label": i % 2} for i, image in enumerate(pixels)]
    return model, info, rows


@pytest.mark.slow
def test_images_of_any_loader_train_and_their_checkpoint_serves_every_command(tmp_path: Path, command_here) -> None:
    model, info, rows = make_images()
    recipe = Training(learning_rate=1e-2)
    module = ImageClassifier(model, num_classes=2, info=info, training=recipe, binary_cross_entropy=True)
    trainer = make_trainer(tmp_path, "own", max_epochs=4)
    trainer.fit(module, DataLoader(rows, 8), DataLoader(rows, 8))
    assert trainer.callback_metrics["val/top1"] == 1
    assert [len(logits) for logits in trainer.predict(module, DataLoader(rows, 16))] == [16, 16]
    assert [
        len(logits) for logits in trainer.predict(module, DataLoader([row["pixel_values"] for row in rows], 32))
    ] == [32]

    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "own.ckpt", training=recipe)
    assert loaded.training
    assert loaded.binary_cross_entropy
    assert loaded.info == info
    images = torch.stack([row["pixel_values"] for row in rows])
    torch.testing.assert_close(loaded.eval()(images), module.eval()(images))
    again = make_trainer(tmp_path, "again", max_epochs=5)
    again.fit(loaded.train(), DataLoader(rows, 8), ckpt_path=tmp_path / "own.ckpt")
    assert again.global_step == 20

    for name, value in (("dark", 60), ("bright", 200)):
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.new("L", (8, 8), value).save(tmp_path / "val" / name / "0.png")
    own = "checkpoint=own.ckpt"
    place = ("trainer=cpu", "data.source=folder", "data.root=.", "data.val_split=val", "data.num_workers=0")
    done = command_here(tmp_path, "evaluate", own, *place, "split=val", "output=found.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text())["val/images"] == 2
    done = command_here(tmp_path, "predict", own, "input=val", "output=found.csv", "device=cpu")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "found.csv").open() as file:
        assert [Path(row["path"]).parent.name == row["class_1"] for row in csv.DictReader(file)] == [True, True]
    assert "linear_attention" in command_here(tmp_path, "describe", own).stdout
    done = command_here(tmp_path, "export", own, "format=torchscript", "output=own.pt", "latency=false")
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.jit.load(tmp_path / "own.pt")(images), module(images), rtol=1e-4, atol=1e-4)


def test_forms_of_image_batches() -> None:
    model, info, _ = make_images()
    module = ImageClassifier(model, num_classes=2, info=info)
    images, numbers = torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])
    for batch in ((images, numbers), [images, numbers.float()[:, None]], {"image": images, "target": numbers.int()}):
        found = module.read_batch(batch)
        assert found[0] is images
        assert torch.equal(found[1], numbers)
    soft = torch.tensor([[0.3, 0.7], [1.0, 0.0]])
    assert module.read_batch((images, soft))[1] is soft
    for labels in ([0, 2], [-1, 0], [0.0, 0.9], [0.0, torch.nan], [[1.0, 1.0], [0.0, 1.0]], [[1.5, -0.5], [0.0, 1.0]]):
        with pytest.raises(ValueError, match="label"):
            module.read_batch((images, torch.tensor(labels)))
    several = ImageClassifier(model, num_classes=2, multi_label=True)
    assert several.read_batch((images, torch.ones(2, 2)))[1].sum() == 4


class Stream(IterableDataset):
    """Rows of tokens without a known number."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.rows)


BYTES = {"vocab_size": 257, "separator": 256, "tokenizer": ByteTokenizer().to_dict()}


@pytest.mark.slow
def test_rows_of_tokens_of_any_loader_train_a_language_model(tmp_path: Path, command_here) -> None:
    rows = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(0))
    model = TokenBackbone(vocab_size=257, d_model=16, depth=1, mixer="linear_attention")
    info = TextInfo(window=16, **BYTES)
    module = LanguageModelTask(model, info=info, training=Training(learning_rate=1e-3), z_loss=1e-4)
    mask = torch.ones_like(rows)
    mask[:, 10:] = 0
    padded = [{"input_ids": row, "attention_mask": one} for row, one in zip(rows, mask, strict=True)]
    losses = [
        make_trainer(tmp_path, "lm").validate(module, loader, verbose=False)[0]["val/loss"]
        for loader in (
            DataLoader(TensorDataset(rows[:, :10]), 4),
            DataLoader(TensorDataset(rows[:, :9], rows[:, 1:10]), 4),
            DataLoader(padded, 4),
        )
    ]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)
    for loader in (DataLoader(TensorDataset(rows[:, :10]), 4), DataLoader(padded, 4)):
        found = torch.cat(make_trainer(tmp_path, "lm").predict(module, loader))  # type: ignore[arg-type]
        with torch.no_grad():
            wanted = model(rows[:, :9])[0].log_softmax(-1).gather(-1, rows[:, 1:10, None])[..., 0]
        torch.testing.assert_close(found[:, :9], wanted)
        assert not found[:, 9:].any()
    trainer = make_trainer(tmp_path, "lm", max_epochs=2)
    trainer.fit(module, DataLoader(TensorDataset(rows), 4), DataLoader(TensorDataset(rows), 4))
    assert trainer.global_step == 4
    assert "val/bits_per_byte" not in trainer.callback_metrics  # the number of bytes is unknown
    loaded = LanguageModelTask.load_from_checkpoint(tmp_path / "lm.ckpt")
    assert (loaded.info, loaded.z_loss) == (info, 1e-4)
    done = command_here(tmp_path, "generate", "checkpoint=lm.ckpt", "prompt=a", "max_new_tokens=4", "device=cpu")
    assert done.returncode == 0, done.stderr

    stream = DataLoader(Stream(rows), 4)
    plain = Training(learning_rate=1e-3)
    trainer = make_trainer(tmp_path, "stream", max_steps=3, max_epochs=None)
    trainer.fit(LanguageModelTask(model, training=plain), stream)
    assert trainer.global_step == 3
    counted = Training(learning_rate=1e-3, length=RunLength(updates=5, validate_every_updates=2))
    trainer = make_trainer(tmp_path, "counted", max_epochs=None)
    trainer.fit(LanguageModelTask(model, training=counted), DataLoader(TensorDataset(rows), 4))
    assert trainer.global_step == 5


@pytest.mark.slow
def test_padded_documents_of_any_loader_train_a_classifier(tmp_path: Path, command_here) -> None:
    info = DocumentInfo(class_names=["few", "many"], multi_label=False, window=12, **BYTES)
    model = TextClassifier(vocab_size=257, num_classes=2, d_model=16, depth=1, mixer="linear_attention")
    module = DocumentTask(model, info=info, training=Training(learning_rate=2e-2))
    rows = []
    for i in range(16):
        text = torch.tensor([256, *(b"abcdef" if i % 2 else b"uvwxyz"), 0, 0])
        rows.append({"input_ids": text, "attention_mask": (torch.arange(9) < 7).int(), "labels": i % 2})
    trainer = make_trainer(tmp_path, "documents", max_epochs=4)
    trainer.fit(module, DataLoader(rows, 4), DataLoader(rows, 4))
    assert trainer.callback_metrics["val/accuracy"] == 1
    (tmp_path / "some.jsonl").write_text('{"text": "abcdef"}\n{"text": "uvwxyz"}\n')
    done = command_here(tmp_path, "predict", "checkpoint=documents.ckpt", "input=some.jsonl", "output=p.csv")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "p.csv").open() as file:
        assert [row["class_1"] for row in csv.DictReader(file)] == ["many", "few"]
    loaded = DocumentTask.load_from_checkpoint(tmp_path / "documents.ckpt").eval()
    unlabelled = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows]
    texts = torch.stack([row["input_ids"][:7] for row in rows])
    for data in (rows, unlabelled, texts):
        found = torch.cat(make_trainer(tmp_path, "documents").predict(loaded, DataLoader(data, 4)))  # type: ignore[arg-type]
        torch.testing.assert_close(found.sum(dim=1), torch.ones(16))
        assert found.argmax(dim=1).tolist() == [i % 2 for i in range(16)]
    # Padding has no part in the result.
    whole, padded = ({"input_ids": rows[0]["input_ids"][None, :n], "labels": torch.tensor([0])} for n in (7, 9))
    padded["attention_mask"] = rows[0]["attention_mask"][None]
    torch.testing.assert_close(loaded(loaded.read_batch(whole)[0]), loaded(loaded.read_batch(padded)[0]))
    left = {**padded, **{name: padded[name].roll(2, 1) for name in ("input_ids", "attention_mask")}}
    torch.testing.assert_close(loaded(loaded.read_batch(whole)[0]), loaded(loaded.read_batch(left)[0]))
    for label in (0.9, -100):
        with pytest.raises(ValueError, match="label"):
            loaded.read_batch((padded["input_ids"], torch.tensor([label])))


def make_language_task() -> tuple[LanguageModelTask, torch.Tensor]:
    torch.manual_seed(0)
    model = TokenBackbone(vocab_size=20, d_model=16, depth=1, mixer="linear_attention")
    return LanguageModelTask(model, training=Training(learning_rate=1e-3)), torch.randint(0, 20, (16, 9))


def test_lightnings_tuner_finds_and_sets_the_learning_rate(tmp_path: Path) -> None:
    module, rows = make_language_task()
    loader: Any = DataLoader(rows, 4)  # type: ignore[arg-type]
    trainer = make_trainer(tmp_path, "found", max_epochs=20, default_root_dir=tmp_path)
    found = Tuner(trainer).lr_find(module, loader, num_training=40, min_lr=1e-5, early_stop_threshold=None)
    assert found is not None
    assert module.learning_rate == found.suggestion() != 1e-3
    trainer = make_trainer(tmp_path, "found", max_steps=1)
    trainer.fit(module, loader)
    assert trainer.optimizers[0].param_groups[0]["initial_lr"] == pytest.approx(found.suggestion())


def test_a_model_of_the_users(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 2))

    _, _, rows = make_images()
    module = ImageClassifier(build(), num_classes=2, training=Training(learning_rate=1e-2))
    trainer = make_trainer(tmp_path, "net")
    trainer.fit(module, DataLoader(rows, 8))  # type: ignore[arg-type]
    assert trainer.global_step == 4
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "net.ckpt", backbone=build())
    assert loaded.num_classes == 2
    images = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(loaded.eval()(images), module.eval()(images))
