"""The probe task: its models, loss and accuracy on the questions of sequences, and its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from longseq.backbones.autoencoder import SequenceAutoencoder
from longseq.tasks.data.generators import IGNORED
from longseq.tasks.probe.data import ProbeInfo, ProbeTargets
from longseq.tasks.report import Report
from longseq.tasks.training.metrics import MeanLoss, MeanScore
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import Training
from longseq.tasks.training.token_model import TokenModel, build_token_model

Batch = tuple[Tensor, ProbeTargets]


class ProbeModel(TokenModel):
    """Builds the token model that `config.model` describes; for compression, inside an autoencoder."""

    def build(self, config: Mapping[str, Any], info: ProbeInfo) -> nn.Module:
        """The model of a configuration; an option that is null has the model's default."""
        backbone = build_token_model(config, vocab_size=info.vocab_size, longest=info.longest)
        return SequenceAutoencoder(backbone) if info.rebuild else backbone


class ProbeReport(Report):
    """Names the metrics of the closing table."""

    headline = ("accuracy", "sequence_accuracy", "loss")


class ProbeTask(TrainedModule):
    """Trains and evaluates a token model on the questions of a probe.

    Logs `train/{loss,lr}` and `{val,test}/{loss,accuracy,sequence_accuracy}`: the share of right answers, and the share
    of sequences without a wrong answer, among sequences with a question. With several slices, it also logs
    `accuracy_SLICE` for each. Where the generator allows several answers, each of them is right. The head reads only
    the positions of questions, since large vocabularies take memory. `slices` names the slices of val and test.
    """

    def __init__(
        self, backbone: nn.Module, *, slices: Mapping[str, Sequence[str]], training: Training | None = None
    ) -> None:
        super().__init__(backbone, training)
        # Each slice has its own shape, and one graph per slice is faster than a dynamic one.
        self._train_forward = self.compiled(self.forward, dynamic=False)
        self.slices = {stage: list(names) for stage, names in slices.items()}
        self.val_metrics = _metrics(self.slices["val"])
        self.test_metrics = _metrics(self.slices["test"])

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], backbone: nn.Module, info: ProbeInfo, training: Training | None
    ) -> ProbeTask:
        return cls(backbone, slices=info.slices, training=training)

    @classmethod
    def arguments_for(cls, backbone: nn.Module, data: Mapping[str, Any]) -> dict[str, Any]:
        return {"slices": ProbeInfo.from_dict(data).slices}

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Scores `[B, A, vocabulary]` at `places [B, A]` of `tokens [B, T]`."""
        features, _ = self.backbone.forward_features(tokens, output_final_state=False)  # type: ignore[operator]
        index = places.unsqueeze(-1).expand(-1, -1, features.shape[-1])
        return self.backbone.forward_head(features.gather(1, index))  # type: ignore[operator]

    def preview(self, batch: Batch) -> Tensor:
        return self(batch[0], batch[1].places)  # type: ignore[no-any-return]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seed_batch(batch_idx)
        tokens, targets = batch
        return self.mean_of_update(_summed_loss(self._train_forward(tokens, targets.places), targets.answers))

    def count_targets(self, batch: Batch) -> Tensor:
        """The number of questions in a batch, `[]`."""
        return (batch[1].answers != IGNORED).sum()

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """The model's answers `[B, A]`, IGNORED after the last question of a sequence."""
        tokens, targets = batch
        if not len(tokens):
            return targets.answers
        return self(tokens, targets.places).argmax(dim=-1).masked_fill(targets.answers == IGNORED, IGNORED)

    def evaluate_batch(self, batch: Batch, metrics: Any, stage: str) -> None:
        """Update and log the metrics of a stage; a process's part of a distributed batch may be empty."""
        tokens, targets = batch
        name = f"accuracy_{self.slices[stage][targets.slice_index]}"
        names = ["loss", "accuracy", "sequence_accuracy"] + [name] * (name in metrics)
        if len(tokens) > 0:
            scores = self(tokens, targets.places).float()
            counted = targets.answers != IGNORED
            right = is_right(scores.argmax(dim=-1), targets.answers, targets.allowed)
            questions, asked = counted.sum(), counted.any(dim=1)
            some = questions.clamp(min=1)  # a batch may have no question, and then no weight
            share = right.sum() / some
            metrics["loss"].update(_summed_loss(scores, targets.answers) / some, weight=questions)
            without_error = ((right | ~counted).all(dim=1) & asked).sum()
            metrics["sequence_accuracy"].update(without_error / asked.sum().clamp(min=1), weight=asked.sum())
            for key in ("accuracy", *names[3:]):
                metrics[key].update(share, weight=questions)
        for key in names:
            self.log(f"{stage}/{key}", metrics[key], on_step=False, on_epoch=True)


def is_right(given: Tensor, answers: Tensor, allowed: Tensor | None) -> Tensor:
    """Which answers `given [B, A]` are right, bool: the label, or each one whose bit is set in `allowed [B, A]`."""
    if allowed is None:
        return given == answers
    # A shift by 63 bits or more is undefined; a token of 62 or more is never an answer.
    bit = (allowed >> given.clamp(max=62)) & 1
    return (bit == 1) & (given < 62) & (answers != IGNORED)


def _summed_loss(scores: Tensor, answers: Tensor) -> Tensor:
    rows = scores.flatten(0, 1).float()
    return nn.functional.cross_entropy(rows, answers.flatten(), ignore_index=IGNORED, reduction="sum")


def _metrics(slices: Sequence[str]) -> nn.ModuleDict:
    names = ["loss", "accuracy", "sequence_accuracy"]
    if len(slices) > 1:
        names += [f"accuracy_{name}" for name in slices]
    return nn.ModuleDict({name: MeanLoss() if name == "loss" else MeanScore() for name in names})
