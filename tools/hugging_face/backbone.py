"""What the models of transformers around our backbones share: their configuration, files and initial weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as initial

from longseq.models import build, describe

_PREFIX = "model."


class BackboneConfig(PreTrainedConfig):
    """The config.json of a backbone (see `longseq.models`), as transformers reads and writes it.

    `model_args` are arguments of `backbone`, the class; those that are left out have its defaults.
    """

    backbone: ClassVar[Callable[..., Any]]
    has_no_defaults_at_init = True
    auto_map: ClassVar[dict[str, str]] = {}  # no file holds code of its own, which trainers of TRL ask for

    model_args: dict | None = None

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        is_complete = "longseq_version" in vars(self)  # from a file or a model
        if self.model_args and not is_complete:
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
            raise AttributeError("model_args")  # transformers also makes empty configurations
        return self.model_args

    def _complete(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with those that other keys of the configuration decide."""
        return arguments

    def record(self, model: nn.Module) -> None:
        """Take over the complete description of a model."""
        for key, value in describe(model).items():
            if key not in ("architectures", "model_type", "window"):
                setattr(self, key, value)

    def build(self) -> Any:
        """The model, with initialised weights."""
        description = {**vars(self), "model_args": self._complete(self._arguments)}
        return build(description, label=self.name_or_path or "config.json")


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

    def _set_gradient_checkpointing(self, enable: bool = True, **options: Any) -> None:
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
        names = ", ".join(name.removeprefix(_PREFIX) for name in missing)
        raise ValueError(f"{self.name_or_path} lacks weights: {names}")


def check_options(options: Mapping[str, Any], taken: Collection[str] = ()) -> None:
    """Raise TypeError for options of a call that are not `taken`: a mask by another name would change nothing."""
    for name, value in options.items():
        if name not in taken and value is not None and value is not False:
            raise TypeError(f"unexpected argument {name!r}")


def _read_short_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let `load_state_dict` read the names of our files, which transformers' Trainer hands it as they are."""
    own = prefix + _PREFIX
    for name in [name for name in state if name.startswith(prefix) and not name.startswith(own)]:
        state[own + name.removeprefix(prefix)] = state.pop(name)
