"""Lightning's own Trainer on the loaders of our data modules, with the data module and without it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from documents import make_rows, write_jsonl
from documents import open_data as open_documents
from image_data import image_data
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torchvision.transforms.functional import pil_to_tensor

import longseq
from longseq.backbones.classifier import TextClassifier
from longseq.backbones.tokens import TokenBackbone
from longseq.tasks import ImageClassifier
from longseq.tasks.data.loader import BatchLoader, TrainingLoader
from longseq.tasks.document.module import DocumentTask
from longseq.tasks.image.transforms import normalize
from longseq.tasks.lm.config import TextDataKeys
from longseq.tasks.lm.data import LanguageModelData
from longseq.tasks.lm.module import LanguageModelTask
from longseq.tasks.probe import generators
from longseq.tasks.probe.config import ProbeDataKeys
from longseq.tasks.probe.data import ProbeDataModule
from longseq.tasks.probe.generators import IGNORED, Samples
from longseq.tasks.probe.module import ProbeTask
from longseq.tasks.training.recipe import Training

TRAINING = Training(learning_rate=1e-3)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def trainer(**options: Any) -> Trainer:
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(accelerator="cpu", max_epochs=2, **silent, **options)


def open_images(folder: Path) -> tuple[Any, Any]:
    keys = {"img_size": 8, "in_chans": 1, "num_workers": 0, "mean": [0.2], "std": [0.4]}
    data = image_data(name="digits", source="digits", batch_size=64, seed=5, **keys)
    options = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10, "embed_dim": 16, "depth": 1}
    model = timm.create_model("longseq_tiny_patch16_224", mixer="linear_attention", **options)
    return ImageClassifier(model, num_classes=10, training=TRAINING), data


def open_texts(folder: Path) -> tuple[Any, Any]:
    write_jsonl(folder / "rows.jsonl", make_rows())
    data = open_documents(folder, root=str(folder / "rows.jsonl"))
    model = TextClassifier(num_classes=3, vocab_size=data.info.vocab_size, d_model=16, depth=1, mixer="deltanet")
    return DocumentTask(model, info=data.info, training=TRAINING), data


def open_corpus(folder: Path, **more: Any) -> tuple[Any, Any]:
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in make_rows()))
    keys = {"source": "files", "root": str(folder / "text.jsonl"), "cache": str(folder / "cache"), "window": 16}
    keys |= more
    data = LanguageModelData(TextDataKeys(name="made", validation=0.2, test=0.2, **keys), batch_size=8)
    data.setup()
    model = TokenBackbone(vocab_size=data.info.vocab_size, d_model=16, depth=1, mixer="deltanet")
    return LanguageModelTask(model, info=data.info, training=TRAINING), data


def open_probe(folder: Path) -> tuple[Any, Any]:
    options = {"vocab_size": 32, "tokens": 16, "pairs": 2}
    counts = {"train": [{"samples": 64}], "validation": [{"samples": 32}], "test": [{"samples": 32}]}
    data = ProbeDataModule(ProbeDataKeys(name="mqar", generator="mqar", options=options, **counts), batch_size=16)
    data.setup()
    model = TokenBackbone(vocab_size=32, d_model=16, depth=1, mixer="deltanet")
    return ProbeTask(model, slices=data.info.slices, training=TRAINING), data


TASKS = [open_images, open_texts, open_corpus, open_probe]


class Noted(Callback):
    """The first inputs of each training batch, by epoch."""

    def __init__(self) -> None:
        self.batches: dict[int, list[torch.Tensor]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        inputs = getattr(batch[0], "tokens", batch[0])
        self.batches.setdefault(trainer.current_epoch, []).append(inputs.detach().clone())


def test_a_checkpoint_of_a_compiled_model_is_that_of_the_model(tmp_path):
    module, data = open_images(tmp_path)
    model = module.backbone
    module.backbone = torch.compile(model, backend="eager")
    fitted = trainer(limit_train_batches=1, limit_val_batches=0)
    fitted.fit(module, datamodule=data)
    fitted.save_checkpoint(tmp_path / "compiled.ckpt")
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(longseq.from_pretrained(tmp_path / "compiled.ckpt")(images), model.eval()(images))


@pytest.mark.parametrize("opened", TASKS)
def test_loaders_measure_train_and_predict_without_their_data_module(opened, tmp_path):
    module, data = opened(tmp_path)
    data.setup()
    (whole,) = trainer().validate(module, datamodule=data, verbose=False)
    (alone,) = trainer().validate(module, data.val_dataloader(), verbose=False)
    assert alone == pytest.approx(whole)
    given = trainer().predict(module, datamodule=data)
    assert len(given) == len(data.predict_dataloader())
    torch.testing.assert_close(given, trainer().predict(module, data.predict_dataloader()))
    assert len(trainer().predict(module, data.val_dataloader())) == len(data.val_dataloader())
    noted, repeated = Noted(), Noted()
    trainer(callbacks=[noted]).fit(module, data.train_dataloader(), data.val_dataloader())
    assert not torch.equal(noted.batches[0][0], noted.batches[1][0])
    trainer(overfit_batches=2, callbacks=[repeated]).fit(module, datamodule=data)
    first, second = repeated.batches[0], repeated.batches[1]
    assert len(first) == len(second) <= 2
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("opened", TASKS)
def test_a_worker_that_is_a_new_process_reads_the_same(opened, tmp_path):
    """As in Python 3.14, on macOS and on Windows: what it reads from reaches it pickled."""
    _, data = opened(tmp_path)
    data.setup()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        read = [pickle.loads(pickle.dumps(loader.dataset))[index] for index in list(loader.sampler)[:2]]
        expected = [loader.dataset[index] for index in list(loader.sampler)[:2]]
        torch.testing.assert_close(tree_leaves(read), tree_leaves(expected))


def test_predictions_of_a_probe_are_its_answers(tmp_path):
    module, data = open_probe(tmp_path)
    (measured,) = trainer().test(module, datamodule=data, verbose=False)
    given = torch.cat(trainer().predict(module, datamodule=data))
    answers = torch.cat([one.answers for one in data.slices["test"]])
    counted = answers != IGNORED
    assert torch.equal(given != IGNORED, counted)
    assert ((given == answers) & counted).sum() / counted.sum() == pytest.approx(measured["test/accuracy"])


def test_sequences_without_a_question_do_not_count(tmp_path, monkeypatch):
    def own(random, samples, *, vocab_size=8, tokens=6, asked=0.3):
        drawn = random.integers(0, vocab_size, (samples, tokens))
        return Samples(drawn, np.where(random.random((samples, 1)) < asked, drawn, IGNORED))

    monkeypatch.setitem(generators.GENERATORS, "own", own)
    counts = {"train": [{"samples": 64}], "validation": [{"samples": 20}], "test": [{"samples": 20}]}
    keys = ProbeDataKeys(name="own", generator="own", options={}, eval_batch_size=2, **counts)
    data = ProbeDataModule(keys, batch_size=16)
    data.setup()
    torch.manual_seed(0)
    model = TokenBackbone(vocab_size=8, d_model=16, depth=1, mixer="deltanet")
    module = ProbeTask(model, slices=data.info.slices, training=TRAINING)
    (measured,) = trainer().test(module, datamodule=data, verbose=False)
    (one,) = data.slices["test"]
    answers = one.answers.long()
    counted = answers != IGNORED
    assert not counted.any(dim=1).unfold(0, 2, 2).any(dim=1).all(), "no batch is without a question"
    with torch.no_grad():
        scores = module.eval()(one.tokens.long(), one.places.long())
    right = scores.argmax(-1) == answers
    asked = counted.any(dim=1)
    assert measured["test/accuracy"] == pytest.approx(float(right[counted].float().mean()))
    assert measured["test/loss"] == pytest.approx(float(functional.cross_entropy(scores[counted], answers[counted])))
    expected = (right | ~counted).all(dim=1)[asked].float().mean()
    assert measured["test/sequence_accuracy"] == pytest.approx(float(expected))


def test_predictions_of_images_are_in_the_order_of_the_split(tmp_path):
    module, data = open_images(tmp_path)
    found = torch.cat(trainer().predict(module, datamodule=data))
    split = data.splits["test"]
    images = torch.stack([pil_to_tensor(split.source.read(index)[0]) for index in split.indices])
    with torch.no_grad():
        torch.testing.assert_close(found, module.eval()(normalize(images, data.info)), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reset_state", [True, False])
def test_predictions_of_texts_are_in_the_order_of_the_split(tmp_path, reset_state):
    module, data = open_corpus(tmp_path, reset_state=reset_state)
    (alone,) = [store.splits["test"] for store in data._stores]
    targets = np.roll(alone.tokens.astype(np.int64), -1)
    read = [(inputs.tokens.flatten(), targets.flatten()) for inputs, targets in data.predict_dataloader()]
    asked = torch.cat([targets for _, targets in read])
    assert len(read) > 3
    assert torch.equal(asked[: len(targets)], torch.from_numpy(targets))
    assert (asked[len(targets) :] == IGNORED).all()
    given = torch.cat([found.flatten() for found in trainer().predict(module, datamodule=data)])
    assert (given[: len(targets)] < 0).all()
    assert not given[len(targets) :].any()


@pytest.mark.slow
@pytest.mark.parametrize("test", ["test.jsonl", 0.4])
def test_predictions_of_documents_are_in_the_order_of_the_split(tmp_path, test):
    write_jsonl(tmp_path / "rows.jsonl", make_rows())
    rows = make_rows(30, seed=1)
    write_jsonl(tmp_path / "test.jsonl", [*rows[:5], "no document", *rows[5:]])
    data = open_documents(tmp_path, root=str(tmp_path), train="rows.jsonl", test=test, batch_size=600)
    torch.manual_seed(0)
    model = TextClassifier(num_classes=3, vocab_size=data.info.vocab_size, d_model=16, depth=1, mixer="deltanet")
    module = DocumentTask(model, info=data.info, training=TRAINING)
    given = trainer().predict(module, datamodule=data)
    assert len(given) > 3
    split = data.splits["test"]
    with torch.no_grad():
        alone = [model.eval()(torch.from_numpy(split.read(n).astype(np.int64))[None]) for n in range(split.documents)]
    torch.testing.assert_close(torch.cat(given), torch.cat(alone).softmax(dim=1), atol=1e-5, rtol=1e-4)
    if test == "test.jsonl":  # those of the file, without the line that cannot be read
        texts = [data.info.make_tokenizer().decode(split.read(number).tolist()) for number in range(30)]
        assert texts == [row["text"] for row in rows]
    # The loaders that measure have another order, which their batches tell.
    numbers = torch.cat([inputs.numbers[inputs.numbers >= 0] for inputs, _ in data.test_dataloader()])
    measured = torch.cat(trainer().predict(module, data.test_dataloader()))
    assert not torch.equal(numbers, numbers.sort().values)
    torch.testing.assert_close(measured, torch.cat(given)[numbers], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("opened", TASKS)
def test_a_loader_for_one_process_is_refused_in_a_run_of_several(opened, tmp_path):
    _, data = opened(tmp_path)
    data.setup()
    told = "a loader for one process in a run of 2"
    for loader in (data.val_dataloader(), data.predict_dataloader(), data.train_dataloader()):
        makes = TrainingLoader if isinstance(loader, TrainingLoader) else BatchLoader
        for wrapper in (DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper):
            divided = wrapper(loader.sampler, num_replicas=2, rank=1)
            with pytest.raises(ValueError, match=told):
                makes(loader.dataset, loader.own_sampler, sampler=divided)
