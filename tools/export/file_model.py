"""Exported files as models: `longseq predict`, `evaluate`, `generate` and `describe` run them like checkpoints.

`longseq export` records in FILE.json what these commands need besides the metadata: the `run`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map

from longseq.backbones.vocabulary_loss import token_losses
from longseq.files import sha256
from longseq.kernels.packing import Packing
from longseq.models import CHECKPOINT_RUN, SavedModel, build, describe
from longseq.tasks.image.config import DataInfo
from longseq.tasks.image.transforms import denormalize
from longseq.tasks.training.checkpoint import Loaded
from longseq.tools.export.checked_file import quiet
from longseq.tools.export.formats import FORMATS
from longseq.tools.export.report import ExportReport
from longseq.tools.export.states import StateSpec

# Data that the metadata of a file also have, and that may be large.
_SHARED = ("class_names", "tokenizer")

_log = logging.getLogger(__name__)


def record_run(report: ExportReport, loaded: Loaded, kind: str, options: Mapping[str, Any]) -> None:
    """Add the `run` to the JSON next to an exported file.

    `kind` is image, document or lm; `options` are the keys of `longseq export` that only this kind has.
    """
    path = Path(f"{report.path}.json")
    facts = json.loads(path.read_text(encoding="utf-8"))
    shared = [name for name in _SHARED if name in facts]
    facts["run"] = {
        "kind": kind,
        "format": report.format,
        "size": report.size,
        "options": dict(options),
        "config": loaded.config,
        "data": {name: value for name, value in loaded.data.items() if name not in shared},
        "model": describe(loaded.backbone),
    }
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def read(path: Path, weights: str, label: str) -> SavedModel:
    """The checkpoint that an exported file was written from, without its weights; `run` also has FILE.json as `facts`.

    ValueError if `path` is not the file that FILE.json describes, or was not written by `longseq export`.
    """
    digest = sha256(path)
    facts = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
    if facts["sha256"] != digest:
        raise ValueError(f"{label} is another file than the one that {path.name}.json describes")
    if "run" not in facts:
        raise ValueError(f"{label} was not written by `longseq export`")
    if weights not in ("auto", facts["weights"]):
        raise ValueError(f"{label} holds weights={facts['weights']}")
    config = facts["run"]["config"]
    data = {name: facts[name] for name in _SHARED if name in facts} | facts["run"]["data"]
    for section in (data, config.get("data") or {}):
        if "segment" in section:
            section["segment"] = None  # a file reads whole documents, with the same result
    settings = {"config": config, "data": data}
    run = {CHECKPOINT_RUN: settings, "epoch": facts["epoch"] - 1, "global_step": facts["global_step"], "facts": facts}
    text = data if "tokenizer" in data else None
    return SavedModel(label, facts["run"]["model"], {}, facts["weights"], run, text)


def restore(saved: SavedModel, path: Path) -> FileModel:
    """The model that runs the file."""
    facts = saved.run["facts"]
    return _KINDS[facts["run"]["kind"]](path, facts, saved.run[CHECKPOINT_RUN]["data"])


class FileModel(nn.Module):
    """A model that an exported file computes, on the CPU and in float32, for inputs on any device.

    `facts` are the contents of FILE.json, and `data` the fields of the task's info.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        super().__init__()
        self.path, self.facts, self.data = path, facts, data
        self.options = facts["run"]["options"]
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)  # has the device and the type of the model
        self._warned = False
        with quiet():
            self._call = FORMATS[facts["run"]["format"]].open_file(path)

    def architecture(self) -> nn.Module:
        """The model that was exported, with new weights."""
        return build(self.facts["run"]["model"])

    def summary(self) -> dict[str, Any]:
        """The format, the size in bytes, and what ran the export."""
        names = ("opset", "operators", "onnxruntime", "torch_version")
        run = {name: self.facts["run"][name] for name in ("format", "size")}
        return {**run, **{name: self.facts[name] for name in names if name in self.facts}}

    def compute(self, *arguments: Any) -> Any:
        """The results of the file for tensors and lists of tensors."""
        if not self._warned and (
            self.place.dtype != torch.float32 or torch.is_autocast_enabled(self.place.device.type)
        ):
            _log.warning("%s computes in float32", self.path.name)
            self._warned = True
        with torch.autocast("cpu", enabled=False):
            results = self._call(*tree_map(lambda tensor: tensor.detach().cpu().contiguous(), arguments))
        return tree_map(lambda tensor: tensor.to(self.place.device), results)

    def scores(self, probabilities: Tensor) -> Tensor:
        """Logits `[B, C]` with the probabilities that a file gives."""
        values = probabilities.double().clamp_min(torch.finfo(torch.float32).tiny)
        if self.data.get("multi_label"):
            values = values / (1 - values).clamp_min(2**-25)  # half of what float32 can resolve below 1
        return values.log().float()


class ImageFile(FileModel):
    """Maps normalised images `[B, C, H, W]` to logits `[B, C]`."""

    def forward(self, images: Tensor) -> Tensor:
        if self.options["preprocess"]:
            images = denormalize(images, DataInfo.from_dict(self.data)).mul(255).round().to(torch.uint8)
        else:
            images = images.float()
        results = self.compute(images)
        return self.scores(results) if self.options["softmax"] else results


class DocumentFile(FileModel):
    """Maps documents to logits `[N, C]`, with the arguments of `TextClassifier.forward`."""

    def __init__(self, path: Path, facts: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        super().__init__(path, facts, data)
        self.body = SimpleNamespace(max_length=facts.get("positions"))

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | Packing | None = None, mask: Tensor | None = None) -> Tensor:
        rows = _rows(tokens, cu_seqlens, mask)
        lengths = torch.tensor([len(row) for row in rows])
        return self.scores(self.compute(pad_sequence(rows, batch_first=True).long(), lengths))


class LanguageFile(FileModel):
    """Reads tokens like `TokenBackbone`; its features are the logits, and its state is a tuple of tensors."""

    direction = "forward"
    piece_multiple = 1

    def __init__(self, path: Path, facts: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        super().__init__(path, facts, data)
        self.vocab_size: int = facts["vocab_size"]
        self.max_length: int | None = facts["run"]["model"]["model_args"]["max_length"]
        self.states = [StateSpec.from_dict(state) for state in facts["states"]]

    def initial_state(self, batch: int, device: Any = None, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        return tuple(state.starts(batch).to(self.place.device) for state in self.states)

    def forward(
        self,
        tokens: Tensor,
        state: tuple[Tensor, ...] | None = None,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        output_final_state: bool = True,
        max_length: int | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Logits and the next state; the arguments are those of `TokenBackbone.forward_features`."""
        rows = _rows(tokens, cu_seqlens)
        state = self.initial_state(len(rows)) if state is None else state
        if max_length is not None:
            self.preallocate(state, max_length)
        if cu_seqlens is None and self.options["dynamic_length"]:
            found, states = self.compute(tokens, list(state))
            return found, tuple(states)
        real = torch.tensor([number for number, row in enumerate(rows) if len(row)], device=self.place.device)
        read = self._read_each if self.options["dynamic_length"] else self._read_tokens
        logits, states = read([rows[number] for number in real], [x[real] for x in state], output_final_state)
        if states is not None and len(real) < len(rows):
            states = [x.index_copy(0, real, new) for x, new in zip(state, states, strict=True)]
        scores = torch.stack(logits) if cu_seqlens is None else torch.cat(logits)[None]
        return scores, None if states is None else tuple(states)

    forward_features = forward

    def _read_each(
        self, rows: Sequence[Tensor], states: list[Tensor], keep: bool
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """The logits `[T, V]` of each row, and with `keep` the states at the ends of the rows."""
        read = [self.compute(row[None], [x[n : n + 1] for x in states]) for n, row in enumerate(rows)]
        return [logits[0] for logits, _ in read], _join([states for _, states in read]) if keep else None

    def _read_tokens(
        self, rows: Sequence[Tensor], states: list[Tensor], keep: bool
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """As `_read_each`, token by token: the rows that go on are a batch."""
        order = torch.tensor([-len(row) for row in rows]).argsort()
        lengths, back = [len(rows[number]) for number in order], order.argsort()
        states, ended, scores = [x[order] for x in states], [], []
        for place, tokens in enumerate(pad_sequence([rows[number] for number in order])):
            count = sum(length > place for length in lengths)
            if keep and count < len(states[0]):
                ended.append([x[count:] for x in states])
            logits, states = self.compute(tokens[:count], [x[:count] for x in states])
            scores.append(logits)
        read = [torch.stack([logits[row] for logits in scores[:length]]) for row, length in enumerate(lengths)]
        last = [x[back] for x in _join([states, *reversed(ended)])] if keep else None
        return [read[row] for row in back], last

    def step(self, token: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Read one more token `[B]`: logits `[B, V]` and the next state."""
        one_token = not self.options["dynamic_length"]
        logits, states = self.compute(token if one_token else token[:, None], list(state))
        return logits if one_token else logits[:, 0], tuple(states)

    def forward_head(self, features: Tensor) -> Tensor:
        return features

    def token_losses(self, features: Tensor, target: Tensor) -> Tensor:
        """The loss of each target, as `TokenBackbone.token_losses`."""
        return token_losses(features, self.forward_head, self.vocab_size, target)

    def preallocate(self, state: tuple[Tensor, ...], max_length: int) -> tuple[Tensor, ...]:
        """The state itself, which has room for as many tokens as the file. ValueError if these are too few."""
        room = self.facts.get("max_length")
        if room is not None and max_length > room:
            raise ValueError(f"{self.path.name} reads {room} tokens, not {max_length}: export with a larger max_length")
        return state


_KINDS: Mapping[str, type[FileModel]] = {"image": ImageFile, "document": DocumentFile, "lm": LanguageFile}


def _rows(tokens: Tensor, cu_seqlens: Tensor | Packing | None, mask: Tensor | None = None) -> list[Tensor]:
    """The sequences `[T]` of a batch."""
    if mask is not None:
        return [row[real] for row, real in zip(tokens, mask, strict=True)]
    if cu_seqlens is None:
        return list(tokens)
    borders = cu_seqlens.cu_seqlens if isinstance(cu_seqlens, Packing) else cu_seqlens
    return list(tokens[0].split(borders.diff().tolist()))


def _join(states: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The states of several batches as the state of one."""
    return [torch.cat(parts) for parts in zip(*states, strict=True)]
