"""The task of a language model on batches in memory: what an update minimises, documents apart, streams, metrics."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from loop_mixers import Leaking, Mean
from representatives import REPRESENTATIVES
from torch.nn import functional
from torch.utils.data import DataLoader

from longseq import mixers
from longseq.backbones.tokens import TokenBackbone
from longseq.mixers.contract import ContractError
from longseq.tasks.lm.module import LanguageModelTask
from longseq.tasks.text.tokenizer import TextInfo
from longseq.tasks.text.windows import IGNORED, Carry, TokenInputs
from longseq.tasks.training.recipe import Training

V = 11
INFO = TextInfo(vocab_size=V, separator=10, window=8, tokenizer={"kind": "bytes"})
MIXERS = [*REPRESENTATIVES, "deltanet+attention"]


def make(mixer="linear_attention", depth=1, **options):
    torch.manual_seed(0)
    options = {"vocab_size": V, "d_model": 16, "depth": depth, "mixer": mixer, **options}
    return TokenBackbone(**options).double()


def packed(documents, length=None, spare=2):
    """Documents in one row, behind them separators without targets up to `length`, and `spare` empty sequences."""
    length = length or sum(map(len, documents))
    inputs, targets, borders = [], [], [0]
    for document in documents:
        inputs += [INFO.separator, *document[:-1]]
        targets += document
        borders.append(len(inputs))
    rest = length - len(inputs)
    inputs, targets = inputs + [INFO.separator] * rest, targets + [IGNORED] * rest
    borders += [length] * (spare + bool(rest))
    units = len(targets) - rest
    row = TokenInputs(torch.tensor([inputs]), torch.tensor(borders, dtype=torch.int32), length, units, 2 * units)
    return row, torch.tensor([targets])


class Memory(LightningDataModule):
    """Batches of a list, in the Trainer's words."""

    tokens_per_epoch = None

    def __init__(self, batches):
        super().__init__()
        self.batches, self.batches_per_epoch = batches, len(batches)

    def train_dataloader(self):
        # A list would be one of loaders to Lightning.
        return DataLoader(self.batches, batch_size=None, collate_fn=lambda batch: batch)

    val_dataloader = test_dataloader = train_dataloader


def trainer(tmp_path, **options):
    fixed = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    return Trainer(enable_model_summary=False, default_root_dir=tmp_path, **{**fixed, **options})


def descend(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)


DESCENT = Training(learning_rate=1.0, optimizer=descend, schedule=lambda *_, **__: (None, 0))


def train(tmp_path, batches, **options):
    """The weights after one update by gradient descent."""
    module = LanguageModelTask(make(), info=INFO, training=DESCENT)
    trainer(tmp_path, max_steps=1, **options).fit(module, Memory(batches))
    return module.backbone.state_dict()


def test_an_update_is_of_the_mean_over_all_of_its_targets(tmp_path):
    long, short = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [3, 10]
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = []
    for document in (long, short):
        (inputs, targets) = packed([document])
        logits, _ = model(inputs.tokens)
        losses.append(functional.cross_entropy(logits[0], targets[0], reduction="sum"))
    (sum(losses) / 12).backward()
    wanted = {name: before[name] - value.grad for name, value in model.named_parameters()}
    parts = [packed([long], 12), packed([short], 12)]
    for found in (train(tmp_path, [packed([long, short])]), train(tmp_path, parts, accumulate_grad_batches=2)):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.usefixtures("own_mixers")
@pytest.mark.parametrize("stage", ["train", "val"])
def test_a_plug_in_whose_documents_see_each_other_stops_the_run(stage, tmp_path):
    mixers.register("leaking")(Leaking)
    mixers.register("mean")(Mean)
    batches = Memory([packed([[1, 2, 3, 10], [4, 5, 10]])])
    rows = Memory([(torch.tensor([[1, 2, 3, 10]]), torch.tensor([[2, 3, 10, 4]]))])

    def run(mixer, batches):
        here, module = trainer(tmp_path, max_steps=1), LanguageModelTask(make(mixer), info=INFO, training=DESCENT)
        return here.fit(module, batches) if stage == "train" else here.validate(module, batches, verbose=False)

    with pytest.raises(ContractError, match="packed sequence 0"):
        run("leaking", batches)
    run("leaking", rows)
    run("mean", batches)


STREAMING = [name for name in REPRESENTATIVES if not mixers.get(name).growing_state]


@pytest.mark.parametrize("mixer", STREAMING)
def test_streams_go_on_where_the_last_batch_ended(mixer):
    model = make(mixer).eval()
    module = LanguageModelTask(model, info=INFO)
    tokens = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(0))
    whole, _ = model.forward_features(tokens)
    fresh, rows = torch.tensor([False, False]), torch.arange(2)
    parts = [
        module._features(TokenInputs(part, None, 6, 12, 12, Carry(rows, rows, fresh)), "train")
        for part in tokens.split(6, dim=1)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-12, atol=1e-12)
    again = module._features(TokenInputs(tokens[:, :6], None, 6, 12, 12, Carry(rows, rows, ~fresh)), "train")
    torch.testing.assert_close(again, whole[:, :6], msg="a row that is fresh begins anew")


def test_packed_streams_go_on_at_their_rows():
    """Two rows of four tokens in one packed row: the second row ends a document and begins another."""
    model = make("deltanet").eval()
    module = LanguageModelTask(model, info=INFO)
    first, second, third = ([1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5], [4, 3, 2])
    alone = [model.forward_features(torch.tensor([text]))[0][0] for text in (first, second, third)]
    read = [(first[:4] + second[:4], [0, 4, 8, 8]), (first[4:] + second[4:] + third, [0, 4, 5, 8])]
    carries = [
        Carry(torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([True, True])),
        Carry(torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([False, False])),
    ]
    found, places = [], []
    for (tokens, borders), carry in zip(read, carries, strict=True):
        inputs = TokenInputs(torch.tensor([tokens]), torch.tensor(borders, dtype=torch.int32), 4, 8, 8, carry)
        found.append(module._features(inputs, "train")[0])
        places.append(module._places.count(inputs)[0].tolist())
    torch.testing.assert_close(found[0], torch.cat([alone[0][:4], alone[1][:4]]))
    torch.testing.assert_close(found[1], torch.cat([alone[0][4:], alone[1][4:], alone[2]]))
    assert places == [[0, 1, 2, 3, 0, 1, 2, 3], [4, 5, 6, 7, 4, 0, 1, 2]]


def test_metrics_are_sums_over_all_batches(tmp_path):
    model = make()
    batches = [packed([[1, 2, 3, 10], [4, 10]], 8), packed([[5, 6, 7, 8, 9, 1, 10]], 8)]
    module = LanguageModelTask(model, info=INFO)
    (measured,) = trainer(tmp_path).test(module, Memory(batches), verbose=False)
    losses, places = [], []
    for document in ([1, 2, 3, 10], [4, 10], [5, 6, 7, 8, 9, 1, 10]):
        inputs, targets = packed([document])
        losses.append(functional.cross_entropy(model(inputs.tokens)[0][0], targets[0], reduction="none").detach())
        places.append(torch.arange(len(document)))
    each, place = torch.cat(losses), torch.cat(places)
    assert measured["test/loss"] == pytest.approx(each.mean().item())
    assert measured["test/perplexity"] == pytest.approx(each.mean().exp().item())
    assert measured["test/bits_per_byte"] == pytest.approx(each.sum().item() / 26 / math.log(2))
    assert [(row["from"], row["to"], row["tokens"]) for row in module.by_position] == [
        (0, 0, 3),
        (1, 1, 3),
        (2, 3, 4),
        (4, 7, 3),
    ]
    assert module.by_position[2]["perplexity"] == pytest.approx(each[(place == 2) | (place == 3)].mean().exp().item())


TEXTS = ([3, 4, 5, 6, 7, 8, 9], [1, 2, 6], [5])  # the last one predicts nothing


def pad(side):
    """A batch as a collator of transformers makes it."""
    tokens, labels, mask = torch.zeros(3, 9, dtype=torch.long), torch.full((3, 9), IGNORED), torch.zeros(3, 9).long()
    for row, text in enumerate(TEXTS):
        start = {"left": 9 - len(text), "right": 0, "both": 1}[side]
        place = slice(start, start + len(text))
        tokens[row, place] = labels[row, place] = torch.tensor(text)
        mask[row, place] = 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_on_any_side_changes_neither_the_update_nor_the_loss(mixer, tmp_path):
    def weights_and_losses(batches, **options):
        module = LanguageModelTask(make(mixer, depth=2 if "+" in mixer else 1), info=INFO, training=DESCENT)
        measured = trainer(tmp_path).validate(module, Memory(batches), verbose=False)[0]["val/loss"]
        found = module.by_position
        trainer(tmp_path, max_steps=1, **options).fit(module, Memory(batches))
        return module.backbone.state_dict(), measured, found

    alone = [torch.tensor([text]) for text in TEXTS[:2]]
    weights, loss, by_position = weights_and_losses(alone, accumulate_grad_batches=len(alone))
    for side in ("left", "right", "both"):
        batch = pad(side)
        if side == "right":  # the tokens themselves are the labels
            del batch["labels"]
        found = weights_and_losses([batch])
        for name, value in weights.items():
            torch.testing.assert_close(found[0][name], value, msg=lambda text, name=name: f"{name}: {text}")
        assert found[1] == pytest.approx(loss, rel=1e-6)
        assert [row["tokens"] for row in found[2]] == [row["tokens"] for row in by_position]
        for one, other in zip(found[2], by_position, strict=True):
            assert one["perplexity"] == pytest.approx(other["perplexity"], rel=1e-6)
