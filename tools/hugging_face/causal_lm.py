"""The language models of longseq as models of transformers.

    import longseq.tools.hugging_face.causal_lm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER)       # what longseq.save_pretrained wrote
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model.generate(**tokenizer(["Once", "In the beginning"], padding=True, return_tensors="pt"))

Importing this module enters the classes in the tables of transformers. The folders of both libraries are the same: what
one saves the other loads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from longseq.backbones.tokens import MODEL_TYPE, TokenBackbone
from longseq.mixers.base import check_state_rows
from longseq.tools.hugging_face.backbone import BackboneConfig, BackboneModel, check_options
from longseq.tools.hugging_face.cache import CACHE_NAME, LongseqCache, rows_with_padding

# Options of a call that change nothing here: the loss takes the first, positions follow from the cache, and `generate`
# hands on the tokenizers with which it finds its stop strings itself.
_TAKEN = ("num_items_in_batch", "cache_position", "tokenizer", "assistant_tokenizer")


class LongseqConfig(BackboneConfig):
    """The config.json of a `TokenBackbone` (see `longseq.models`), as transformers reads and writes it.

        LongseqConfig(model_args={"vocab_size": 257, "d_model": 512, "depth": 8, "mixer": "deltanet"})

    `model_args` are arguments of `TokenBackbone`; those that are left out have its defaults.
    """

    model_type = MODEL_TYPE
    backbone = TokenBackbone

    kind: str = "token"
    use_cache: bool = True

    @property
    def tie_word_embeddings(self) -> bool:
        """True if the head scores a token by its embedding. It has no parameters of its own then."""
        # transformers 5.20 asks before the defaults are filled in.
        return bool(self._arguments.get("tie_embeddings"))

    def build(self) -> Any:
        """The model, with initialised weights."""
        model = super().build()
        if not isinstance(model, TokenBackbone) or model.direction != "forward":
            raise ValueError("a language model needs direction=forward")
        return model


class LongseqForCausalLM(BackboneModel, GenerationMixin):
    """A `TokenBackbone`, `self.model`, with the interface of transformers.

    The cache of `generate` is the recurrent state (see `longseq.tools.hugging_face.cache`). Padding on either side does
    not change it.
    """

    config_class = LongseqConfig
    config: LongseqConfig
    _no_split_modules: ClassVar[list[str]] = ["TokenBackbone"]  # a device holds the whole model
    _is_stateful = True  # the state cannot be taken back to an earlier token

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.model.head is None:
            self.lm_head = TiedHead(self.model)

    @property
    def base_model(self) -> Any:
        """The `TokenBackbone`, called as transformers' models without a head are: a call of it is one of `read`.

        TRL's trainers call it, and score some of its features by `get_output_embeddings`.
        """
        return Body(self)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: LongseqCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: LongseqCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Score what follows each token.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, or longer with the tokens of the cache in front; 0 at padding. Of those in front a
                row has as many real ones as the cache has read, and the whole row has them at the same places.
            past_key_values: the cache of the tokens before, by the name that transformers has for it up to 5.23.
            labels: `[B, T]`, the tokens themselves, -100 where nothing is predicted; shifted here. The first token
                behind padding is not predicted, either.
            use_cache: return the cache; by default the configuration's `use_cache`, and not in training.
            logits_to_keep: score only the last n tokens, 0 for all; or the indices of the tokens.
            cache: the cache of the tokens before, by its name from transformers 5.24 on.
            kwargs: `position_ids [1, T]` that begin anew separate packed sequences, as do their numbers
                `seq_idx [1, T]` and the borders `cu_seq_lens_q [N + 1]`. Each one is read from position 0 on. The loss
                takes `num_items_in_batch`, the number of `labels[:, 1:]` that are not -100, of all batches that are
                accumulated. Others must be None or False.

        Raises:
            ValueError: the cache has read other rows or tokens than the mask marks, or a mask has another form.
        """
        cache = past_key_values if cache is None else cache
        cache, mask, borders = self._enter(input_ids, attention_mask, cache, use_cache, kwargs)
        # Offloaded weights are fetched for a layer's `forward`, but not for its `step`.
        offloaded = self.body.embedding.weight.is_meta
        one = input_ids.shape[1] == 1 and mask is None and borders is None and not offloaded
        if cache is not None and cache.state is not None and one:
            logits = cache.step(self.model, input_ids[:, 0]).unsqueeze(1)
        else:
            features = self._read(input_ids, cache, mask, borders)
            if isinstance(logits_to_keep, Tensor):
                features = features[:, logits_to_keep]
            elif logits_to_keep:
                features = features[:, -logits_to_keep:]
            logits = self.model.forward_head(features)
        loss = None if labels is None else self._loss(logits, labels, mask, kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_NAME: cache})

    def _loss(self, logits: Tensor, labels: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """The loss, in which padding in front of a text predicts nothing, not the text's first token either."""
        counted = (labels[:, 1:] != -100).sum()
        if mask is not None:
            labels = labels.clone()
            labels[:, 1:][~mask[:, :-1]] = -100
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options)
        number = options.get("num_items_in_batch")
        if mask is None or number is None:
            return loss
        # The Trainer's number also counts those first tokens. It is of all accumulated batches and devices, and the
        # first tokens of the others are unknown here: this batch has the share of the loss that it has of the number.
        predicted = (labels[:, 1:] != -100).sum()
        return loss * (counted / predicted.clamp(min=1))

    @can_return_tuple
    def read(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: LongseqCache | None = None,
        use_cache: bool | None = None,
        cache: LongseqCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Read tokens without scoring; arguments as for `forward`; `last_hidden_state` is `[B, T, D]`."""
        cache = past_key_values if cache is None else cache
        cache, mask, borders = self._enter(input_ids, attention_mask, cache, use_cache, kwargs)
        features = self._read(input_ids, cache, mask, borders)
        return BaseModelOutputWithPast(last_hidden_state=features, **{CACHE_NAME: cache})

    def _enter(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None,
        cache: LongseqCache | None,
        use_cache: bool | None,
        options: dict[str, Any],
    ) -> tuple[LongseqCache | None, Tensor | None, Tensor | None]:
        """The cache, the mask and the borders of a call; takes the keys of `options` that they need."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and use_cache:
            cache = LongseqCache()
        mask = rows_with_padding(attention_mask, tokens.shape[1])
        borders = _borders(options, tokens, mask)
        options.pop("is_causal", None)
        check_options(options, _TAKEN)
        if cache is not None:
            check_state_rows(cache.state, len(tokens) if borders is None else len(borders) - 1)
            cache.check_mask(attention_mask, tokens.shape[1])
        return cache, mask, borders

    def _read(self, tokens: Tensor, cache: LongseqCache | None, mask: Tensor | None, borders: Tensor | None) -> Tensor:
        state = None if cache is None or cache.state is None else self.model.trim(cache.state)
        mask = mask if borders is None else None  # borders separate the padding, too
        features, following = self.model.forward_features(
            tokens, state, cu_seqlens=borders, mask=mask, output_final_state=cache is not None
        )
        if cache is not None:
            cache.keep(following, tokens.shape[1], tokens[:, -1] if borders is None else None, mask)
        return features

    def generate(
        self, inputs: Tensor | None = None, generation_config: Any = None, *arguments: Any, **options: Any
    ) -> Any:
        """As of other models of transformers. ValueError for a cache that has read another text."""
        given = [options[name] for name in ("cache", "past_key_values") if options.get(name) is not None]
        cache = given[0] if given else None
        settings = self.generation_config if generation_config is None else generation_config
        uses_cache = options.get("use_cache", settings.use_cache) is not False
        reads_chunks = options.get("prefill_chunk_size", settings.prefill_chunk_size)
        if cache is None and reads_chunks and uses_cache:
            options[CACHE_NAME] = LongseqCache()  # the library makes none for these models, and chunks need one
        if cache is not None and cache.tokens:
            if not uses_cache:
                raise ValueError("use_cache=False and a cache are both given")
            tokens, mask = options.get("input_ids") if inputs is None else inputs, options.get("attention_mask")
            # With a mask that is longer than the tokens, `generate` takes the tokens for those after the cache.
            if tokens is not None and (mask is None or mask.shape[1] == tokens.shape[1]):
                cache.check_text(tokens)
        return super().generate(inputs, generation_config, *arguments, **options)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        # `generate` takes the arguments of `forward` only where both functions call the others `kwargs`.
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        step = kwargs.get("next_sequence_length") == 1 and not kwargs.get("is_first_iteration")
        if step and inputs.get(CACHE_NAME) is not None:
            inputs["attention_mask"] = None  # a generated token is never padding
        return inputs

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; with tied embeddings it has no parameters of its own."""
        return self.lm_head if self.model.head is None else self.model.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        if not isinstance(new_embeddings, TiedHead):
            self.model.head = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes its own


class Body:
    """A model of transformers without its head: all of its `TokenBackbone`, but for what a call takes and gives."""

    def __init__(self, model: LongseqForCausalLM) -> None:
        self._model = model

    def __call__(self, *inputs: Any, **options: Any) -> BaseModelOutputWithPast:
        return self._model.read(*inputs, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.model, name)


class TiedHead(nn.Module):
    """The head of a `TokenBackbone` that scores by its embeddings, which are its `weight [V, D]`."""

    bias: Tensor | None = None

    def __init__(self, model: TokenBackbone) -> None:
        super().__init__()
        self._model = (model,)  # in a tuple it is no part of this module

    @property
    def weight(self) -> Tensor:
        return self._model[0].tied_weight(self._model[0].embedding.weight.device)

    def forward(self, features: Tensor) -> Tensor:
        """Score features `[..., D]`: `[..., V]`."""
        return self._model[0].forward_head(features)


def _borders(options: dict[str, Any], tokens: Tensor, mask: Tensor | None) -> Tensor | None:
    """The borders of packed sequences, `[N + 1]`, None for rows of one sequence; takes their keys out of `options`.

    Borders that follow from `position_ids` or `seq_idx` also separate the padding, where `mask` is False.
    """
    borders = options.pop("cu_seq_lens_q", None)
    if borders is not None:
        for follows in ("cu_seq_lens_k", "max_length_q", "max_length_k"):
            options.pop(follows, None)
    # Within a sequence positions go on by 1, and its number stays.
    steps = [(options.pop("position_ids", None), 1), (options.pop("seq_idx", None), 0)]
    if borders is not None:
        if mask is not None:
            raise ValueError("cu_seq_lens_q and padding in attention_mask cannot be combined")
        return borders.to(tokens.device)
    begins = torch.zeros_like(tokens, dtype=torch.bool)
    for values, step in steps:
        if values is not None:
            begins[:, 1:] |= values.to(tokens.device).diff(dim=1) != step
    if mask is not None:
        begins[:, 1:] &= mask[:, 1:] & mask[:, :-1]
    if all(values is None for values, _ in steps) or not bool(begins.any()):
        return None
    if len(tokens) > 1:
        raise ValueError("packed sequences must be in one row")
    if mask is not None:
        begins[:, 1:] |= mask.diff(dim=1)
    begins[:, 0] = True
    ends = torch.tensor([tokens.shape[1]], device=tokens.device)
    return torch.cat([begins[0].nonzero().flatten(), ends])


AutoConfig.register(MODEL_TYPE, LongseqConfig)
AutoModelForCausalLM.register(LongseqConfig, LongseqForCausalLM)
# The Trainer shifts the labels for its `label_smoothing_factor` if the table of names has the model's class.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = LongseqForCausalLM.__name__
