"""The models of this task: token models that read forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longseq.backbones.tokens import TokenBackbone
from longseq.tasks.text.info import TextInfo
from longseq.tasks.training.checkpoint import Loaded
from longseq.tasks.training.token_model import TokenModel, build_token_model, check_tokenizer
from longseq.tokenizer_files import same_tokenizer


class LanguageModel(TokenModel):
    """Builds the token model that `config.model` describes, for the vocabulary of the text."""

    def build(self, config: Mapping[str, Any], info: TextInfo) -> TokenBackbone:
        """The model of a configuration. Options that are null there take the model's own defaults."""
        return build_token_model(config, vocab_size=info.vocab_size, longest=info.window)

    def start_from(self, model: Any, loaded: Loaded, info: TextInfo) -> None:
        """As `TaskModel.start_from`; ValueError also if the model of the file was trained with another tokenizer."""
        check_tokenizer(loaded, info.tokenizer)
        super().start_from(model, loaded, info)

    def check_reads(self, model: Any, trained: TextInfo, found: TextInfo) -> None:
        """ValueError if the text of `found` has another tokenizer than that of `trained`."""
        if not same_tokenizer(found.tokenizer, trained.tokenizer):
            raise ValueError("the data has another tokenizer than the model was trained with")
