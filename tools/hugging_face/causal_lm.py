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

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longseq.backbones.tokens import MODEL_TYPE, TokenBackbone
from longseq.mixers import check_revisions
from longseq.models import build, describe
from longseq.plugins import check_loaded

try:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
    from transformers import initialization as initial
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils.generic import can_return_tuple
except ImportError as error:
    raise ImportError('models of transformers need transformers 5: pip install "longseq[text]"') from error

from longseq.tools.hugging_face.cache import LongseqCache, cache_of, rows_with_padding

_PREFIX = "model."


class LongseqConfig(PreTrainedConfig):
    """The config.json of a `TokenBackbone` (see `longseq.models`), as transformers reads and writes it.

        LongseqConfig(model_args={"vocab_size": 257, "d_model": 512, "depth": 8, "mixer": "deltanet"})

    `model_args` are arguments of `TokenBackbone`; those that are left out have its defaults. ValueError or TypeError
    for arguments that it does not take.
    """

    model_type = MODEL_TYPE
    has_no_defaults_at_init = True

    kind: str = "token"
    model_args: dict | None = None
    use_cache: bool = True

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        if self.model_args and not self._is_saved:
            with torch.random.fork_rng([]), torch.device("meta"):
                self.record(TokenBackbone(**self.model_args))

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return self._arguments["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.model_args = {**self._arguments, "vocab_size": value}

    @property
    def hidden_size(self) -> int:
        """The width of the model."""
        return self._arguments["d_model"]

    @property
    def num_hidden_layers(self) -> int:
        """The number of blocks."""
        return self._arguments["depth"]

    @property
    def tie_word_embeddings(self) -> bool:
        """True if the head scores a token by its embedding. It has no parameters of its own then."""
        return bool(self._arguments["tie_embeddings"])

    @property
    def _arguments(self) -> dict[str, Any]:
        if not self.model_args:
            raise AttributeError("this LongseqConfig has no model_args: give those of TokenBackbone")
        return self.model_args

    @property
    def _is_saved(self) -> bool:
        """True if a file, or a model, has filled in all arguments."""
        return "longseq_version" in vars(self)

    def record(self, model: TokenBackbone) -> None:
        """Take over the complete description of a model."""
        for key, value in describe(model).items():
            if key not in ("architectures", "model_type", "window"):
                setattr(self, key, value)

    def build(self) -> TokenBackbone:
        """The model, with initialised weights. ValueError, in one line, if this version cannot build it."""
        description, label = vars(self), self.name_or_path or "the configuration"
        check_loaded(description.get("plugins") or [], label)
        model = build({**description, "model_args": self._arguments}, label=label)
        if not isinstance(model, TokenBackbone) or model.direction != "forward":
            raise ValueError(f"{label} is of no language model: it needs a token model with direction=forward")
        try:
            check_revisions(model, description.get("revisions"))
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from error
        return model


class LongseqForCausalLM(PreTrainedModel, GenerationMixin):
    """A `TokenBackbone`, `self.model`, with the interface of transformers.

    The cache of `generate` is the recurrent state (see `longseq.tools.hugging_face.cache`). Padding on either side does
    not change it. Loading refuses a file without some of the weights.
    """

    config_class = LongseqConfig
    config: LongseqConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["TokenBackbone"]  # a device holds the whole model
    _is_stateful = True  # the state cannot be taken back to an earlier token

    def __init__(self, config: LongseqConfig) -> None:
        super().__init__(config)
        self.model = config.build()
        config.record(self.model)
        self.gradient_checkpointing = False
        self._is_built = False
        self.post_init()
        self._is_built = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: LongseqCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Score what follows each token.

        Args:
            input_ids: `[B, T]`.
            attention_mask: `[B, T]`, or longer with the tokens of the cache in front; 0 at padding.
            past_key_values: the cache of the tokens before.
            labels: `[B, T]`, the tokens themselves, -100 where nothing is predicted; shifted here.
            use_cache: return the cache; by default the configuration's `use_cache`, and not in training.
            logits_to_keep: score the last n tokens alone, 0 for all; or the indices of the tokens.
            kwargs: `position_ids [1, T]` that begin anew at 0 separate packed sequences, as do the borders
                `cu_seq_lens_q`. The loss takes `num_items_in_batch`.

        Raises:
            ValueError: the cache is another library's, a mask has another form, hidden states or attentions are wanted.
        """
        for wanted in ("output_hidden_states", "output_attentions"):
            if kwargs.pop(wanted, None):
                raise ValueError(f"{wanted}: these models return logits and a cache alone")
        if kwargs.pop("inputs_embeds", None) is not None:
            raise ValueError("inputs_embeds: these models read tokens alone; prompts that are learned are no tokens")
        keep = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        cache = cache_of(past_key_values) if keep or past_key_values is not None else None
        tokens = input_ids.shape[1]
        mask = rows_with_padding(attention_mask, tokens)
        borders = _borders(kwargs, input_ids, mask)
        if cache is not None and cache.state is not None and tokens == 1 and mask is None and borders is None:
            logits = cache.step(self.model, input_ids[:, 0]).unsqueeze(1)
        else:
            logits = self._read(input_ids, cache, mask, borders, logits_to_keep)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def _read(
        self,
        tokens: Tensor,
        cache: LongseqCache | None,
        mask: Tensor | None,
        borders: Tensor | None,
        kept: int | Tensor,
    ) -> Tensor:
        state = None if cache is None or cache.state is None else self.model.trim(cache.state)
        features, following = self.model.forward_features(
            tokens, state, cu_seqlens=borders, mask=mask, output_final_state=cache is not None
        )
        if cache is not None:
            cache.keep(following, tokens.shape[1])
        if isinstance(kept, Tensor):
            features = features[:, kept]
        elif kept:
            features = features[:, -kept:]
        return self.model.forward_head(features)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        # `generate` takes the arguments of `forward` only where both functions call the others `kwargs`.
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if inputs.get("past_key_values") is not None and not kwargs.get("is_first_iteration"):
            inputs["attention_mask"] = None  # a generated token is never padding
        return inputs

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The head; None for a model that scores by its embeddings."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.model.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **options: Any) -> nn.Module:
        embedding = super().resize_token_embeddings(*args, **options)
        self.model.vocab_size = embedding.num_embeddings
        self.model.resolve_arguments(vocab_size=embedding.num_embeddings)
        self.config.record(self.model)
        return embedding

    def save_pretrained(
        self, save_directory: Any, state_dict: Mapping[str, Tensor] | None = None, **options: Any
    ) -> None:
        """As `PreTrainedModel.save_pretrained`; the weights have the names that `longseq.from_pretrained` reads."""
        if not getattr(self, "_hf_peft_config_loaded", False):
            state = self.state_dict() if state_dict is None else state_dict
            state_dict = {name.removeprefix(_PREFIX): value for name, value in state.items()}
        super().save_pretrained(save_directory, state_dict=state_dict, **options)

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:
        if enable and every_n_layers != 1:
            raise ValueError(f"every_n_layers={every_n_layers}: these models recompute every block or none")
        self.gradient_checkpointing = enable
        self.model.set_grad_checkpointing(enable)

    def _init_weights(self, module: nn.Module) -> None:
        """Called for modules with parameters, or buffers, that no file has given, as a flag of theirs says."""
        if not self._is_built:
            return  # the constructor of the model has initialised them
        if all(module is not part for part in self.modules()):  # from `resize_token_embeddings`
            initial.normal_(module.weight, std=0.02)
            return
        weights = self.state_dict(keep_vars=True).items()
        missing = [name for name, value in weights if not getattr(value, "_is_hf_initialized", False)]
        source = self.name_or_path or "the file"
        raise ValueError(
            f"{source} lacks {len(missing)} of the weights of its model, such as {missing[0].removeprefix(_PREFIX)}"
        )

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes its own


def _borders(options: dict[str, Any], tokens: Tensor, mask: Tensor | None) -> Tensor | None:
    """The borders of packed sequences, `[N + 1]`, None for rows of one sequence; takes their keys out of `options`."""
    positions, borders = options.pop("position_ids", None), options.pop("cu_seq_lens_q", None)
    if borders is None:
        starts = None if positions is None or mask is not None else positions == 0
        if starts is None or not bool((starts.sum(dim=-1) > 1).any()):
            return None
        if len(tokens) > 1:
            raise ValueError("position_ids begin anew within rows: put packed sequences into one row")
        ends = torch.tensor([tokens.shape[1]], device=tokens.device)
        borders = torch.cat([starts[0].nonzero().flatten(), ends])
    return borders.to(tokens.device)


AutoConfig.register(MODEL_TYPE, LongseqConfig)
AutoModelForCausalLM.register(LongseqConfig, LongseqForCausalLM)
