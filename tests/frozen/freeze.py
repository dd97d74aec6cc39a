"""Write the frozen models that are missing: `python tests/frozen/freeze.py`.

Each file has a small model's config.json, its weights, an input and the logits of that time. Existing files are never
written again: later versions must load them and give the same logits.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from longseq import mixers, models
from longseq.backbones.classifier import TextClassifier
from longseq.backbones.image import ImageBackbone
from longseq.backbones.tokens import TokenBackbone

FOLDER = Path(__file__).resolve().parent
RUN = FOLDER / "run.ckpt"

# Options that make a mixer small, and options without which five tokens would not show what it does.
SMALL: dict[str, Any] = {
    "num_heads": 2,
    "num_slots": 3,
    "state_size": 4,
    "feature_dim": 2,
    "gate_rank": 2,
    "shift_rank": 2,
    "decay_rank": 2,
    "filter_width": 4,
    "filter_bands": 2,
    "max_length": 8,
    "window": 3,
    "refresh_period": 2,
}

IMAGE: dict[str, Any] = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 3, "embed_dim": 8, "depth": 1}
TOKENS: dict[str, Any] = {"vocab_size": 6, "d_model": 8, "depth": 1, "mlp_ratio": 1.0}

# Vim and the Vision Transformer, each with directions that the other does not have, token models of both kinds, and
# classifiers of documents.
CHASSIS: dict[str, Any] = {
    "vim": lambda **mixer: ImageBackbone(**IMAGE, **mixer),
    "vit": lambda **mixer: ImageBackbone(
        **IMAGE, **mixer, direction="cross", share_directions="all", class_token="first", mlp_ratio=1.0, norm="layer"
    ),
    "lm": lambda **mixer: TokenBackbone(**TOKENS, **mixer, positions="learned", max_length=8),
    "encoder": lambda **mixer: TokenBackbone(**TOKENS, **mixer, direction="bidirectional", tie_embeddings=False),
    "document": lambda **mixer: TextClassifier(
        **TOKENS, **mixer, num_classes=3, pooling="attention", direction="bidirectional", share_directions="none"
    ),
}


# Options that were added later, for one mixer.
ONCE: dict[str, Any] = {
    "parts": lambda **mixer: ImageBackbone(
        **IMAGE,
        **mixer,
        reg_tokens=2,
        no_embed_class=False,
        init_values=0.1,
        global_pool="map",
        mlp_ratio=1.0,
        dynamic_img_size=True,
        dynamic_img_pad=True,
    ),
}
ONCE_MIXER = "longhorn"


def file_of(chassis: str, mixer: str) -> Path:
    """Where the frozen model of a chassis and a mixer lies."""
    return FOLDER / f"{chassis}_{mixer}.safetensors"


def build(chassis: str, mixer: str) -> nn.Module:
    """A small model all of whose weights matter: none is zero."""
    torch.manual_seed(0)
    options = {key: value for key, value in SMALL.items() if key in mixers.options(mixer)}
    model = (CHASSIS | ONCE)[chassis](mixer=mixer, mixer_options=options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def example(model: nn.Module) -> Tensor:
    """The model's input: two images, or two sequences of tokens."""
    if isinstance(model, ImageBackbone):
        return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return torch.tensor([[0, 1, 2, 3, 4, 5], [5, 2, 2, 0, 3, 1]])


@torch.no_grad()
def score(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's logits."""
    scored = model(inputs)
    return scored[0] if isinstance(scored, tuple) else scored


def freeze(chassis: str, mixer: str) -> None:
    """Write the file of a chassis and a mixer."""
    model = build(chassis, mixer)
    inputs = example(model)
    tensors = {f"weights.{name}": value.contiguous() for name, value in model.state_dict().items()}
    config = json.dumps(models.describe(model))
    save_file(
        {**tensors, "inputs": inputs, "logits": score(model, inputs)}, file_of(chassis, mixer), {"config": config}
    )


def freeze_run() -> None:
    """Write run.ckpt, the checkpoint of a small training with an average of the weights, and the logits of both."""
    from hydra import compose, initialize_config_module

    from longseq.tasks import train

    tiny = ("mixer=deltanet", "mixer.options={num_heads: 2, head_dim: 4}", "model.embed_dim=8", "model.depth=1")
    short = ("recipe.epochs=1", "recipe.schedule.warmup_epochs=0", "+trainer.limit_train_batches=2")
    other = ("trainer=cpu", "++recipe.ema={decay: 0.9}", "data.num_workers=0", "logger=csv", "output=run")
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # the configuration in the checkpoint has no folder of this machine
        with initialize_config_module("longseq.conf", version_base="1.3"):
            train.run(compose("train", [*tiny, *short, *other]))
        contents = torch.load("run/checkpoints/best.ckpt", weights_only=True)
        os.chdir(FOLDER)
    del contents["callbacks"]  # they have folders of the machine that trained
    torch.save(contents, RUN)
    inputs = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    logits = {weights: score(models.restore(models.read(RUN, weights)), inputs) for weights in ("ema", "model")}
    save_file({"inputs": inputs, **logits}, RUN.with_suffix(".safetensors"))


def main() -> None:
    """Freeze what is missing."""
    wanted = [(chassis, mixer) for mixer in mixers.mixer_names() for chassis in CHASSIS]
    wanted += [(chassis, ONCE_MIXER) for chassis in ONCE]
    missing = [pair for pair in wanted if not file_of(*pair).exists()]
    for pair in missing:
        freeze(*pair)
    if not RUN.exists():
        freeze_run()
    print(f"{len(missing)} model(s) written below {FOLDER}; {len(wanted) - len(missing)} were there")


if __name__ == "__main__":
    sys.exit(main())
