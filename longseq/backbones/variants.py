"""The names of the image models in timm's registry.

Only timm is imported here, so that the names can be registered right after it (see `longseq.registration`). The first
model that is created imports the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from timm.models import generate_default_cfgs, register_model

if TYPE_CHECKING:
    from longseq.backbones.image import ImageBackbone

# The name in timm's registry of models that were built without timm: all of their arguments are given with it.
UNNAMED = "longseq_tiny_patch16_224"

WIDTHS = {"tiny": 192, "small": 384, "base": 768}
VIM = {"depth": 24}
VIT = {
    "depth": 12,
    "mixer": "deltanet",
    "class_token": "first",
    "mlp_ratio": 4.0,
    "norm": "layer",
    "residual_in_float32": False,
    "depth_scaled_init": False,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    f"longseq_{prefix}{size}_patch16_224": {**chassis, "embed_dim": width}
    for prefix, chassis in (("", VIM), ("vit_", VIT))
    for size, width in WIDTHS.items()
}

_CFG = {
    "input_size": (3, 224, 224),
    "fixed_input_size": True,
    "num_classes": 1000,
    "pool_size": None,
    "crop_pct": 0.875,
    "interpolation": "bicubic",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "first_conv": "patch_embed.proj",
    "classifier": "head",
}
default_cfgs = generate_default_cfgs({name: dict(_CFG) for name in _VARIANTS})


def _register(name: str, arguments: dict[str, Any]) -> None:
    """Register a function that creates the model; timm takes its name, and its module for `default_cfgs`."""

    def create(pretrained: bool = False, **options: Any) -> ImageBackbone:
        from longseq.backbones.image import create_variant

        return create_variant(name, pretrained, arguments, options)

    create.__name__ = create.__qualname__ = name
    chassis = "The Vision Transformer" if "_vit_" in name else "Vim"
    create.__doc__ = f"{chassis}'s chassis, {arguments['embed_dim']} channels."
    globals()[name] = register_model(create)


for _name, _arguments in _VARIANTS.items():
    _register(_name, _arguments)
