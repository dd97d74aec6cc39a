"""Classifiers of documents: the body of a token model, pooling over the tokens of each document, and a head.

model = TextClassifier(num_classes=10, vocab_size=256, d_model=128, mixer="deltanet", direction="bidirectional")
logits = model(tokens)                              # tokens [B, T], logits [B, 10]
logits = model(tokens, mask=mask)                   # padded documents
logits = model(tokens, cu_seqlens=borders)          # N documents packed into one row [1, L], logits [N, 10]
"""

import re
from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from longseq.arguments import takes_also
from longseq.backbones.likeness import find_difference
from longseq.backbones.tokens import TokenBackbone
from longseq.blocks.initialisation import save_rng_state
from longseq.blocks.ngrams import HashedNgrams
from longseq.blocks.pooling import Pooling
from longseq.blocks.rotary import count_positions
from longseq.blocks.sharding import full_parameters, gathers_parameters
from longseq.kernels.packing import Packing, pack_like
from longseq.mixers.base import check_rows
from longseq.mixers.directions import Directions
from longseq.models import PretrainedModel, register_kind

# The name of these models among those of transformers (see `longseq.tools.hugging_face.sequence_classification`).
MODEL_TYPE = "longseq_document"

# The part of a weight's name for one reading of a bidirectional layer: blocks.0.mixer.mixers.1.conv.weight.
_READING = re.compile(r"(?<=\.mixer\.)mixers\.\d+\.")


@register_kind("document")
class TextClassifier(PretrainedModel, nn.Module):
    """Scores the classes of a document by the pooled features of its tokens.

    `body` is a `TokenBackbone` without a head, so that the weights of a language model fit by name. With
    direction="forward", tokens see the tokens before them, and documents of any length can be read in parts. With
    direction="bidirectional" they see the whole document. Logits do not depend on the other documents of a batch, nor
    on packing or padding.

    Args:
        num_classes: number of classes, or of labels if a document may have several.
        pooling: mean, max, last, first or attention (see `longseq.blocks.pooling`).
        head_dropout: of the pooled features.
        hashed_ngrams: the most tokens of an n-gram. Embeddings of the n-grams of 2 to `hashed_ngrams` tokens that end
            with a token are added to its own (see `longseq.blocks.ngrams`); 1 for none.
        ngram_buckets: the number of embeddings for n-grams of one length.
        options: arguments of `TokenBackbone`, except `tie_embeddings`. `vocab_size` has no default.

    Raises:
        ValueError: an option has a value that does not exist or contradicts another.
    """

    decided_options = TokenBackbone.decided_options

    @takes_also(TokenBackbone, without=("tie_embeddings",))
    def __init__(
        self,
        *,
        num_classes: int,
        pooling: str = "mean",
        head_dropout: float = 0.0,
        hashed_ngrams: int = 1,
        ngram_buckets: int = 32768,
        **options: Any,
    ) -> None:
        super().__init__()
        restore_rng_state = save_rng_state()
        self.num_classes = num_classes
        # With tied embeddings a token model has no weights beyond its body.
        self.body = TokenBackbone(**options, tie_embeddings=True)
        has_ngrams = hashed_ngrams != 1
        self.ngrams = HashedNgrams(hashed_ngrams, ngram_buckets, self.body.d_model) if has_ngrams else None
        self.pooling = Pooling(pooling, self.body.d_model)
        self.dropout = nn.Dropout(head_dropout)
        self.head = nn.Linear(self.body.d_model, num_classes)
        self.resolve_arguments(**self.body.arguments)
        restore_rng_state()
        self.init_weights()

    def describe_use(self) -> dict[str, Any]:
        return {
            "architectures": ["LongseqForSequenceClassification"],
            "model_type": MODEL_TYPE,
            **super().describe_use(),
        }

    def init_weights(self) -> None:
        """Initialise all weights, as after `to_empty`; the body gets a `TokenBackbone`'s weights for the same seed."""
        self.body.init_weights()
        for part in (self.pooling, self.head, *(() if self.ngrams is None else (self.ngrams,))):
            with full_parameters(part):
                self.init_part(part)

    def init_part(self, part: nn.Module) -> None:
        """Initialise the pooling, the head, the n-grams, or a part of the body."""
        if part is self.pooling or part is self.ngrams:
            reset: Any = part.reset_parameters
            reset()
        elif part is self.head:
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)
        else:
            self.body.init_part(part)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | Packing | None = None, mask: Tensor | None = None) -> Tensor:
        """Score the classes of each document.

        Args:
            tokens: `[B, T]` whole numbers below `vocab_size`.
            cu_seqlens: `[N + 1]`, the borders of N documents packed into one row (B = 1), or their `Packing`. The
                scores of an empty document are finite and mean nothing.
            mask: `[B, T]`, True at real tokens.

        Returns:
            Logits `[B, num_classes]`, or `[N, num_classes]` for packed documents.

        Raises:
            ValueError: `cu_seqlens` or `mask` does not fit `tokens`; a document is longer than the learned positions.
        """
        packing = check_rows(tokens, cu_seqlens, mask)
        features = self.forward_features(tokens, packing, mask)
        return self.classify(self.pool(features, packing, mask))

    @gathers_parameters
    def forward_features(
        self, tokens: Tensor, cu_seqlens: Tensor | Packing | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Return the normalised features of the tokens, `[B, T, d_model]`; the arguments are those of `forward`."""
        packing, added = pack_like(cu_seqlens, tokens), None
        if self.ngrams is not None:
            added = self.ngrams(tokens, count_positions(tokens, cu_seqlens=packing, mask=mask)[0], mask=mask)
        options: dict[str, Any] = {"cu_seqlens": packing, "mask": mask, "output_final_state": False}
        return self.body.forward_features(tokens, **options, added=added)[0]

    @gathers_parameters
    def pool(self, features: Tensor, cu_seqlens: Tensor | Packing | None = None, mask: Tensor | None = None) -> Tensor:
        """Reduce features `[B, T, d_model]` to one vector a document: `[B, d_model]` or `[N, d_model]`."""
        return self.pooling(features, packing=pack_like(cu_seqlens, features), mask=mask)

    @gathers_parameters
    def classify(self, pooled: Tensor) -> Tensor:
        """Score the classes by pooled features `[N, d_model]`: `[N, num_classes]`."""
        return self.head(self.dropout(pooled))

    @torch.no_grad()
    def load_body(self, other: TokenBackbone) -> None:
        """Start from the body of a trained model: a language model, or the body of another classifier.

        Embeddings, blocks and the last norm are copied. A forward model can also start a bidirectional one: attention
        is taken as it is, and of every other mixer both readings start as copies:

            share_directions="projections"  both scans are copies of the one scan, with the mixer's pair of projections
            share_directions="none"         two copies of the whole mixer

        Each layer then gives the mean of both readings, as large as before: with merge="sum" its output projections are
        halved.

        Raises:
            ValueError: the models differ in an option that changes what the weights compute.
            RuntimeError: a shape differs.
        """
        own, its = self.body.saved_arguments(), other.saved_arguments()
        is_forward = other.direction == "forward"
        free = ("direction", "share_directions", "merge") if is_forward else ()
        if (found := find_difference(own, its, ignored=("vocab_size", "tie_embeddings", *free))) is not None:
            raise ValueError(f"{found.name} is {found.one}, and {found.other} in the model that this one starts from")
        trained = other.state_dict()
        sources = {name: _READING.sub("", name) if is_forward else name for name in self.body.state_dict()}
        self.body.load_state_dict({name: trained[source] for name, source in sources.items()})
        for block in self.body.blocks:
            if is_forward and isinstance(block.mixer, Directions) and block.mixer.merge == "sum":
                _halve_outputs(block.mixer)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns that group parameters by depth, for layer-wise learning rates and frozen layers."""
        return {
            "stem": r"^ngrams|^body\.(?:embedding|positions)",
            "blocks": [(r"^body\.blocks\.(\d+)", None), (r"^body\.norm", (99999,))],
        }

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the body."""
        return self.body.blocks

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.body.set_grad_checkpointing(enable)

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def no_weight_decay(self) -> set[str]:
        """The names of the parameters that are exempt from weight decay."""
        return {f"body.{name}" for name in self.body.no_weight_decay()}

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations over one document; a multiply-add counts as two."""
        width = self.body.d_model
        body = sum(block.flops(tokens) for block in self.body.blocks)
        pooling = 2 * tokens * width * (width + 1) if self.pooling.kind == "attention" else 0
        return body + pooling + 2 * width * self.num_classes


def _halve_outputs(reading: Directions) -> None:
    """Halve the outputs of a reading of two directions."""
    for mixer in reading.mixers:
        projection: Any = mixer.out_proj
        if projection is not None:
            projection.weight.div_(2)
            if projection.bias is not None and reading.share == "none":  # a shared bias is added once, after the sum
                projection.bias.div_(2)
