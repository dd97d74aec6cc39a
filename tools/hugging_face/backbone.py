"""What the models of transformers around our backbones share: their configuration, files and initial weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longseq.mixers import check_revisions
from longseq.models import build, describe
from longseq.plugins import check_loaded

try:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers import initialization as initial
except ImportError as error:
    raise ImportError('models of transformers need transformers 5.13: pip install "longseq[text]"') from error

_PREFIX = "model."


class BackboneConfig(PreTrainedConfig):
    """The config.json of a backbone (see `longseq.models`), as transformers reads and writes it.

    `model_args` are arguments of `backbone`, the class; those that are left out have its defaults. ValueError or
    TypeError for arguments that it does not take.
    """

    backbone: ClassVar[Callable[..., Any]]
    has_no_defaults_at_init = True
    auto_map: ClassVar[dict[str, str]] = {}  # no file holds code of its own, which trainers of TRL ask for

    model_args: dict | None = None

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        if self.model_args and not self._is_saved:
            with torch.random.fork_rng([]), torch.device("meta"):
                self.record(type(self).backbone(**self._complete(self.model_args)))

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
    def _arguments(self) -> dict[str, Any]:
        if not self.model_args:
            name = getattr(type(self).backbone, "__name__", "the model")
            raise AttributeError(f"this {type(self).__name__} has no model_args: give those of {name}")
        return self.model_args

    @property
    def _is_saved(self) -> bool:
        """True if a file, or a model, has filled in all arguments."""
        return "longseq_version" in vars(self)

    def _complete(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with those that other keys of the configuration decide."""
        return arguments

    def record(self, model: nn.Module) -> None:
        """Take over the complete description of a model."""
        for key, value in describe(model).items():
            if key not in ("architectures", "model_type", "window"):
                setattr(self, key, value)

    def build(self) -> Any:
        """The model, with initialised weights. ValueError, in one line, if this version cannot build it."""
        description, label = vars(self), self.name_or_path or "the configuration"
        check_loaded(description.get("plugins") or [], label)
        model = build({**description, "model_args": self._complete(self._arguments)}, label=label)
        self.check_kind(model, label)
        try:
            check_revisions(model, description.get("revisions"))
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from error
        return model

    def check_kind(self, model: nn.Module, label: str) -> None:
        """ValueError, which names the file by `label`, for a model of another kind."""
        raise NotImplementedError


class BackboneModel(PreTrainedModel):
    """A backbone of ours, `self.model`, as a model of transformers. Loading refuses a file without some weights."""

    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_context_parallel = False  # a state goes from one part of a text to the next
    model: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = config.build()
        self.register_load_state_dict_pre_hook(_read_short_names)
        config.record(self.model)
        self.gradient_checkpointing = False
        self._is_built = False
        self.post_init()
        self._is_built = True

    @property
    def body(self) -> Any:
        """The `TokenBackbone`, which has the embeddings: the model itself, or the body of a classifier."""
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.body.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.body.embedding = value

    def resize_token_embeddings(self, *args: Any, **options: Any) -> nn.Module:
        embedding = super().resize_token_embeddings(*args, **options)
        self.body.vocab_size = embedding.num_embeddings
        for model in (self.body, self.model):
            model.resolve_arguments(vocab_size=embedding.num_embeddings)
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
        # Where activations are kept in the memory of the host, the function is no checkpoint of torch's.
        function = getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func)
        if enable and function not in (None, checkpoint):
            raise ValueError("offload=True: these models recompute blocks and move nothing to the host: leave it out")
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
        # Weights that are offloaded to a disk stay on the meta device; those that no file has are drawn on another.
        drawn = [(name, value) for name, value in weights if not value.is_meta]
        missing = [name for name, value in drawn if not getattr(value, "_is_hf_initialized", False)]
        if not missing and len(drawn) < len(weights):
            return
        source = self.name_or_path or "the file"
        raise ValueError(
            f"{source} lacks {len(missing)} of the weights of its model, such as {missing[0].removeprefix(_PREFIX)}"
        )


def require_tokens(input_ids: Tensor | None, inputs_embeds: Any) -> Tensor:
    """The tokens of a call. ValueError, in one line, for one without them, or with embeddings in their place."""
    if inputs_embeds is not None:
        raise ValueError(
            "inputs_embeds: these models read tokens alone: give input_ids, and train adapters of another kind than "
            "learned prompts, such as LoRA"
        )
    if input_ids is None:
        raise ValueError("input_ids are missing: give the tokens [batch, tokens] that the tokenizer returns")
    if not input_ids.shape[-1]:
        raise ValueError("input_ids hold no token to read: give at least one, behind those that the cache has read")
    return input_ids


def is_wanted(value: Any) -> bool:
    """True for the value of an argument that is neither None nor False, which ask for nothing."""
    return value is not None and value is not False


def _read_short_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let `load_state_dict` read the names of our files, which transformers' Trainer hands it as they are."""
    own = prefix + _PREFIX
    for name in [name for name in state if name.startswith(prefix) and not name.startswith(own)]:
        state[own + name.removeprefix(prefix)] = state.pop(name)
