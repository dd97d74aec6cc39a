"""The metadata of an exported file, with which a program needs nothing else to run it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.image.decoding import DECODING, RESIZING, RESIZING_OBLONG
from longseq.tasks.training.metrics import HALF
from longseq.timm_models import model_name, stated_data
from longseq.tokenizer_files import as_read, find_start
from longseq.tools.export.states import StateSpec

# The name of the JSON in TorchScript and pt2 archives. ONNX files hold one metadata property per key, OpenVINO's hold
# the JSON in `rt_info`, and ExecuTorch's have none.
EXTRA_FILE = "longseq.json"

PREPROCESSING = ("img_size", "in_chans", "mean", "std", "interpolation", "crop_pct")
TEXT = ("separator", "window", "tokenizer")
DOCUMENTS = ("class_names", "multi_label", "truncation", "max_length", *TEXT)


def classifier_metadata(
    model: nn.Module, data: Mapping[str, Any], *, preprocess: bool, softmax: bool, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Facts about an image classifier's file: classes, preprocessing, input and output, and its origin."""
    metadata: dict[str, Any] = {key: data[key] for key in PREPROCESSING if data.get(key) is not None}
    mode = metadata["crop_mode"] = data.get("crop_mode") or stated_data(model).get("crop_mode", "center")
    if data.get("in_chans", 3) in (1, 3):  # files are read as grey or RGB, and other channels are the program's own
        metadata["decoding"] = DECODING
        oblong = mode == "center" and not isinstance(data["img_size"], int)
        metadata["resizing"] = RESIZING_OBLONG if oblong else RESIZING[mode]
    if data.get("class_names"):
        metadata["class_names"] = list(data["class_names"])
    metadata |= _decision(data, "an image")
    metadata["input"] = (
        "uint8 pixels 0..255, [batch, channels, height, width]"
        if preprocess
        else "float32 pixels scaled to 0..1, then (x - mean) / std, [batch, channels, height, width]"
    )
    metadata["output"] = "probabilities [batch, classes]" if softmax else "logits [batch, classes]"
    return {**metadata, **_origin(model), **extra}


def _decision(data: Mapping[str, Any], sample: str) -> dict[str, Any]:
    """How probabilities become decisions, where that is not the most probable class."""
    thresholds, several = data.get("thresholds"), bool(data.get("multi_label"))
    if several:
        thresholds = thresholds or [HALF] * len(data.get("class_names") or ())
    if not thresholds:
        return {}
    decision = (
        f"{sample} has each label whose probability, the sigmoid of its logit, is at least the label's threshold"
        if several
        else "the second class if its probability, the softmax of the logits, is at least the threshold; else the first"
    )
    return {"multi_label": several, "thresholds": list(thresholds), "decision": decision}


def language_metadata(
    model: TokenBackbone,
    data: Mapping[str, Any],
    states: Sequence[StateSpec],
    *,
    limit: int | None,
    dynamic_length: bool,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Facts about a language model's file: vocabulary, tokenizer, input, output and states, and its origin.

    `limit` is the most tokens that the file reads, None: any number. The tokenizer may have fewer tokens than the
    model's `vocab_size`.
    """
    metadata = _facts_of_text(data, TEXT)
    if "tokenizer" in metadata:
        # The token in front of a text that the model continues, None if there is none.
        tokenizer = metadata["tokenizer"]
        start = find_start(tokenizer) if "start" in tokenizer else metadata.get("separator")
        metadata["start"] = None if tokenizer.get("bare_prompts") else start
        ends = (metadata.get("separator"), *tokenizer.get("ends", ()))
        metadata["ends"] = [token for token in ends if token is not None]
    metadata["vocab_size"] = model.vocab_size
    if limit is not None:
        metadata["max_length"] = limit
    read = "tokens [batch, length]" if dynamic_length else "token [batch]"
    metadata["input"] = f"int64 {read}, and the states before"
    metadata["output"] = f"logits [batch{', length' if dynamic_length else ''}, vocabulary], and the states after"
    metadata["states"] = [state.to_dict() for state in states]
    return {**metadata, **_origin(model), **extra}


def _facts_of_text(data: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The known values of `keys`; the tokenizer gives a text the same tokens each time."""
    facts: dict[str, Any] = {key: data[key] for key in keys if data.get(key) is not None}
    if data.get("window_is_assumed"):
        facts.pop("window", None)
    return {**facts, "tokenizer": as_read(facts["tokenizer"])} if "tokenizer" in facts else facts


def document_metadata(model: Any, data: Mapping[str, Any], *, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about a document classifier's file: classes, tokenizer, truncation, input and output, and its origin."""
    metadata = _facts_of_text(data, DOCUMENTS)
    metadata |= _decision(data, "a document")
    if data.get("preparation") is not None:
        metadata |= {"source": data["source"], "preparation": data["preparation"]}
    metadata["vocab_size"] = model.body.vocab_size
    if model.body.max_length is not None:
        metadata["positions"] = model.body.max_length
    metadata["input"] = "int64 tokens [batch, length], padded at the end by any token, and int64 lengths [batch]"
    metadata["output"] = "probabilities [batch, classes]"
    return {**metadata, **_origin(model), **extra}


def _origin(model: nn.Module) -> dict[str, Any]:
    mixer = getattr(getattr(model, "body", model), "mixer_name", None)
    return {
        "model": model_name(model),
        **({} if mixer is None else {"mixer": mixer}),
        "longseq_version": version("longseq"),
        "torch_version": torch.__version__,
    }


def check_class_names(data: Mapping[str, Any], classes: int) -> None:
    """Raise ValueError if the number of `class_names` is not the model's."""
    names = data.get("class_names")
    if names and len(names) != classes:
        raise ValueError(f"the model has {classes} classes and class_names {len(names)}")


def check_vocabulary(data: Mapping[str, Any], vocab_size: int) -> None:
    """Raise ValueError if the text has more tokens than the model."""
    if data.get("vocab_size", 0) > vocab_size:
        raise ValueError(f"the text has {data['vocab_size']} tokens and the model {vocab_size}")


def encode(metadata: Mapping[str, Any]) -> dict[str, str]:
    """One string per key: strings as they are, everything else as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
