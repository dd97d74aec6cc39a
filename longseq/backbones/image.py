"""Image models with exchangeable token mixers, as models of timm.

    import longseq, timm
    model = timm.create_model("longseq_tiny_patch16_224", mixer="longhorn", num_classes=10, img_size=32, patch_size=4)
    hybrid = timm.create_model("longseq_tiny_patch16_224", mixer="3xlonghorn+attention")

Two chassis. `longseq_{tiny,small,base}_patch16_224` is Vim's: 24 blocks of one mixer each, RMSNorm, residual in
float32, no MLP, class token in the middle of the sequence. `longseq_vit_{tiny,small,base}_patch16_224` is the Vision
Transformer's: 12 blocks of mixer and MLP, LayerNorm, class token first; with mixer="attention" it is DeiT.

Sources: Vision Mamba (Zhu et al., 2024), section 3; Longhorn (Liu et al., 2024), section 5.5; DeiT (Touvron et al.,
2021).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from timm.layers import Mlp, lecun_normal_, trunc_normal_
from timm.models import build_model_with_cfg, checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from longseq.backbones.stack import build_blocks
from longseq.backbones.variants import UNNAMED, default_cfgs
from longseq.blocks.hooks import has_observers
from longseq.blocks.initialisation import save_rng_state
from longseq.blocks.norm import ResidualLayerNorm, ResidualRMSNorm
from longseq.blocks.patches import PatchEmbed
from longseq.blocks.positions import (
    Layout,
    insert_token,
    layout_of,
    move_token_back,
    move_token_first,
    resize_positions,
    split_token,
)
from longseq.blocks.precision import at_least_float32
from longseq.blocks.recompute import check_recompute
from longseq.blocks.residual import Block
from longseq.blocks.sharding import full_parameters, gathers_parameters
from longseq.mixers import Mixer, check_revisions
from longseq.mixers.pattern import Pattern, expand_pattern, spell_pattern
from longseq.models import PretrainedModel, check_config_version, describe_origin, mixer_options_of, register_kind
from longseq.parameters import no_weight_decay
from longseq.timm_models import rebuild_timm_model, timm_layout

POOLS = ("token", "avg", "")
NORMS = {"rms": ResidualRMSNorm, "layer": ResidualLayerNorm}
NORM_EPSILONS = {"rms": 1e-5, "layer": 1e-6}

# Arguments that timm does not write to its files: they matter in training only.
TRAINING_ARGUMENTS = ("drop_rate", "pos_drop_rate", "drop_path_rate")

# Both functions read types and sizes, which a symbolic trace does not have: the trace keeps the calls.
torch.fx.wrap("at_least_float32")
torch.fx.wrap("resize_positions")


class ImageBlock(Block[Any]):
    """A residual block over an image, which takes and returns tokens alone, as timm's tools and hooks expect it."""

    def forward(  # type: ignore[override]
        self, x: Tensor, layout: Layout | None = None, *, token_first: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """Transform `x [B, T, D]`.

        Args:
            layout: the positions of the patches; needed by directions that read columns.
            token_first: the class token is before the patches in `x`, in `mask` and in the result. Only inside the
                block it is at its index in the sequence.
            mask: `[B, T]`, True at real tokens. Outputs of the others are undefined.
        """
        if layout is None or not token_first:
            return super().forward(x, layout=layout, mask=mask, output_final_state=False)[0]
        if mask is not None:
            mask = move_token_back(mask.unsqueeze(-1), layout).squeeze(-1)
        y, _ = super().forward(move_token_back(x, layout), layout=layout, mask=mask, output_final_state=False)
        return move_token_first(y, layout)


@register_kind("image")
class ImageBackbone(PretrainedModel, nn.Module):
    """Patches, positions, a stack of mixing blocks, a norm, pooling and a linear head.

    Args:
        img_size, patch_size, stride: in pixels, one number or (height, width). `stride` defaults to `patch_size`;
            half of it makes patches overlap and quadruples the tokens.
        in_chans, num_classes: channels of the images; classes, 0 for no head.
        mixer, mixer_options: a name from `longseq.mixers.mixer_names()` and keywords of its constructor; or a pattern
            of names over the blocks (see `longseq.mixers.pattern.expand_pattern`) and `{name: keywords}`.
        direction: forward, bidirectional, cross or alternating (see `longseq.blocks.reading`). A mixer that can see all
            tokens in one pass (attention) does so for bidirectional and cross: the direction sets its `causal`. In a
            hybrid each mixer alternates by itself.
        share_directions: what several readings of the image share: projections, all or none.
        merge: sum of the readings, as in Vim's paper, or their mean, as in its published models.
        backend: the kernel backend of mixers and norms; auto takes the first that can run.
        class_token: middle, first or none, its index in the sequence that blocks read. In features the token is always
            first, and also in the inputs and outputs of blocks and of the final norm that hooks and symbolic traces
            (torch.fx) see.
        global_pool: token, avg (mean over the patches), or "" for no pooling.
        mlp_ratio: width of the MLP after each mixer, relative to `embed_dim`; 0 leaves the MLPs out.
        norm, norm_eps: rms or layer; and the number added to the variance, by default 1e-5 for rms and 1e-6 for layer.
        residual_in_float32: keep the residual in float32 when the weights are in half precision.
        depth_scaled_init: divide the initial output projections of the mixers by sqrt(depth).
        recompute: the part that the backward pass recomputes to save memory: none; mixer: everything between the
            projections of mixers, which is cheap; block: each block.
        drop_rate, pos_drop_rate, drop_path_rate: dropout before the head and after the positions; drop path of the
            last block, growing linearly from 0.
        dynamic_img_size: accept any image of at least one patch; positions are interpolated to its grid.

    Raises:
        ValueError: an option has a value that does not exist or contradicts another.
    """

    decided_options = ("causal",)

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        stride: int | tuple[int, int] | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 192,
        depth: int = 24,
        mixer: Pattern = "longhorn",
        mixer_options: dict[str, Any] | None = None,
        direction: str = "bidirectional",
        share_directions: str = "projections",
        merge: str = "sum",
        backend: str = "auto",
        class_token: str = "middle",
        global_pool: str = "token",
        mlp_ratio: float = 0.0,
        norm: str = "rms",
        norm_eps: float | None = None,
        residual_in_float32: bool = True,
        depth_scaled_init: bool = True,
        recompute: str = "none",
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        dynamic_img_size: bool = False,
    ) -> None:
        super().__init__()
        restore_rng_state = save_rng_state()
        check_recompute(recompute)
        self.mixer_name = spell_pattern(mixer)
        self.direction = direction
        self.class_token = class_token
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.dynamic_img_size = dynamic_img_size
        self.residual_in_float32 = residual_in_float32
        self.grad_checkpointing = recompute == "block"
        self.global_pool = self._check_pool(global_pool)

        self.patch_embed = PatchEmbed(
            img_size=img_size,
            patch_size=patch_size,
            stride=stride,
            in_chans=in_chans,
            embed_dim=embed_dim,
            strict_img_size=not dynamic_img_size,
        )
        has_token = layout_of(*self.patch_embed.grid_size, class_token).token is not None
        self.num_prefix_tokens = int(has_token)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if has_token else None
        self.pos_embed = nn.Parameter(torch.empty(1, self.patch_embed.num_patches, embed_dim))
        self.pos_drop = nn.Dropout(pos_drop_rate)

        default_eps = norm_epsilon(norm)
        self.norm_eps = default_eps if norm_eps is None else norm_eps
        make_norm = partial(NORMS[norm], embed_dim, eps=self.norm_eps, backend=backend)
        make_mlp = partial(Mlp, embed_dim, int(embed_dim * mlp_ratio)) if mlp_ratio else None
        blocks = build_blocks(
            ImageBlock,
            depth,
            embed_dim,
            mixer=mixer,
            mixer_options=mixer_options,
            direction=direction,
            share_directions=share_directions,
            merge=merge,
            backend=backend,
            make_norm=make_norm,
            make_mlp=make_mlp,
            drop_path=drop_path_rate,
            recompute=recompute,
        )
        self.blocks = nn.Sequential(*blocks)
        self.feature_info = [
            {"module": f"blocks.{layer}", "num_chs": embed_dim, "reduction": self.patch_embed.feat_ratio()}
            for layer in range(depth)
        ]
        self.norm = make_norm()
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes > 0 else nn.Identity()
        self.depth_scaled_init = depth_scaled_init
        self.resolve_arguments(
            stride=self.patch_embed.stride,
            mixer=self.mixer_name,
            mixer_options=mixer_options_of(
                mixer, mixer_options, expand_pattern(mixer, depth), self.blocks, without=self.decided_options
            ),
        )
        # Attributes that timm reads from a model.
        self._traits = {"img_size": self.patch_embed.img_size, "fixed_input_size": not dynamic_img_size}
        restore_rng_state()
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise all weights, as after `to_empty`: a model from the meta device becomes what the constructor makes.

        Weights are initialised as in the Vision Transformer; recurrences then set their own initial values.

        The published code of Vim, and of Longhorn, initialises the projections of blocks as `nn.Linear` does: twice as
        large at 192 channels, and eight times as large for the projections from 12 channels to Longhorn's rates.
        """
        blocks: Any = self.blocks
        with full_parameters(self, without=blocks):
            trunc_normal_(self.pos_embed, std=0.02)
            if self.cls_token is not None:
                trunc_normal_(self.cls_token, std=0.02)
            lecun_normal_(self.patch_embed.proj.weight)
            assert self.patch_embed.proj.bias is not None
            nn.init.zeros_(self.patch_embed.proj.bias)
            for part in (self.norm, self.head):
                self._init_part(part)
        for block in blocks:
            with full_parameters(block):
                self._init_part(block)

    def _init_part(self, part: nn.Module) -> None:
        for module in part.modules():
            if isinstance(module, nn.Linear):
                _init_linear(module)
            elif not isinstance(module, Mixer) and hasattr(module, "reset_parameters"):
                reset: Any = module.reset_parameters
                reset()
        for module in part.modules():
            if isinstance(module, Mixer):
                module.reset_parameters()
                if self.depth_scaled_init and module.out_proj is not None:
                    module.out_proj.weight.data.div_(math.sqrt(len(self.blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """Classify images `[B, C, H, W]`: `[B, num_classes]`, or pooled features without a head."""
        return self.forward_head(self.forward_features(x))

    @gathers_parameters
    def forward_features(self, x: Tensor) -> Tensor:
        """Return normalised tokens `[B, T, D]`: the class token, where there is one, then the patches in row order."""
        x, layout = self._embed(x)
        for block in self.blocks:
            x = self._run(block, x, layout)
        return self.norm(self._token_first(x, layout))

    @gathers_parameters
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the tokens of `forward_features` and classify; `pre_logits` stops before the last layer."""
        if self.global_pool == "token":
            x = x[:, 0]
        elif self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(dim=1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def _embed(self, x: Tensor) -> tuple[Tensor, Layout]:
        """Turn images into the sequence `[B, T, D]` that the blocks read, and its layout."""
        x = self.patch_embed(x)  # [B, h, w, D]
        positions: Tensor = self.pos_embed
        grid = self.patch_embed.grid_size
        if self.dynamic_img_size:
            grid = (x.shape[1], x.shape[2])
            positions = resize_positions(positions, self.patch_embed.grid_size, grid)
        layout = layout_of(*grid, self.class_token)
        x = x.flatten(1, 2) + positions
        if self.cls_token is not None:
            x = insert_token(x, self.cls_token, layout)
        x = self.pos_drop(x)
        return (at_least_float32(x) if self.residual_in_float32 else x), layout

    def _run(self, block: nn.Module, x: Tensor, layout: Layout) -> Tensor:
        run = partial(checkpoint, block) if self.grad_checkpointing and not torch.jit.is_tracing() else block
        # With hooks and in symbolic traces the class token comes first at the borders of blocks, as in timm's models.
        # Moving it costs two copies, which other runs avoid.
        if self.class_token == "middle" and (isinstance(x, torch.fx.Proxy) or has_observers(block)):
            return move_token_back(run(move_token_first(x, layout), layout, token_first=True), layout)
        return run(x, layout)

    def _token_first(self, x: Tensor, layout: Layout) -> Tensor:
        return move_token_first(x, layout) if self.class_token == "middle" else x

    @gathers_parameters
    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """Return what blocks put out, beside the features; the arguments and results of timm's VisionTransformer.

        Args:
            x: images `[B, C, H, W]`.
            indices: the last n blocks, those with the given indices, or all.
            return_prefix_tokens: pair each intermediate with its class token `[B, 1, D]`.
            norm: apply the final norm to intermediates too.
            stop_early: leave out the blocks after the last index.
            output_fmt: NCHW, `[B, D, h, w]`; or NLC, `[B, N, D]`.
            intermediates_only: return only the list of intermediates.
            output_dict: return a dictionary with the keys image_intermediates, image_intermediates_prefix (on request)
                and image_features.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt={output_fmt!r} is not one of NCHW, NLC")
        taken, last = feature_take_indices(len(self.blocks), indices)
        x, layout = self._embed(x)
        taps = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run(block, x, layout)
            if index in taken:
                taps.append(split_token(self.norm(x) if norm else x, layout))
        tokens, intermediates = [token for token, _ in taps], [patches for _, patches in taps]
        if output_fmt == "NCHW":
            grid = (layout.height, layout.width)
            intermediates = [patches.transpose(1, 2).unflatten(2, grid).contiguous() for patches in intermediates]
        with_tokens = return_prefix_tokens and layout.token is not None
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": intermediates}
            if with_tokens:
                result["image_intermediates_prefix"] = tokens
            if not intermediates_only:
                result["image_features"] = self.norm(self._token_first(x, layout))
            return result
        listed = list(zip(intermediates, tokens, strict=True)) if with_tokens else intermediates
        return listed if intermediates_only else (self.norm(self._token_first(x, layout)), listed)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the blocks after the last of `indices`, and the norm and head on request; returns absolute indices."""
        taken, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        """Return the last layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one for `num_classes` (0: none), and the pooling if one is named."""
        if global_pool is not None:
            self.global_pool = self._check_pool(global_pool)
        self.num_classes = num_classes
        self.resolve_arguments(num_classes=num_classes, global_pool=self.global_pool)
        if num_classes > 0:
            like = self.pos_embed
            self.head = nn.Linear(self.embed_dim, num_classes, device=like.device, dtype=like.dtype)
            _init_linear(self.head)
        else:
            self.head = nn.Identity()
        self.head.train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Change the image size (and patch size) of the model; positions are interpolated to the new grid."""
        grid = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        if self.patch_embed.grid_size != grid:
            table = resize_positions(self.pos_embed.detach(), grid, self.patch_embed.grid_size)
            self.pos_embed = nn.Parameter(table, requires_grad=self.pos_embed.requires_grad)
        for feature in self.feature_info:
            feature["reduction"] = self.patch_embed.feat_ratio()
        embed = self.patch_embed
        self.resolve_arguments(img_size=embed.img_size, patch_size=embed.patch_size, stride=embed.stride)
        # timm reads the current size from here to configure data.
        self._traits = {**self._traits, "img_size": embed.img_size}

    @property
    def _model_args(self) -> dict[str, Any]:
        """The options with which timm saves the model and builds it again, and the version that wrote them."""
        return {**self.saved_arguments(), "saved_by": describe_origin(self)}

    @_model_args.setter
    def _model_args(self, passed: dict[str, Any]) -> None:
        pass  # timm sets the options of the call, which the constructor's arguments hold already, with the defaults

    def describe(self) -> dict[str, Any]:
        """The keys of config.json that only image models have; timm reads them, too."""
        stated = getattr(self, "pretrained_cfg", None) or default_cfgs[UNNAMED].default.to_dict() | {
            "architecture": UNNAMED
        }
        return {**timm_layout(self, stated), "model_args": self._model_args}

    @classmethod
    def rebuild(cls, config: Mapping[str, Any], changes: Mapping[str, Any]) -> ImageBackbone:
        """Build the model of a config.json through timm; its weights are initialised anew."""
        saved = {name: value for name, value in config["model_args"].items() if name != "saved_by"}
        return rebuild_timm_model(config, changes, cls.complete_arguments(saved, TRAINING_ARGUMENTS))

    def no_weight_decay(self) -> set[str]:
        """The names of the parameters that are exempt from weight decay: positions, class token, recurrences."""
        return {"pos_embed", "cls_token"} | no_weight_decay(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns that group parameters by depth, for layer-wise learning rates."""
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def flops(self, img_size: int | tuple[int, int] | None = None) -> int:
        """Count the floating-point operations of one image's forward pass; a multiply-add counts as two.

        Projections, convolutions, recurrences and attention products are counted; norms and additions are not.
        """
        size = self.patch_embed.img_size if img_size is None else img_size
        height, width = self.patch_embed.dynamic_feat_size((size, size) if isinstance(size, int) else size)
        tokens = height * width + self.num_prefix_tokens
        stem = 2 * height * width * self.patch_embed.proj.weight.numel()
        blocks: Any = self.blocks
        return stem + sum(block.flops(tokens) for block in blocks) + 2 * self.embed_dim * self.num_classes

    def _check_pool(self, pool: str) -> str:
        if pool not in POOLS:
            raise ValueError(f"global_pool={pool!r} is not one of {', '.join(map(repr, POOLS))}")
        if pool == "token" and self.class_token == "none":
            raise ValueError("global_pool='token' needs a class token; use global_pool='avg' or class_token='middle'")
        if pool == "token" and self.class_token == "first" and self.direction == "forward":
            raise ValueError(
                "direction='forward' with class_token='first': the token never sees the image; "
                "use global_pool='avg', class_token='middle' or direction='bidirectional'"
            )
        return pool


def norm_epsilon(kind: str) -> float:
    """The `eps` of a norm of a kind where `norm_eps` is None."""
    if kind not in NORM_EPSILONS:
        raise ValueError(f"norm={kind!r} is not one of {', '.join(NORM_EPSILONS)}")
    return NORM_EPSILONS[kind]


def _init_linear(module: nn.Linear) -> None:
    trunc_normal_(module.weight, std=0.02)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


# Parts of timm's Vision Transformers that this model does not have, by a part of the names of their weights.
PARTS_ELSEWHERE = {
    "reg_token": "register tokens",
    "dist_token": "the distillation token of a distilled DeiT",
    "head_dist.": "the second head of a distilled DeiT",
    ".ls1.": "a layer scale",
    ".gamma_1": "a layer scale",
    ".q_norm.": "norms of queries and keys",
    "norm_pre.": "a norm before its blocks",
    "fc_norm.": "a norm between pooling and head",
    "attn_pool.": "pooling by attention",
}


def checkpoint_filter_fn(state_dict: dict[str, Any], model: ImageBackbone) -> dict[str, Tensor]:
    """Fit a state dict to `model`: weights of timm's VisionTransformer, and positions of another grid.

    timm's attention becomes the mixer: `blocks.i.attn.qkv` is `blocks.i.mixer.in_proj` and `blocks.i.attn.proj` is
    `blocks.i.mixer.out_proj`. The position of timm's class token is added to the token itself, which has no position on
    the grid.

    A state dict does not state its grid. As many positions as the model has patches, or one more, are those of the
    model's own grid, without or with one for timm's class token. Another number of positions is read as a square grid,
    without or with one for the class token, and interpolated. Load weights of another oblong grid into a model of their
    img_size, and change it with `set_input_size`.

    Raises:
        ValueError: the positions make no square grid, or the weights have a part for which the model has no place.
    """
    state_dict = state_dict.get("model", state_dict)
    state_dict = dict(state_dict.get("state_dict", state_dict))
    for mark, part in PARTS_ELSEWHERE.items():
        if name := next((name for name in state_dict if mark in name), None):
            raise ValueError(f"the checkpoint has {part} ({name}), for which this model has no place")
    table = state_dict.get("pos_embed")
    if table is not None:
        from_timm = any(".attn.qkv." in name for name in state_dict) and "cls_token" in state_dict
        if from_timm and _has_class_position(table.shape[1], model.patch_embed.num_patches):
            state_dict["cls_token"] = state_dict["cls_token"] + table[:, :1]
            table = table[:, 1:]
        cells = table.shape[1]
        if cells != model.patch_embed.num_patches:
            side = math.isqrt(cells)
            if side * side != cells:
                raise ValueError(
                    f"pos_embed has {cells} cells, which is no square grid, and the model has a grid of "
                    f"{model.patch_embed.grid_size}; build the model at the checkpoint's img_size, then set_input_size"
                )
            table = resize_positions(table, (side, side), model.patch_embed.grid_size)
        state_dict["pos_embed"] = table
    renamed = ((".attn.qkv.", ".mixer.in_proj."), (".attn.proj.", ".mixer.out_proj."))
    for old, new in renamed:
        state_dict = {name.replace(old, new): value for name, value in state_dict.items()}
    return state_dict


def _has_class_position(positions: int, patches: int) -> bool:
    """Whether the first of timm's positions is that of the class token: with no_embed_class timm has none for it."""
    if positions in (patches, patches + 1):
        return positions > patches
    return math.isqrt(positions - 1) ** 2 == positions - 1


def create_variant(
    variant: str, pretrained: bool, chassis: Mapping[str, Any], options: Mapping[str, Any]
) -> ImageBackbone:
    """The model of a name in timm's registry: `options` of the caller, else those of `chassis`, else the defaults."""
    options = {**chassis, **options}
    saved_by = options.pop("saved_by", None)
    if saved_by is not None:  # all arguments come from a file that timm has read
        check_config_version(saved_by, f"the file of this {variant}")
        known = inspect.signature(ImageBackbone).parameters
        saved = {name: value for name, value in options.items() if name in known}
        options |= ImageBackbone.complete_arguments(saved, TRAINING_ARGUMENTS)
    device, dtype = options.pop("device", None), options.pop("dtype", None)
    features = {"out_indices": options.pop("out_indices", 3), "feature_cls": "getter"}
    with nullcontext() if device is None else torch.device(device):
        model = build_model_with_cfg(
            ImageBackbone,
            variant,
            pretrained,
            pretrained_filter_fn=checkpoint_filter_fn,
            feature_cfg=features,
            **options,
        )
    if saved_by is not None:
        check_revisions(model, saved_by["revisions"])
    return model if dtype is None else model.to(dtype)
