"""The task of a document classifier on batches in memory: what an update minimises, and what a test measures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.nn import functional
from torch.utils.data import DataLoader

from longseq.backbones.classifier import TextClassifier
from longseq.tasks.data.loader import find_place
from longseq.tasks.document.batch import IGNORED, DocumentInputs
from longseq.tasks.document.config import DocumentInfo
from longseq.tasks.document.module import DocumentTask
from longseq.tasks.training.recipe import Training

V, CLASSES, PLACES = 11, 3, 5
DOCUMENTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 1], [2], [3, 3, 4, 6, 7, 8, 9], [5, 5]]
CHOSEN = [0, 2, 1, 1, 0, 2]
LABELS = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1], [1, 0, 0]])
WEIGHTS = [0.5, 1.0, 2.0]


def make_info(multi_label=False, weights=None):
    return DocumentInfo(
        class_names=["a", "b", "c"],
        multi_label=multi_label,
        vocab_size=V,
        separator=None,
        tokenizer=None,
        window=7,
        class_weights=weights,
    )


def make_model():
    torch.manual_seed(0)
    model = TextClassifier(num_classes=CLASSES, vocab_size=V, d_model=16, depth=1, mixer="linear_attention").double()
    with torch.no_grad():
        model.body.embedding.weight.mul_(30)  # so that tokens, and not rounding, decide the output
        model.head.weight.mul_(30)
    return model


def make_batch(numbers, multi_label=False):
    """A batch of some documents, with an empty place and a sequence of padding."""
    documents, empty = [DOCUMENTS[number] for number in numbers], PLACES - len(numbers)
    lengths = torch.tensor([len(one) for one in documents] + [0] * empty)
    row = [token for one in documents for token in one] + [10] * 4
    borders = [0, *lengths[: len(numbers)].cumsum(0).tolist()] + [len(row)] * empty
    tokens, cu_seqlens = torch.tensor([row]), torch.tensor(borders, dtype=torch.int32)
    places = torch.tensor([*numbers, *[-1] * empty])
    whole = torch.where(places >= 0, 600 * places + 1, 0)
    inputs = DocumentInputs(tokens, cu_seqlens, 8, lengths, whole, places, len(numbers), int(lengths.sum()))
    if multi_label:
        targets = torch.cat([LABELS[list(numbers)], torch.zeros(empty, CLASSES)])
    else:
        targets = torch.tensor([*(CHOSEN[number] for number in numbers), *[IGNORED] * empty])
    return inputs, targets


class Memory(LightningDataModule):
    """One update of all documents, divided among processes and accumulated batches; a test of all documents."""

    tokens_per_epoch = None

    def __init__(self, parts, **options):
        super().__init__()
        self.parts, self.options = parts, options
        self.batches_per_epoch = len(parts)

    def train_dataloader(self):
        rank, world_size, _ = find_place(self.trainer)
        dealt = [make_batch(numbers, **self.options) for numbers in self.parts[rank::world_size]]
        return DataLoader(dealt, batch_size=None, collate_fn=lambda batch: batch)

    val_dataloader = test_dataloader = train_dataloader


def fit(parts, info, *, smoothing=0.0, accumulate=1, **options):
    """The weights after one update by gradient descent on all documents."""
    descent = Training(
        learning_rate=1.0,
        optimizer=lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr),
        schedule=lambda *_, **__: (None, 0),
    )
    module = DocumentTask(make_model(), info=info, label_smoothing=smoothing, training=descent)
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        limit_val_batches=0,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        **silent,
        **options,
    )
    trainer.fit(module, datamodule=Memory(parts, multi_label=info.multi_label))
    return module.backbone.state_dict()


def expected(info, smoothing=0.0):
    """The weights after one update of the mean over all documents, each by itself."""
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = []
    for number, document in enumerate(DOCUMENTS):
        (logits,) = model(torch.tensor([document]))
        if info.multi_label:
            wanted = LABELS[number].double() * (1 - smoothing) + smoothing / 2
            each = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
            weights = torch.tensor(info.class_weights or [1.0] * 3) ** LABELS[number]
            losses.append((each * weights).mean())
        else:
            target = torch.tensor(CHOSEN[number])
            weight = (info.class_weights or [1.0] * 3)[CHOSEN[number]]
            losses.append(weight * functional.cross_entropy(logits, target, label_smoothing=smoothing))
    torch.stack(losses).mean().backward()
    return {name: before[name] - value.grad for name, value in model.named_parameters()}


def assert_same(found, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("multi_label", [False, True])
def test_an_update_is_of_the_mean_over_its_documents(multi_label):
    info = make_info(multi_label, WEIGHTS)
    wanted = expected(info, 0.1)
    assert_same(fit([[0, 1, 2], [3, 4, 5]], info, smoothing=0.1, accumulate=2), wanted)
    assert_same(fit([[0, 1, 2, 3], [4, 5]], info, smoothing=0.1, accumulate=2), wanted)
    in_segments = replace(info, segment=2)
    assert_same(fit([[0, 1, 2], [3, 4, 5]], in_segments, smoothing=0.1, accumulate=2), wanted)


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_test_measures_each_document_once(multi_label):
    module = DocumentTask(make_model(), info=make_info(multi_label))
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", **silent)
    data = Memory([[0, 1, 2, 3], [], [4, 5]], multi_label=multi_label)
    (found,) = trainer.test(module, datamodule=data, verbose=False)
    logits = torch.cat([module.backbone(torch.tensor([document])) for document in DOCUMENTS]).detach()
    if multi_label:
        right = ((logits > 0) == LABELS.bool()).all(dim=1)
        loss = functional.binary_cross_entropy_with_logits(logits, LABELS.double())
    else:
        right = logits.argmax(dim=1) == torch.tensor(CHOSEN)
        loss = functional.cross_entropy(logits, torch.tensor(CHOSEN))
    assert found["test/accuracy"] == pytest.approx(float(right.float().mean()))
    assert found["test/loss"] == pytest.approx(float(loss), rel=1e-6)
    # lengths before truncation are 1, 601, 1201, 1801, 2401 and 3001
    assert module.length_quartiles == [601, 1201, 1801]
    assert module.documents_by_length == {"q1": 2, "q2": 1, "q3": 1, "q4": 2}
    assert found["test/accuracy_q1"] == pytest.approx(float(right[:2].float().mean()))
    assert found["test/accuracy_q4"] == pytest.approx(float(right[4:].float().mean()))
    counts = module.confusion_matrix
    assert counts.sum() == len(DOCUMENTS) * (CLASSES if multi_label else 1)
    if not multi_label:
        assert counts.diagonal().sum() == right.sum()
