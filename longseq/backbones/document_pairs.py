"""Classifiers of pairs of documents: one body reads both, each by itself, and a head compares them.

model = PairClassifier(num_classes=2, vocab_size=257, d_model=128, depth=4, mixer="deltanet", direction="bidirectional")
logits = model(tokens)      # tokens [B, T], each row 256, a text, 256, another text: logits [B, 2]
"""

from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from longseq.arguments import takes_also
from longseq.backbones.classifier import TextClassifier
from longseq.blocks.initialisation import save_rng_state
from longseq.kernels.packing import Packing
from longseq.mixers.base import check_rows
from longseq.models import register_kind


@register_kind("document_pair")
class PairClassifier(TextClassifier):
    """Scores the classes of a pair of documents.

    `TextClassifier`'s body reads both documents with the same weights. The head is an MLP on [u, v, u * v, u - v] of
    their pooled features u and v, with hidden layers of 4 and 2 times `d_model` channels.

    Args:
        separator: the token at the start of each of the two documents, and nowhere else.
        num_classes, pooling, head_dropout, options: as in `TextClassifier`.

    Source: Long Range Arena (Tay et al., 2020), section 2.2.3; its code has the widths, and these features under the
    name NLI.
    """

    @takes_also(TextClassifier)
    def __init__(self, *, separator: int = 256, **options: Any) -> None:
        restore_rng_state = save_rng_state()
        super().__init__(**options)
        self.separator = separator
        width = self.body.d_model
        self.head: Any = nn.Sequential(
            nn.Linear(4 * width, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, self.num_classes),
        )
        restore_rng_state()
        self.init_weights()

    def init_part(self, part: nn.Module) -> None:
        """Initialise the pooling, the head, or a part of the body."""
        if not isinstance(part, nn.Sequential):
            super().init_part(part)
            return
        for layer in part:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
                nn.init.zeros_(layer.bias)
        trunc_normal_(part[-1].weight, std=0.02)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | Packing | None = None, mask: Tensor | None = None) -> Tensor:
        """Score the classes of each pair: `[B, num_classes]`, or `[N, num_classes]` for packed pairs.

        Args:
            tokens: `[B, T]`; each row, or packed sequence, holds both documents of a pair.
            cu_seqlens: `[N + 1]`, the borders of N pairs packed into one row (B = 1), or their `Packing`.
            mask: `[B, T]`, True at real tokens.
        """
        packing = check_rows(tokens, cu_seqlens, mask)
        if packing is not None:
            halves = Packing(self._borders(tokens[0], packing), tokens.shape[1], max_seqlen=packing.max_seqlen)
            pooled = self.pool(self.forward_features(tokens, halves), halves).unflatten(0, (-1, 2))
            first, second = pooled.unbind(1)
        else:
            begins = (tokens == self.separator).cumsum(1)
            real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
            parts = torch.cat([real & (begins <= 1), real & (begins > 1)])
            features = self.forward_features(torch.cat([tokens, tokens]), mask=parts)
            first, second = self.pool(features, mask=parts).unflatten(0, (2, -1)).unbind()
        return self.classify(torch.cat([first, second, first * second, first - second], -1))

    def _borders(self, tokens: Tensor, packing: Packing) -> Tensor:
        """The borders `[2 N + 1]` of the documents of N packed pairs, without a GPU sync."""
        borders = packing.cu_seqlens.long()
        begins = (tokens == self.separator).cumsum(0)
        before = nn.functional.pad(begins, (1, 0))[borders[:-1]]
        second = torch.searchsorted(begins, before + 2).minimum(borders[1:])
        return torch.cat([torch.stack([borders[:-1], second], 1).flatten(), borders[-1:]])

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations over a pair of two documents of equal length."""
        head = sum(2 * layer.weight.numel() for layer in self.head if isinstance(layer, nn.Linear))
        return 2 * (super().flops(tokens // 2) - 2 * self.body.d_model * self.num_classes) + head
