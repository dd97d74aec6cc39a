"""The Lightning module of language models, which predict the next token at each position, and the report of a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.sharding import has_shards
from longseq.kernels.packing import Packing
from longseq.tasks.data.loader import find_entry, read_mask
from longseq.tasks.lm.likelihood import LossByPosition, TokenLoss, to_bits
from longseq.tasks.lm.model import CarriedPositions, CarriedState
from longseq.tasks.report import Report
from longseq.tasks.text.tokenizer import TextInfo
from longseq.tasks.text.windows import IGNORED, TokenBatch, TokenInputs
from longseq.tasks.training.callbacks.kernels import evaluating
from longseq.tasks.training.module import TrainedModule
from longseq.tasks.training.recipe import Training
from longseq.tasks.training.token_model import PluginMixers

_CARRIED = "carried_state"  # the state of streams in a checkpoint, one entry for each process
_SAMPLE = 400  # tokens of the sample that a run prints at its end


class LanguageModelTask(TrainedModule):
    """Trains and evaluates a token model on each next token of packed documents, windows or streams.

    Logs `train/{loss,lr}` and `{val,test}/{loss,perplexity,bits_per_byte}`. An update minimises `train/loss`, the mean
    over all of its targets, with the penalty on the normalisers of the scores (PaLM, Chowdhery et al., 2022, section 5)
    of weight `z_loss`. After an evaluation `by_position` has the perplexity by position (see `LossByPosition`).

    Other loaders' batches are rows of tokens (see `read_batch`), which have no bits per byte. Without `info`, and its
    tokenizer, the commands of longseq cannot use the checkpoint for text.
    """

    kept_options = ("z_loss",)

    def __init__(
        self,
        backbone: nn.Module,
        *,
        z_loss: float = 0.0,
        info: TextInfo | None = None,
        training: Training | None = None,
    ) -> None:
        super().__init__(backbone, training)
        self.z_loss = z_loss
        self.info = info
        self._train_forward = self.compiled(self._read, dynamic=False)
        self._plugin_mixers = PluginMixers()
        self._carried: dict[str, CarriedState] = {}  # of train and evaluation
        # The state of streams after the latest update; an interrupted run can be inside the next one.
        self._at_update: list[Tensor] = []
        self.val_metrics, self.test_metrics = (
            nn.ModuleDict(
                {"loss": TokenLoss(), "perplexity": TokenLoss(torch.exp), "bits_per_byte": TokenLoss(to_bits)}
            )
            for _ in range(2)
        )
        self._positions, self._places = LossByPosition(), CarriedPositions()
        self.by_position: list[dict[str, Any]] = []

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], backbone: nn.Module, info: TextInfo, training: Training | None
    ) -> LanguageModelTask:
        loss = config["recipe"].get("loss") or {} if training else {}
        return cls(backbone, z_loss=loss.get("z_loss", 0.0), info=info, training=training)

    @classmethod
    def arguments_for(cls, backbone: nn.Module, data: Mapping[str, Any]) -> dict[str, Any]:
        return {"info": TextInfo.from_dict(data) if data.get("tokenizer") else None}

    def read_batch(self, batch: Any) -> TokenBatch:
        """The batch of one of our loaders, or of rows of tokens `[B, T]`, int64:

        - a tensor, or a list with only a tensor: each token predicts the next one;
        - a pair: tokens, and the target of each, IGNORED (-100) for none;
        - a dictionary as in transformers: `input_ids`, and optionally `attention_mask` and `labels` (by default the
          tokens). Each token predicts the label after it. Padding is neither read nor predicted.
        """
        mask = None
        if isinstance(batch, Mapping):
            ids = find_entry(batch, ("input_ids", "tokens"), "tokens")
            labels, real = batch.get("labels"), read_mask(batch, ids)
            labels = (ids if labels is None else labels).masked_fill(~real, IGNORED)
            tokens, targets, mask = ids[:, :-1], labels[:, 1:], real[:, :-1]
        elif isinstance(batch, Tensor) or len(batch) == 1:
            ids = batch if isinstance(batch, Tensor) else batch[0]
            tokens, targets = ids[:, :-1], ids[:, 1:]
        else:
            tokens, targets = batch
            if isinstance(tokens, TokenInputs):
                return tokens, targets
        if tokens.ndim != 2 or targets.shape != tokens.shape:
            raise ValueError(f"tokens {list(tokens.shape)} with targets {list(targets.shape)}: both must be [B, T]")
        targets = targets.long()
        if mask is not None:
            targets = targets.masked_fill(~mask, IGNORED)
            reads_forward = getattr(self.backbone, "direction", "forward") == "forward"
            pads_behind = not bool((mask[:, 1:] & ~mask[:, :-1]).any())  # where no token of such a model sees it
            mask = None if bool(mask.all()) or (reads_forward and pads_behind) else mask
        units = int((targets != IGNORED).sum())
        return TokenInputs(tokens.long(), None, tokens.shape[1], units, byte_count=None, mask=mask), targets

    def forward(self, inputs: TokenInputs) -> Tensor:
        """The features of each token: the shape of the tokens, and the width of the model."""
        return self._read(inputs.tokens, inputs.packing, inputs.mask)[0]

    def _read(
        self, tokens: Tensor, packing: Packing | None, mask: Tensor | None, state: Any = None, keep: bool = False
    ) -> tuple[Tensor, Any]:
        padding = {} if mask is None else {"mask": mask}
        return self.backbone.forward_features(  # type: ignore[operator]
            tokens, state, cu_seqlens=packing, output_final_state=keep, **padding
        )

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        self.seed_batch(batch_idx)
        inputs, targets = self.read_batch(batch)
        features = self._features(inputs, "train")
        return self.mean_of_update(self.backbone.summed_loss(features, targets, z_loss=self.z_loss).objective)  # type: ignore[operator]

    def count_targets(self, batch: TokenBatch) -> int:
        return batch[0].units

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """The log-probability of each target in nats, in the shape of the targets; 0 at places without a target.

        For rows of T tokens this is `[B, T - 1]`.
        """
        inputs, targets = self.read_batch(batch)
        return -self.backbone.token_losses(self._features(inputs, "evaluation"), targets)  # type: ignore[operator]

    def on_validation_epoch_start(self) -> None:
        self._carried.pop("evaluation", None)
        self._positions.reset()
        self._places = CarriedPositions()

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        self.by_position = self._positions.table()

    on_test_epoch_end = on_validation_epoch_end

    def count_flops(self, batch: TokenBatch) -> int:
        """The operations of a training step: three forward passes over the documents, without recomputation."""
        inputs = batch[0]
        assert isinstance(self.backbone, TokenBackbone)
        flops = cache(self.backbone.flops)
        if inputs.cu_seqlens is None:
            return 3 * len(inputs.tokens) * flops(inputs.tokens.shape[1])
        return 3 * sum(flops(length) for length in inputs.cu_seqlens.diff().tolist() if length)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        if "train" in self._carried:
            self._at_update = self._carried["train"].tensors()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._at_update:
            own = [tensor.cpu() for tensor in self._at_update]
            states: list[Any] = [own] * self.trainer.world_size
            if len(states) > 1:
                torch.distributed.all_gather_object(states, own)
            checkpoint[_CARRIED] = states

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        carried = checkpoint.get(_CARRIED)
        if carried is None or self._stage != TrainerFn.FITTING:
            return
        if len(carried) != self.trainer.world_size:
            raise ValueError(f"the states of streams of {len(carried)} device(s) resume only on as many")
        # A run that has validated since it resumed is saved before its first update.
        self._at_update = carried[self.global_rank]
        self._carried["train"] = CarriedState(self.backbone, self._at_update)

    def _features(self, inputs: TokenInputs, stage: str) -> Tensor:
        read = self._train_forward if stage == "train" else self._read
        packing = inputs.packing
        self._plugin_mixers.check(self.backbone, packing, inputs.mask)
        if inputs.carry is None:
            return read(inputs.tokens, packing, inputs.mask)[0]
        if stage not in self._carried:
            self._carried[stage] = CarriedState(self.backbone)
        carried = self._carried[stage]
        features, state = read(inputs.tokens, packing, inputs.mask, carried.start(inputs), True)
        carried.keep(inputs, state)
        return features

    def evaluate_batch(self, batch: TokenBatch, metrics: Any, stage: str) -> None:
        """Update the metrics of a stage; a process may have no targets of a distributed batch."""
        inputs, targets = batch
        losses = self.backbone.token_losses(self._features(inputs, "evaluation"), targets)  # type: ignore[operator]
        total = losses.sum(dtype=torch.float64)
        for name, metric in metrics.items():
            if name == "bits_per_byte" and inputs.byte_count is None:
                continue
            metric.update(total, inputs.byte_count if name == "bits_per_byte" else inputs.units)
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True)
        self._positions.update(losses, self._places.count(inputs), targets != IGNORED)


class LanguageModelReport(Report):
    """Adds the perplexity by position, a sample, and the command that generates text."""

    headline = ("bits_per_byte", "perplexity", "loss")

    def extras(self, module: LanguageModelTask, info: TextInfo, split: str) -> dict[str, Any]:
        return {f"{split}/perplexity_by_position": module.by_position}

    def closing(self, module: LanguageModelTask, info: TextInfo) -> str | None:
        """A text from the start of a document; none of a model whose parameters are sharded."""
        model: Any = module.backbone
        if has_shards(model):
            return None
        tokens = _SAMPLE if model.max_length is None else min(_SAMPLE, model.max_length - 1)  # the separator takes one
        device = next(model.parameters()).device
        start = torch.tensor([[info.separator]], device=device)
        generator = torch.Generator(device).manual_seed(0)
        with evaluating(model):
            written = model.generate(start, tokens, temperature=0.8, generator=generator)[0, 1:].tolist()
        end = written.index(info.separator) if info.separator in written else len(written)
        text = info.make_tokenizer().decode(written[:end])
        return f"\nThe model writes, from the start of a document:\n\n{text}"

    def next_commands(self, checkpoint: str) -> list[str]:
        return [*super().next_commands(checkpoint), f"longseq generate {checkpoint} prompt=TEXT"]
