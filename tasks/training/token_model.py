"""The token models that several tasks train, built from `longseq.tasks.training.configuration.BodyKeys`."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from longseq.backbones.tokens import TokenBackbone
from longseq.kernels.packing import Packing
from longseq.mixers import Mixer
from longseq.mixers.contract import check_sequences_apart
from longseq.mixers.registry import name_of
from longseq.models import describe
from longseq.tasks.training.checkpoint import Loaded
from longseq.tasks.training.configuration import BodyKeys, TokenModelKeys
from longseq.tasks.training.model import TaskModel, mixer_options, refuse_difference
from longseq.tokenizer_files import same_tokenizer

ModelT = TypeVar("ModelT")


class TokenModel(TaskModel):
    """Builds token models; each task's own class passes the vocabulary."""

    def like(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return {"defaults": ["token", "_self_"], **body_like(saved)} if saved.get("kind") == "token" else {}

    def initialize(self, model: Any, trained: Any) -> None:
        """As `TaskModel.initialize`; ValueError also if the models compute different functions of the same weights."""
        super().initialize(model, trained)
        own, its = (describe(one)["model_args"] for one in (model, trained))
        refuse_difference(own, its, ignored=("vocab_size", "direction", "share_directions", "merge"))


def body_like(saved: Mapping[str, Any], keys: type[BodyKeys] = TokenModelKeys) -> dict[str, Any]:
    """The keys of the class `keys` that a saved model states, without its dropout (see `TaskModel.like`)."""
    stated = saved["model_args"]
    found = {name: stated[name] for name in keys.model_fields if name in stated and "drop" not in name}
    return {**found, "mlp": found["mlp"] or "none"}


def check_tokenizer(loaded: Loaded, tokenizer: Mapping[str, Any] | None) -> None:
    """ValueError if a model was trained with another tokenizer than the data's; None for data that is tokens."""
    known = loaded.data.get("tokenizer")
    if not (same_tokenizer(known, tokenizer) if known and tokenizer else known is tokenizer):
        raise ValueError(f"init={loaded.path}: its model was trained with another tokenizer")


def build_token_model(config: Mapping[str, Any], *, vocab_size: int, longest: int) -> TokenBackbone:
    """The token model of a configuration; `longest` is the longest sequence (see `build_seeded`)."""
    return build_seeded(TokenBackbone, config, longest, vocab_size=vocab_size)


def build_seeded(kind: Callable[..., ModelT], config: Mapping[str, Any], longest: int, **given: Any) -> ModelT:
    """A model of class `kind` with the options of a configuration and `given`, and weights drawn from `config.seed`.

    Options that are null keep their defaults; `longest` is the number of learned positions by default.
    """
    options = {key: value for key, value in config["model"].items() if key not in ("name", "label")}
    mlp = options.pop("mlp", None)
    options = {key: value for key, value in options.items() if value is not None}
    if options.get("positions") == "learned":
        options.setdefault("max_length", longest)
    options |= {"mixer": config["mixer"]["name"], "mixer_options": mixer_options(config)}
    torch.manual_seed(config["seed"])
    return kind(mlp=None if mlp == "none" else mlp, **given, **options)


class PluginMixers:
    """Stops a run whose plug-in mixer lets the sequences of a batch see each other; longseq's own are tested for it."""

    def __init__(self) -> None:
        self.checked: set[bool] = set()

    def check(self, model: nn.Module, packing: Packing | None, mask: Tensor | None = None) -> None:
        """Check a model's mixers from plug-ins before the first packed or padded batch. ContractError if one fails."""
        packed, device = packing is not None, next(model.parameters()).device
        if packed in self.checked or (packing is None and mask is None):
            return
        self.checked.add(packed)
        for layer in {type(part): part for part in model.modules() if isinstance(part, Mixer)}.values():
            # The registered class: sharding derives another one from it.
            kind = next((kind for kind in type(layer).__mro__ if issubclass(kind, Mixer) and name_of(kind)), None)
            if kind is None or kind.__module__.partition(".")[0] == "longseq":
                continue
            # A new layer in float32: the model's weights may be shards, and half precision depends on a row's length.
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                own = kind(**layer.arguments).to(device, torch.float32)
            with torch.autocast(device.type, enabled=False):
                check_sequences_apart(own, packed=packed)
