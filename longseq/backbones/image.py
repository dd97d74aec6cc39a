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

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from timm.layers import AttentionPoolLatent, LayerScale, Mlp, lecun_normal_, trunc_normal_
from timm.models import build_model_with_cfg, checkpoint
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import global_pool_nlc
from torch import Tensor, nn

from longseq.arguments import check_choice
from longseq.backbones.image_weights import checkpoint_filter_fn
from longseq.backbones.stack import build_blocks, mixer_options_of
from longseq.backbones.variants import UNNAMED, default_cfgs
from longseq.blocks.hooks import has_observers
from longseq.blocks.initialisation import save_rng_state
from longseq.blocks.norm import ResidualLayerNorm, ResidualRMSNorm
from longseq.blocks.patches import PatchDropout, PatchEmbed, grid_of
from longseq.blocks.positions import (
    Layout,
    insert_prefix,
    layout_of,
    move_prefix_back,
    move_prefix_first,
    resize_positions,
    split_prefix,
)
from longseq.blocks.precision import at_least_float32
from longseq.blocks.reading import COLUMNS
from longseq.blocks.residual import Block, Carried, residual_of
from longseq.blocks.sharding import full_parameters, gathers_parameters
from longseq.kernels.packing import Packing
from longseq.mixers import Mixer
from longseq.mixers.heads import largest_heads
from longseq.mixers.pattern import Pattern, spell_pattern
from longseq.models import PretrainedModel, register_kind
from longseq.parameters import no_weight_decay
from longseq.timm_models import rebuild_timm_model, timm_layout

POOLS = ("token", "avg", "max", "avgmax", "map", "")
NORMS = {"rms": ResidualRMSNorm, "layer": ResidualLayerNorm}
NORM_EPSILONS = {"rms": 1e-5, "layer": 1e-6}

# Both read types and sizes, which a symbolic trace does not have: it records the calls.
torch.fx.wrap("at_least_float32")
torch.fx.wrap("resize_positions")


class ImageBlock(Block[Any]):
    """A residual block over an image, which takes and returns only tokens, as timm's tools and hooks expect.

        x = x + ls1(mixer(norm1(x)));   x = x + ls2(mlp(norm2(x)))

    Args:
        mixer, norm, mlp, mlp_norm, drop_path: as in `Block`.
        init_values: the initial values of LayerScale, a factor for each channel of a branch; None for no factors.
        proj_drop: dropout of the mixer's output.

    With values for later layers, it takes and returns `Carried`.

    Source: Going deeper with Image Transformers (Touvron et al., 2021), equation 4, for LayerScale.
    """

    def __init__(
        self,
        mixer: Any,
        norm: nn.Module,
        *,
        mlp: nn.Module | None = None,
        mlp_norm: nn.Module | None = None,
        drop_path: float = 0.0,
        init_values: float | None = None,
        width: int,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__(mixer, norm, mlp=mlp, mlp_norm=mlp_norm, drop_path=drop_path)
        self.proj_drop = nn.Dropout(proj_drop)
        self.ls1 = nn.Identity() if init_values is None else LayerScale(width, init_values)
        self.ls2 = nn.Identity() if init_values is None or mlp is None else LayerScale(width, init_values)

    def add_branches(self, x: Tensor, branch: Tensor, packing: Packing | None = None) -> Tensor:
        return super().add_branches(x, self.ls1(self.proj_drop(branch)), packing)

    def add_mlp(self, x: Tensor, branch: Tensor, packing: Packing | None = None) -> Tensor:
        return super().add_mlp(x, self.ls2(branch), packing)

    def forward(  # type: ignore[override]
        self,
        x: Tensor | Carried,
        layout: Layout | None = None,
        *,
        token_first: bool = False,
        mask: Tensor | None = None,
    ) -> Any:
        """Transform `x [B, T, D]`.

        Args:
            layout: the positions of the patches, for directions that read columns.
            token_first: in `x` and the result, the prefix tokens come before the patches; inside the block, in the mask
                and in values, they are at their index.
            mask: `[B, T]`, True at real tokens. Outputs of the others are undefined.
        """
        if layout is None or not token_first:
            return super().forward(x, layout=layout, mask=mask, output_final_state=False)[0]
        x = _change_residual(move_prefix_back, x, layout)
        y, _ = super().forward(x, layout=layout, mask=mask, output_final_state=False)
        return _change_residual(move_prefix_first, y, layout)


@register_kind("image")
class ImageBackbone(PretrainedModel, nn.Module):
    """Patches, positions, a stack of mixing blocks, a norm, pooling and a linear head.

    Args:
        img_size, patch_size, stride: in pixels, one number or (height, width). `stride` defaults to `patch_size`; half
            of it makes patches overlap and quadruples the tokens.
        in_chans, num_classes: channels of the images; classes, 0 for no head.
        mixer, mixer_options: a name from `longseq.mixers.mixer_names()` and keywords of its constructor; or a pattern
            of names over the blocks (see `longseq.mixers.pattern.expand_pattern`) and `{name: keywords}`.
        direction: forward, bidirectional, cross or alternating (see `longseq.blocks.reading`). It sets the `causal` of
            attention, which sees all tokens in one pass for bidirectional and cross. Each mixer of a hybrid alternates
            by itself.
        share_directions: what several readings of the image share: projections or none.
        merge: sum of the readings, as in Vim's paper, or their mean, as in its published models.
        backend: the kernel backend of mixers and norms; auto takes the first that can run.
        class_token: middle, first or none, its index in the sequence that blocks read. In features, and in what hooks
            and symbolic traces (torch.fx) see at the borders of blocks, the token always comes first.
        reg_tokens: the number of register tokens, which follow the class token, or come first without one.
        no_embed_class: as in timm, False gives class and register tokens their own positions in `pos_embed`, before
            those of the patches. Such a position only adds one parameter to another.
        global_pool: as in timm: token; avg, max or avgmax (half the sum of both) over the patches; map, attention over
            the patches by one learned query; or "" for no pooling.
        pool_num_heads: the heads of global_pool="map", by default heads of at most 64 channels. timm's models pool with
            as many heads as their attention has.
        mlp_ratio: width of the MLP after each mixer, relative to `embed_dim`; 0 leaves the MLPs out.
        norm, norm_eps: rms or layer; and the number added to the variance, by default 1e-5 for rms and 1e-6 for layer.
        init_values: the initial values of LayerScale in each branch, such as 1e-4; None for blocks without.
        residual_in_float32: keep the residual in float32 when the weights are in half precision.
        depth_scaled_init: divide the initial output projections of the mixers by sqrt(depth).
        recompute: the part that the backward pass recomputes to save memory: none; mixer: everything between the
            projections of mixers, which is cheap; block: each block.
        drop_rate, pos_drop_rate, proj_drop_rate: dropout before the head; after the positions; and of the outputs of
            mixers and inside MLPs.
        patch_drop_rate: the share of the patches that each image loses in training; the others keep their order.
        drop_path_rate: drop path of the last block, growing linearly from 0.
        dynamic_img_size: accept any image of at least one patch; positions are interpolated to its grid.
        dynamic_img_pad: complete the last row and column of patches by zeros instead of dropping their pixels.

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
        reg_tokens: int = 0,
        no_embed_class: bool = True,
        global_pool: str = "token",
        pool_num_heads: int | None = None,
        mlp_ratio: float = 0.0,
        norm: str = "rms",
        norm_eps: float | None = None,
        init_values: float | None = None,
        residual_in_float32: bool = True,
        depth_scaled_init: bool = True,
        recompute: str = "none",
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        dynamic_img_size: bool = False,
        dynamic_img_pad: bool = False,
    ) -> None:
        super().__init__()
        restore_rng_state = save_rng_state()
        self.mixer_name = spell_pattern(mixer)
        self.direction = direction
        self.class_token = class_token
        self.merge = merge
        self.no_embed_class = no_embed_class
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
            dynamic_img_pad=dynamic_img_pad,
        )
        self.num_reg_tokens = reg_tokens
        self.num_prefix_tokens = layout_of(*self.patch_embed.grid_size, class_token, reg_tokens).prefix
        self.has_class_token = self.num_prefix_tokens > reg_tokens
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if self.has_class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, reg_tokens, embed_dim)) if reg_tokens else None
        positions = self.patch_embed.num_patches + self.num_prefix_positions
        self.pos_embed = nn.Parameter(torch.empty(1, positions, embed_dim))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.patch_drop = PatchDropout(patch_drop_rate) if patch_drop_rate else nn.Identity()

        self.norm_eps = NORM_EPSILONS[norm] if norm_eps is None else norm_eps
        make_norm = partial(NORMS[norm], embed_dim, eps=self.norm_eps, backend=backend)
        make_mlp = partial(Mlp, embed_dim, int(embed_dim * mlp_ratio), drop=proj_drop_rate) if mlp_ratio else None
        blocks = build_blocks(
            partial(ImageBlock, width=embed_dim, init_values=init_values, proj_drop=proj_drop_rate),
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
        if patch_drop_rate and any(COLUMNS in block.mixer.orders for block in blocks):
            raise ValueError("patch_drop_rate leaves no grid whose columns direction='cross' could read")
        self.feature_info = [
            {"module": f"blocks.{layer}", "num_chs": embed_dim, "reduction": self.patch_embed.feat_ratio()}
            for layer in range(depth)
        ]
        self.norm = make_norm()
        self._make_norm = make_norm
        self._pool_ratio = mlp_ratio or 4.0
        self._pool_heads = pool_num_heads or embed_dim // largest_heads(embed_dim, 64)
        self.attn_pool = self._build_attention_pool() if global_pool == "map" else None
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes > 0 else nn.Identity()
        self.depth_scaled_init = depth_scaled_init
        overlapping = self.patch_embed.stride != self.patch_embed.patch_size
        self.resolve_arguments(
            stride=self.patch_embed.stride if overlapping else None,  # which other patch sizes change, too
            mixer=self.mixer_name,
            mixer_options=mixer_options_of(mixer, mixer_options, self.blocks, without=self.decided_options),
        )
        # timm reads these from a model.
        self._traits = {"img_size": self.patch_embed.img_size, "fixed_input_size": not dynamic_img_size}
        restore_rng_state()
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise all weights, also those of a model from the meta device after `to_empty`.

        As in the Vision Transformer; recurrences then set their own initial values. The published code of Vim and
        Longhorn initialises the projections of blocks as `nn.Linear` does: twice as large at 192 channels, and eight
        times as large for the projections from 12 channels to Longhorn's rates.
        """
        blocks: Any = self.blocks
        with full_parameters(self, without=blocks):
            trunc_normal_(self.pos_embed, std=0.02)
            if self.cls_token is not None:
                trunc_normal_(self.cls_token, std=0.02)
            if self.reg_token is not None:
                trunc_normal_(self.reg_token, std=0.02)
            lecun_normal_(self.patch_embed.proj.weight)
            assert self.patch_embed.proj.bias is not None
            nn.init.zeros_(self.patch_embed.proj.bias)
            for part in (self.norm, self.head):
                self._init_part(part)
            if self.attn_pool is not None:
                self._init_part(self.attn_pool)
        for block in blocks:
            with full_parameters(block):
                self._init_part(block)

    def _init_part(self, part: nn.Module) -> None:
        for module in part.modules():
            if isinstance(module, nn.Linear):
                _init_linear(module)
            elif isinstance(module, AttentionPoolLatent):
                module.init_weights()
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
    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Return normalised tokens `[B, T, D]`: class and register tokens, if any, then the patches in row order.

        With `attn_mask [B, T]`, in the order of the result, blocks read only the tokens at True; the others have no
        meaning.
        """
        x, layout = self._embed(x)
        mask = self._sequence_mask(attn_mask, x, layout)
        for block in self.blocks:
            x = self._run(block, x, layout, mask)
        return self.norm(self._prefix_first(x, layout))

    @gathers_parameters
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the tokens of `forward_features` and classify; `pre_logits` stops before the last layer."""
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    @gathers_parameters
    def pool(self, x: Tensor, pool_type: str | None = None) -> Tensor:
        """Pool the tokens of `forward_features` by `global_pool`, or by another way without parameters."""
        pool_type = self.global_pool if pool_type is None else pool_type
        if pool_type != "map":
            return global_pool_nlc(x, pool_type, self.num_prefix_tokens)
        assert self.attn_pool is not None, "the model has no pooling by attention"
        return self.attn_pool(x[:, self.num_prefix_tokens :])

    def _embed(self, x: Tensor) -> tuple[Tensor, Layout]:
        """Turn images into the sequence `[B, T, D]` that the blocks read, and its layout."""
        x = self.patch_embed(x)  # [B, h, w, D]
        positions: Tensor = self.pos_embed
        grid = self.patch_embed.grid_size
        own = self.num_prefix_positions
        if self.dynamic_img_size:
            grid = (x.shape[1], x.shape[2])
            positions = resize_positions(positions, self.patch_embed.grid_size, grid, own)
        x = x.flatten(1, 2) + (positions[:, own:] if own else positions)
        layout = layout_of(*grid, self.class_token, self.num_reg_tokens)
        if self.training and isinstance(self.patch_drop, PatchDropout):
            x = self.patch_drop(x)
            layout = layout_of(1, x.shape[1], self.class_token, self.num_reg_tokens)
        tokens: list[Tensor] = [token for token in (self.cls_token, self.reg_token) if token is not None]
        if tokens:
            prefix = tokens[0] if len(tokens) == 1 else torch.cat(tokens, dim=1)
            x = insert_prefix(x, prefix + positions[:, :own] if own else prefix, layout)
        x = self.pos_drop(x)
        return (at_least_float32(x) if self.residual_in_float32 else x), layout

    def _sequence_mask(self, attn_mask: Tensor | None, x: Tensor, layout: Layout) -> Tensor | None:
        """A caller's mask, whose prefix tokens come first, in the order of the sequence `x [B, T, D]`."""
        if attn_mask is None:
            return None
        mask = attn_mask.flatten(1) if attn_mask.ndim == 4 else attn_mask
        if mask.dtype != torch.bool or mask.shape != x.shape[:2]:
            raise ValueError(f"attn_mask must hold booleans {list(x.shape[:2])}")
        return move_prefix_back(mask.unsqueeze(-1), layout).squeeze(-1)

    def _run(self, block: nn.Module, x: Any, layout: Layout, mask: Tensor | None = None) -> Any:
        run = partial(checkpoint, block) if self.grad_checkpointing and not torch.jit.is_tracing() else block
        options: dict[str, Any] = {} if mask is None else {"mask": mask}
        # Hooks and symbolic traces see the class token first, as in timm's models. Other runs avoid the two copies.
        if self.class_token == "middle" and (isinstance(residual_of(x), torch.fx.Proxy) or has_observers(block)):
            x = run(_change_residual(move_prefix_first, x, layout), layout, token_first=True, **options)
            return _change_residual(move_prefix_back, x, layout)
        return run(x, layout, **options)

    def _prefix_first(self, x: Tensor | Carried, layout: Layout) -> Tensor:
        x = residual_of(x)
        return move_prefix_first(x, layout) if self.class_token == "middle" else x

    @property
    def num_prefix_positions(self) -> int:
        """The rows of `pos_embed` before the positions of patches."""
        return 0 if self.no_embed_class else self.num_prefix_tokens

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
        attn_mask: Tensor | None = None,
    ) -> Any:
        """Return the outputs of blocks and the features; arguments and results are those of timm's VisionTransformer.

        Args:
            x: images `[B, C, H, W]`.
            indices: the last n blocks, those with the given indices, or all.
            return_prefix_tokens: pair each intermediate with its class and register tokens `[B, P, D]`.
            norm: apply the final norm to intermediates too.
            stop_early: leave out the blocks after the last index.
            output_fmt: NCHW, `[B, D, h, w]`; or NLC, `[B, N, D]`.
            intermediates_only: return only the list of intermediates.
            output_dict: return a dictionary with the keys image_intermediates, image_intermediates_prefix (on request)
                and image_features.
            attn_mask: see `forward_features`.
        """
        check_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        taken, last = feature_take_indices(len(self.blocks), indices)
        x, layout = self._embed(x)
        mask = self._sequence_mask(attn_mask, x, layout)
        taps = []
        for index, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run(block, x, layout, mask)
            if index in taken:
                tapped = residual_of(x)
                taps.append(split_prefix(self.norm(tapped) if norm else tapped, layout))
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
                result["image_features"] = self.norm(self._prefix_first(x, layout))
            return result
        listed = list(zip(intermediates, tokens, strict=True)) if with_tokens else intermediates
        return listed if intermediates_only else (self.norm(self._prefix_first(x, layout)), listed)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | list[int] | tuple[int, ...] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        attn_mask: Tensor | None = None,
    ) -> list[Any]:
        """The outputs of blocks, in the interface of DINO and timm's VisionTransformer; see `forward_intermediates`.

        `n` is the last n blocks or the indices of blocks; `reshape` gives grids `[B, D, h, w]` instead of `[B, N, D]`.
        """
        return self.forward_intermediates(
            x,
            list(n) if isinstance(n, tuple) else n,
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            output_fmt="NCHW" if reshape else "NLC",
            intermediates_only=True,
            attn_mask=attn_mask,
        )

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
        """Replace the head by one for `num_classes` (0: none), and the pooling if given; new parts get new weights."""
        if global_pool is not None:
            self.global_pool = self._check_pool(global_pool)
            if self.global_pool != "map":
                self.attn_pool = None
            elif self.attn_pool is None:
                self.attn_pool = self._build_attention_pool().to(self.pos_embed.device, self.pos_embed.dtype)
                self._init_part(self.attn_pool)
                self.attn_pool.train(self.training)
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
            table = self.pos_embed.detach()
            table = resize_positions(table, grid, self.patch_embed.grid_size, self.num_prefix_positions)
            self.pos_embed = nn.Parameter(table, requires_grad=self.pos_embed.requires_grad)
        for feature in self.feature_info:
            feature["reduction"] = self.patch_embed.feat_ratio()
        embed = self.patch_embed
        self.resolve_arguments(img_size=embed.img_size, patch_size=embed.patch_size)
        # timm reads the current size from here to configure data.
        self._traits = {**self._traits, "img_size": embed.img_size}

    @property
    def _model_args(self) -> dict[str, Any]:
        """The options with which timm builds the model again."""
        return self.saved_arguments()

    @_model_args.setter
    def _model_args(self, passed: dict[str, Any]) -> None:
        pass  # timm sets the options of the call, which `arguments` already has

    def describe(self) -> dict[str, Any]:
        """The keys of config.json that only image models have; timm reads them, too."""
        stated = getattr(self, "pretrained_cfg", None) or default_cfgs[UNNAMED].default.to_dict() | {
            "architecture": UNNAMED
        }
        return {**timm_layout(self, stated), "model_args": self._model_args}

    @classmethod
    def rebuild(cls, config: Mapping[str, Any], changes: Mapping[str, Any]) -> ImageBackbone:
        """Build the model of a config.json through timm, with new weights."""
        model, saved = rebuild_timm_model(config, changes), config["model_args"]
        padded = saved.get("dynamic_img_pad", False)
        grid = grid_of(saved["img_size"], saved["patch_size"], saved.get("stride"), padded=padded)
        if model.patch_embed.grid_size != grid:
            raise ValueError(f"the weights have {grid} patches: call model.set_input_size after loading")
        return model

    def no_weight_decay(self) -> set[str]:
        """The names of the parameters exempt from weight decay: positions, prefix tokens, recurrences."""
        registers = set() if self.reg_token is None else {"reg_token"}
        return {"pos_embed", "cls_token"} | registers | no_weight_decay(self)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns that group parameters by depth, for layer-wise learning rates."""
        return {
            "stem": r"^cls_token|reg_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def flops(self, img_size: int | tuple[int, int] | None = None) -> int:
        """Count the operations of one image, without norms and additions; a multiply-add counts as two."""
        size = self.patch_embed.img_size if img_size is None else img_size
        height, width = self.patch_embed.dynamic_feat_size((size, size) if isinstance(size, int) else size)
        tokens = height * width + self.num_prefix_tokens
        stem = 2 * height * width * self.patch_embed.proj.weight.numel()
        blocks: Any = self.blocks
        head = 2 * self.embed_dim * self.num_classes
        return stem + sum(block.flops(tokens) for block in blocks) + self._pool_flops(height * width) + head

    def _pool_flops(self, patches: int) -> int:
        if self.attn_pool is None:
            return 0
        linears = [layer for layer in self.attn_pool.modules() if isinstance(layer, nn.Linear)]
        once = sum(layer.weight.numel() for layer in linears if layer is not self.attn_pool.kv)
        return 2 * (once + patches * (self.attn_pool.kv.weight.numel() + 2 * self.embed_dim))

    def _build_attention_pool(self) -> AttentionPoolLatent:
        make_norm: Any = lambda width, **_: self._make_norm()  # noqa: E731 - timm passes a device and a type
        return AttentionPoolLatent(
            self.embed_dim, num_heads=self._pool_heads, mlp_ratio=self._pool_ratio, norm_layer=make_norm
        )

    def _check_pool(self, pool: str) -> str:
        check_choice("global_pool", pool, POOLS)
        if pool == "token" and self.class_token == "none":
            raise ValueError("global_pool='token' needs a class token")
        return pool


def _change_residual(change: Callable[[Tensor, Layout], Tensor], x: Any, layout: Layout) -> Any:
    return Carried(change(x.residual, layout), x.values) if isinstance(x, Carried) else change(x, layout)


def _init_linear(module: nn.Linear) -> None:
    trunc_normal_(module.weight, std=0.02)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def create_variant(
    variant: str, pretrained: bool, chassis: Mapping[str, Any], options: Mapping[str, Any]
) -> ImageBackbone:
    """The model of a name in timm's registry; `options` of the caller override `chassis`."""
    options = {**chassis, **options}
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
    return model if dtype is None else model.to(dtype)
