"""The metadata of an exported file, with which a program needs nothing else to run it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from longseq.tasks.image.decoding import DECODING
from longseq.timm_models import model_name

__all__ = ["EXTRA_FILE", "PREPROCESSING", "classifier_metadata", "encode"]

# The name under which TorchScript and pt2 archives keep the JSON; ONNX files hold one metadata property per key.
EXTRA_FILE = "longseq.json"

PREPROCESSING = ("img_size", "in_chans", "mean", "std", "interpolation", "crop_pct")


def classifier_metadata(
    model: nn.Module, data: Mapping[str, Any], *, preprocess: bool, softmax: bool, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Facts about an image classifier's file: classes, preprocessing, input and output, and its origin."""
    metadata: dict[str, Any] = {key: data[key] for key in PREPROCESSING if data.get(key) is not None}
    metadata["decoding"] = DECODING
    if data.get("class_names"):
        metadata["class_names"] = list(data["class_names"])
    metadata["input"] = (
        "uint8 pixels 0..255, [batch, channels, height, width]"
        if preprocess
        else "float32 pixels scaled to 0..1, then (x - mean) / std, [batch, channels, height, width]"
    )
    metadata["output"] = "probabilities [batch, classes]" if softmax else "logits [batch, classes]"
    metadata["model"] = model_name(model)
    mixer = getattr(model, "mixer_name", None)
    if mixer is not None:
        metadata["mixer"] = mixer
    metadata["longseq_version"] = version("longseq")
    metadata["torch_version"] = torch.__version__
    return {**metadata, **extra}


def encode(metadata: Mapping[str, Any]) -> dict[str, str]:
    """One string per key: strings as they are, everything else as JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}
