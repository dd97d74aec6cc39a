"""The names of the image models in timm's registry.

timm alone is imported here, so that the names can be registered as soon as it is (see `longseq.registration`). The
first model that is created imports the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from timm.models import generate_default_cfgs, register_model

if TYPE_CHECKING:
    from longseq.backbones.image import ImageBackbone

# The name in timm's registry of models that were built without timm: all of their arguments are given with it.
UNNAMED = "longseq_tiny_patch16_224"

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


def _cfg() -> dict[str, Any]:
    return {
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


default_cfgs = generate_default_cfgs(
    {f"longseq_{chassis}{size}_patch16_224": _cfg() for chassis in ("", "vit_") for size in ("tiny", "small", "base")}
)


@register_model
def longseq_tiny_patch16_224(pretrained: bool = False, **options: Any) -> ImageBackbone:
    """Vim's chassis, 192 channels."""
    return _create("longseq_tiny_patch16_224", pretrained, {**VIM, "embed_dim": 192}, options)


@register_model
def longseq_small_patch16_224(pretrained: bool = False, **options: Any) -> ImageBackbone:
    """Vim's chassis, 384 channels."""
    return _create("longseq_small_patch16_224", pretrained, {**VIM, "embed_dim": 384}, options)


@register_model
def longseq_base_patch16_224(pretrained: bool = False, **options: Any) -> ImageBackbone:
    """Vim's chassis, 768 channels."""
    return _create("longseq_base_patch16_224", pretrained, {**VIM, "embed_dim": 768}, options)


@register_model
def longseq_vit_tiny_patch16_224(pretrained: bool = False, **options: Any) -> ImageBackbone:
    """The Vision Transformer's chassis, 192 channels."""
    return _create("longseq_vit_tiny_patch16_224", pretrained, {**VIT, "embed_dim": 192}, options)


@register_model
def longseq_vit_small_patch16_224(pretrained: bool = False, **options: Any) -> ImageBackbone:
    """The Vision Transformer's chassis, 384 channels."""
    return _create("longseq_vit_small_patch16_224", pretrained, {**VIT, "embed_dim": 384}, options)


@register_model
def longseq_vit_base_patch16_224(pretrained: bool = False, **options: Any) -> ImageBackbone:
    """The Vision Transformer's chassis, 768 channels."""
    return _create("longseq_vit_base_patch16_224", pretrained, {**VIT, "embed_dim": 768}, options)


def _create(variant: str, pretrained: bool, chassis: Mapping[str, Any], options: Mapping[str, Any]) -> ImageBackbone:
    from longseq.backbones.image import create_variant

    return create_variant(variant, pretrained, chassis, options)
