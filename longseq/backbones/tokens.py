"""Token models with exchangeable mixers: embedding, blocks, norm, and a head that scores every token of the vocabulary.

model = TokenBackbone(vocab_size=256, d_model=128, depth=4, mixer="3xdeltanet+attention")
logits, state = model(tokens)                       # tokens [B, T], logits [B, T, vocab_size]
logits, state = model.step(next_token, state)       # next_token [B], logits [B, vocab_size]
text = model.generate(prompt, 100)                  # [B, T + 100]; on a GPU faster with cuda_graph=True
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import Mlp, trunc_normal_
from timm.models import checkpoint
from torch import Tensor, nn

from longseq.arguments import check_choice
from longseq.backbones.generation import Continuation
from longseq.backbones.sampling import Sampling, TokenSampler
from longseq.backbones.stack import build_blocks, mixer_options_of
from longseq.backbones.vocabulary_loss import SummedLoss, sum_scored, summed_loss, token_losses
from longseq.blocks.channel_mixing import ChannelMixing, ChannelMixing7
from longseq.blocks.hooks import is_replaceable
from longseq.blocks.initialisation import save_rng_state
from longseq.blocks.mlp import SwiGLU
from longseq.blocks.norm import ResidualLayerNorm, ResidualRMSNorm
from longseq.blocks.precision import at_least_float32
from longseq.blocks.residual import Block, PostNormBlock, residual_of
from longseq.blocks.rotary import count_positions
from longseq.blocks.sharding import full_parameters, gathers_parameters
from longseq.kernels.packing import Packing, pack_like
from longseq.mixers import Mixer
from longseq.mixers.base import check_state_rows
from longseq.mixers.pattern import Pattern, spell_pattern
from longseq.models import PretrainedModel, register_kind
from longseq.parameters import no_weight_decay
from longseq.state import Device, StateTree, loadable

NORMS: dict[str, Callable[..., nn.Module]] = {"rms": ResidualRMSNorm, "layer": ResidualLayerNorm}
MLPS: dict[str, Callable[..., nn.Module]] = {
    "swiglu": SwiGLU,
    "gelu": lambda width, hidden, **options: Mlp(width, hidden),
    "rwkv": lambda width, hidden, bias, **options: ChannelMixing(width, hidden, **options),
    "rwkv7": lambda width, hidden, bias, **options: ChannelMixing7(width, hidden, **options),
}
BLOCKS: dict[str, type[Block[Any]]] = {"pre": Block, "post": PostNormBlock}
POSITIONS = ("none", "learned")
DIRECTIONS = ("forward", "bidirectional", "alternating")

# The name of these language models among those of transformers (see `longseq.tools.hugging_face.causal_lm`).
MODEL_TYPE = "longseq"


def mlp_width(d_model: int, ratio: float | None = None, mlp: str | None = "swiglu") -> int:
    """Width of an MLP: `ratio` times `d_model`, or 8/3 of it (7/2 for rwkv, 4 for rwkv7), up to a multiple of 64.

    Gated MLPs then have as many parameters as an MLP of two matrices with ratio 4, such as rwkv7, and so does rwkv,
    whose third matrix is square. Matrix products of half precision need a multiple of 8 to be fast.
    """
    if ratio is not None:
        return round(d_model * ratio)
    sixths = {"rwkv": 21, "rwkv7": 24}.get(mlp or "", 16)
    return -(-sixths * d_model // 384) * 64


@loadable
class TokenState(NamedTuple):
    """The states of all blocks, and the number of tokens so far, `[B]` (None without learned positions)."""

    layers: tuple[tuple[StateTree, ...], ...]
    position: Tensor | None


@register_kind("token")
class TokenBackbone(PretrainedModel, nn.Module):
    """Embedding, `depth` times (norm, mixer, add; norm, MLP, add), norm, head.

    With direction="forward" it is a language model: a sequence, any split of it with the state carried over, and
    token-by-token steps give the same numbers. With direction="bidirectional" it is an encoder without a state: the
    features of each token see all of its sequence. Packed and padded sequences do not affect each other.

    Args:
        vocab_size: number of tokens.
        mixer, mixer_options: a name from `longseq.mixers.mixer_names()` and keywords of its constructor; or a pattern
            of names over the blocks (see `longseq.mixers.pattern.expand_pattern`) and `{name: keywords}`.
        direction: forward, bidirectional or alternating (see `longseq.blocks.reading`). It sets the `causal` of
            attention, which sees all tokens in one pass for bidirectional. Each mixer of a hybrid alternates by itself.
        share_directions: what both readings of a bidirectional layer share: projections or none.
        merge: sum or mean of the two readings.
        mlp: swiglu, gelu, rwkv and rwkv7 (the channel mixings of RWKV-4 and RWKV-7, which also read the token before;
            only for direction="forward"), or None for blocks without an MLP.
        mlp_ratio: width of the MLP relative to `d_model`; None: 8/3 of it, of rwkv 7/2, of rwkv7 4, rounded up to a
            multiple of 64.
        mlp_bias: biases in swiglu; gelu always has them, rwkv and rwkv7 never.
        norm, norm_eps: rms or layer, and the number added to the variance.
        norm_order: pre norms the input of a mixer or an MLP, post its output (as in OLMo 2).
        positions: none (the recurrence itself depends on the order), or learned: a table of `max_length` vectors that
            is added to the embeddings.
        embedding_norm: norm the embeddings before the first block, as RWKV does.
        tie_embeddings: the head scores a token by its embedding.
        dropout: of the embeddings.
        drop_path: probability of leaving out a branch of the last block, growing linearly from 0.
        residual_in_float32: keep the residual in float32 when the weights are in half precision.
        recompute: the part that the backward pass recomputes to save memory: none; mixer: everything between the
            projections of mixers, and the products of gated MLPs, which is cheap; block: each block.
        backend: the kernel backend of mixers, norms and MLPs; auto takes the first that can run.

    Raises:
        ValueError: an option has a value that does not exist or contradicts another.
    """

    decided_options = ("causal",)

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int = 128,
        depth: int = 2,
        mixer: Pattern = "deltanet",
        mixer_options: dict[str, Any] | None = None,
        direction: str = "forward",
        share_directions: str = "projections",
        merge: str = "sum",
        mlp: str | None = "swiglu",
        mlp_ratio: float | None = None,
        mlp_bias: bool = False,
        norm: str = "rms",
        norm_eps: float = 1e-5,
        norm_order: str = "pre",
        positions: str = "none",
        max_length: int | None = None,
        embedding_norm: bool = False,
        tie_embeddings: bool = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        residual_in_float32: bool = True,
        recompute: str = "none",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        restore_rng_state = save_rng_state()
        check_choice("direction", direction, DIRECTIONS)
        check_choice("positions", positions, POSITIONS)
        if mlp in ("rwkv", "rwkv7") and direction != "forward":
            raise ValueError(f"mlp={mlp!r} reads the token before, which direction={direction!r} does not have")
        self.mixer_name = spell_pattern(mixer)
        self.direction = direction
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.max_length = max_length if positions == "learned" else None
        self.residual_in_float32 = residual_in_float32
        self.grad_checkpointing = recompute == "block"
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = None if self.max_length is None else nn.Embedding(self.max_length, d_model)
        self.dropout = nn.Dropout(dropout)
        make_norm = partial(NORMS[norm], d_model, eps=norm_eps, backend=backend)
        self.embedding_norm = make_norm() if embedding_norm else None
        switches = {"recompute": recompute == "mixer", "backend": backend}
        width = mlp_width(d_model, mlp_ratio, mlp)
        make_mlp = None if mlp is None else partial(MLPS[mlp], d_model, width, bias=mlp_bias, **switches)
        blocks = build_blocks(
            BLOCKS[norm_order],
            depth,
            d_model,
            mixer=mixer,
            mixer_options=mixer_options,
            direction=direction,
            share_directions=share_directions,
            merge=merge,
            backend=backend,
            make_norm=make_norm,
            make_mlp=make_mlp,
            drop_path=drop_path,
            recompute=recompute,
        )
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = make_norm()
        self.head = None if tie_embeddings else nn.Linear(d_model, vocab_size, bias=False)
        self.resolve_arguments(
            mixer=self.mixer_name,
            mixer_options=mixer_options_of(mixer, mixer_options, self.blocks, without=self.decided_options),
            mlp_ratio=width / d_model,
        )
        restore_rng_state()
        self.init_weights()

    @property
    def piece_multiple(self) -> int:
        """Cuts at multiples of this number of tokens leave all numbers as they are (see `longseq.mixers.Mixer`)."""
        return math.lcm(*(mixer.piece_multiple for block in self.blocks for mixer in block.mixer.readers))

    def describe_use(self) -> dict[str, Any]:
        use = super().describe_use()
        if self.direction != "forward":
            return use
        return {"architectures": ["LongseqForCausalLM"], "model_type": MODEL_TYPE, **use}

    def init_weights(self) -> None:
        """Initialise all weights, also those of a model from the meta device after `to_empty`.

        Projections are initialised as by `nn.Linear`; those into the residual are divided by the root of their number.
        Recurrences set their own initial values.

        The standard deviation of `nn.Linear` is 1/sqrt(3 d_model). GPT-2's constant 0.02 equals it at a width of 833.
        At a width of 64 the constant is about a quarter of it, and keys and gates, products of several projections,
        start too small to learn from: after five epochs of data=mqar, Longhorn's accuracy is 0.06 with the constant,
        and 0.33 with 1/sqrt(3 d_model).

        Sources: GPT-2 (Radford et al., 2019), section 2.3, for the residual: 2 depth where blocks have an MLP; Mamba
        (Gu and Dao, 2023), with depth where blocks have none.
        """
        for part in (self.embedding, self.positions, self.embedding_norm, *self.blocks, self.norm, self.head):
            if part is not None:
                with full_parameters(part):  # one after the other: together they may not fit on a device
                    self.init_part(part)

    def init_part(self, part: nn.Module) -> None:
        """Initialise a part: the embedding, a block or its mixer, a norm or the head."""
        for module in part.modules():
            if isinstance(module, nn.Embedding):
                trunc_normal_(module.weight, std=0.02)
            elif not isinstance(module, Mixer) and hasattr(module, "reset_parameters"):
                reset: Any = module.reset_parameters
                reset()
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        mixers = [module for module in part.modules() if isinstance(module, Mixer)]
        for mixer in mixers:
            mixer.reset_parameters()
        branches = sum(1 if block.mlp is None else 2 for block in self.blocks)
        for last in (*(mixer.out_proj for mixer in mixers), getattr(getattr(part, "mlp", None), "fc2", None)):
            if last is not None:
                last.weight.data.div_(math.sqrt(branches))

    def forward(
        self, tokens: Tensor, state: TokenState | None = None, *, cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None, output_final_state: bool = True,
    ) -> tuple[Tensor, TokenState | None]:  # fmt: skip
        """Score the vocabulary at each token: for direction="forward" the token that follows.

        Args:
            tokens: `[B, T]` whole numbers below `vocab_size`.
            state: the state of an earlier call (direction="forward" only); None starts a sequence.
            cu_seqlens: `[N + 1]`, the borders of N sequences packed into one row (B = 1), or their `Packing`; the state
                then has N rows.
            mask: `[B, T]`, True at real tokens. Padding does not change the state; its scores are undefined.
            output_final_state: False saves memory in training.

        Returns:
            Logits `[B, T, vocab_size]` and the state after the last real token, or None for other directions.

        Raises:
            ValueError: a state is given to a model that does not read forward; `cu_seqlens` or `mask` does not fit
                `tokens`.
        """
        x, state = self.forward_features(
            tokens, state, cu_seqlens=cu_seqlens, mask=mask, output_final_state=output_final_state
        )
        return self.forward_head(x), state

    @gathers_parameters
    def forward_features(
        self, tokens: Tensor, state: TokenState | None = None, *, cu_seqlens: Tensor | Packing | None = None,
        mask: Tensor | None = None, output_final_state: bool = True, max_length: int | None = None,
        added: Tensor | None = None,
    ) -> tuple[Tensor, TokenState | None]:  # fmt: skip
        """Return normalised features `[B, T, d_model]` and the state; the arguments are those of `forward`.

        With `max_length` the state is preallocated (see `preallocate`), layer by layer, which needs less memory. `added
        [B, T, d_model]` is added to the embeddings of the tokens.
        """
        output_final_state = output_final_state and self.direction == "forward"
        if state is not None:
            self._check_forward("a state")
        layers, position = (None, None) if state is None else state
        packing, places = pack_like(cu_seqlens, tokens), None
        if self.positions is not None:
            check_state_rows(position, tokens.shape[0] if packing is None else packing.count)
            places, position = count_positions(tokens, position, cu_seqlens=packing, mask=mask)
        x = self.embed(tokens, places, added)
        states = []
        options: dict[str, Any] = {"cu_seqlens": packing, "mask": mask, "output_final_state": output_final_state}
        for block, layer in zip(self.blocks, layers or len(self.blocks) * (None,), strict=True):
            run = partial(checkpoint, block) if self.grad_checkpointing and self.training else block
            x, layer = run(x, layer, **options)
            if layer is not None and max_length is not None:
                layer = block.change_mixer_state(layer, partial(block.mixer.preallocate, max_length=max_length))
            states.append(layer)
        x = self.norm(residual_of(x))
        return x, TokenState(tuple(states), position) if output_final_state else None

    @gathers_parameters
    def forward_head(self, features: Tensor) -> Tensor:
        """Score the vocabulary by features `[..., d_model]`: `[..., vocab_size]`."""
        if self.head is not None:
            return self.head(features)
        return nn.functional.linear(features, self.tied_weight(features.device))

    @gathers_parameters
    def summed_loss(self, features: Tensor, target: Tensor, *, z_loss: float = 0.0) -> SummedLoss:
        """Score features `[..., d_model]` and sum the losses of their targets `[...]`, in chunks of tokens.

        Targets are tokens, or -100 for none. `z_loss` weights the penalty on the scores' normalisers (see
        `longseq.backbones.vocabulary_loss`). A head that an adapter replaced scores all tokens at once.
        """
        if self.head is not None and not is_replaceable(self.head, nn.Linear):
            return sum_scored(self.head(features), target, z_loss=z_loss)
        weight = self.tied_weight(features.device) if self.head is None else self.head.weight
        return summed_loss(features, weight, target, z_loss=z_loss)

    @gathers_parameters
    def token_losses(self, features: Tensor, target: Tensor) -> Tensor:
        """The loss of each target `[...]` for features `[..., d_model]`, as in `summed_loss`, without a gradient."""
        return token_losses(features, self.forward_head, self.vocab_size, target)

    @gathers_parameters
    def step(self, token: Tensor, state: TokenState) -> tuple[Tensor, TokenState]:
        """Read one more token `[B]`: logits `[B, vocab_size]` and the next state. The model must read forward."""
        self._check_forward("step")
        position = state.position
        check_state_rows(position, token.shape[0])
        x = self.embed(token, position)
        states = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            x, layer = block.step(x, layer)
            states.append(layer)
        x = self.norm(residual_of(x))
        return self.forward_head(x), TokenState(tuple(states), None if position is None else position + 1)

    def initial_state(self, batch: int, device: Device = None, dtype: torch.dtype | None = None) -> TokenState:
        """Return the state before the first token; `dtype` is the type of the weights. ValueError as in `step`."""
        self._check_forward("a state")
        layers = tuple(block.initial_state(batch, device, dtype) for block in self.blocks)
        counted = self.positions is not None
        return TokenState(layers, torch.zeros(batch, dtype=torch.long, device=device) if counted else None)

    def preallocate(self, state: TokenState, max_length: int) -> TokenState:
        """Return a state with room for `max_length` tokens in all, which steps fill in place.

        Layers of attention then have a cache of fixed size (see `longseq.mixers.attention.KeyValueCache`), and a step
        copies no earlier keys and values. Other layers keep their state; Hyena's still grows. If the number of
        tokens is unknown, double the room whenever `room` is 0, at the price of a copy.

        Raises:
            ValueError: the state has more than `max_length` tokens.
        """
        return self._change(state, lambda mixer, layer: mixer.preallocate(layer, max_length))

    def trim(self, state: TokenState) -> TokenState:
        """Return a state in the form that `forward` returns, without the room from `preallocate`."""
        return self._change(state, lambda mixer, layer: mixer.trim(layer))

    def room(self, state: TokenState) -> int | None:
        """Count the tokens for which a preallocated state has room; None: any number."""
        layers = zip(self.blocks, state.layers, strict=True)
        found = [block.mixer.room(block.mixer_state(layer)) for block, layer in layers]
        return min((tokens for tokens in found if tokens is not None), default=None)

    def _change(self, state: TokenState, change: Callable[[Any, Any], Any]) -> TokenState:
        """Return a state with the results of `change` in place of the mixers' states."""
        layers = zip(self.blocks, state.layers, strict=True)
        changed = [block.change_mixer_state(layer, partial(change, block.mixer)) for block, layer in layers]
        return state._replace(layers=tuple(changed))

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        cuda_graph: bool = False,
    ) -> Tensor:
        """Continue `prompt [B, T]` by sampled tokens: `[B, T + max_new_tokens]`.

        `temperature` divides the logits, 0 takes the best token; `top_k` keeps the k best tokens, `top_p` the fewest
        whose probabilities reach p. `generator` gives the seed of each row. `cuda_graph` records the step and the
        choice of the token as a `StepGraph`, with the same tokens. Memory does not grow after the prompt, except with
        Hyena.

        Raises:
            ValueError: the model does not read forward, an option has an invalid value, or the scores are not finite.
        """
        self._check_forward("generate")
        sampling = Sampling(temperature, top_k, top_p)
        if max_new_tokens < 1:
            return prompt.clone()
        features, state = self.forward_features(prompt, max_length=prompt.shape[1] + max_new_tokens)
        assert state is not None
        device = "cpu" if generator is None else generator.device
        seeds = torch.randint(2**63 - 1, prompt.shape[:1], generator=generator, device=device).to(prompt.device)
        sampler = TokenSampler(sampling, seeds)
        writing = Continuation(self, state, self.forward_head(features[:, -1]), sampler, cuda_graph=cuda_graph)
        del features, state  # they would take memory for as long as tokens are drawn
        tokens = nn.functional.pad(prompt, (0, max_new_tokens))
        for new in tokens[:, prompt.shape[1] :].unbind(1):
            new.copy_(writing.draw())
        sampler.check()
        return tokens

    def tied_weight(self, device: torch.device) -> Tensor:
        """The embeddings of all tokens, by which a model without a head scores features on `device`."""
        # An adapter replaces the layer, and has the unadapted `weight`. Offloading replaces its `forward`, and leaves a
        # `weight` without values.
        if isinstance(self.embedding, nn.Embedding) and "forward" not in vars(self.embedding):
            return self.embedding.weight
        return self.embedding(torch.arange(self.vocab_size, device=device))

    def embed(self, tokens: Tensor, places: Tensor | None, added: Tensor | None = None) -> Tensor:
        """The residual before the first block. `added`: embeddings to sum in, same shape as the token embeddings."""
        x = self.embedding(tokens)
        if added is not None:
            x = x + added
        if self.positions is not None:
            assert places is not None
            x = x + self.positions(places)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.dropout(x)
        return at_least_float32(x) if self.residual_in_float32 else x

    def _check_forward(self, what: str) -> None:
        if self.direction != "forward":
            raise ValueError(f"direction={self.direction!r}: {what} needs a model with direction='forward'")

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """Return the head; a model with tied embeddings has none of its own."""
        return nn.Identity() if self.head is None else self.head

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns that group parameters by depth, for layer-wise learning rates and frozen layers."""
        return {"stem": r"^embedding|^positions", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def no_weight_decay(self) -> set[str]:
        """The names of the parameters that are exempt from weight decay: positions and recurrences."""
        return ({"positions.weight"} if self.positions is not None else set()) | no_weight_decay(self)

    def flops(self, tokens: int) -> int:
        """Count the operations over one sequence, without norms and additions; a multiply-add counts as two."""
        return sum(block.flops(tokens) for block in self.blocks) + 2 * tokens * self.d_model * self.vocab_size
