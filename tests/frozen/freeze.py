"""Write the frozen models that are missing: `python tests/frozen/freeze.py`.

A frozen model is one file per mixer: a small image model's config.json and weights, an input and its logits. Existing
files are never rewritten: later versions must load them and compute the same logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from longseq import mixers, models
from longseq.backbones.image import ImageBackbone

FOLDER = Path(__file__).resolve().parent

# Options that make a mixer small, and options that matter within five tokens.
SMALL: dict[str, Any] = {
    "num_heads": 2,
    "num_slots": 3,
    "state_size": 4,
    "feature_dim": 2,
    "gate_rank": 2,
    "shift_rank": 2,
    "decay_rank": 2,
    "rate_rank": 2,
    "filter_width": 4,
    "filter_bands": 2,
    "max_length": 8,
    "window": 3,
    "refresh_period": 2,
}


def file_of(mixer: str) -> Path:
    """The file of a mixer's frozen model."""
    return FOLDER / f"vim_{mixer}.safetensors"


def build(mixer: str) -> ImageBackbone:
    """A small bidirectional image model in which every weight matters: none is zero."""
    torch.manual_seed(0)
    options = {key: value for key, value in SMALL.items() if key in mixers.options(mixer)}
    model = ImageBackbone(
        img_size=8, patch_size=4, in_chans=1, num_classes=3, embed_dim=8, depth=1, mixer=mixer, mixer_options=options
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def freeze(mixer: str) -> None:
    """Write the file of a mixer."""
    model = build(mixer)
    inputs = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    tensors = {f"weights.{name}": value.contiguous() for name, value in model.state_dict().items()}
    config = json.dumps(models.describe(model))
    save_file({**tensors, "inputs": inputs, "logits": model(inputs)}, file_of(mixer), {"config": config})


def main() -> None:
    """Freeze the mixers that have no file."""
    missing = [mixer for mixer in mixers.mixer_names() if not file_of(mixer).exists()]
    for mixer in missing:
        freeze(mixer)
    print(f"{len(missing)} model(s) written to {FOLDER}")


if __name__ == "__main__":
    sys.exit(main())
