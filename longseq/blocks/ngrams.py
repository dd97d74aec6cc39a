"""Embeddings of n-grams of tokens: what the last few tokens spell, at the cost of a look-up."""

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn
from torch.nn.functional import pad

# The hash multiplies numbers below a prime: products fit into 64 bits, so that all devices and runtimes agree.
_PRIME = 2**31 - 1
_FACTOR = 1_540_483_477


class HashedNgrams(nn.Module):
    """Σ_n E_n[hash(x_{t-n+1}, …, x_t) mod `buckets`] over n = 2, …, `longest`: a vector for each token of documents.

    Each n has its own table of `buckets` vectors; n-grams in the same bucket share a vector. At the beginning of a
    document n-grams are completed by a number that no token has.

    Sources: Enriching word vectors with subword information (Bojanowski et al., 2017), section 3.2, for the hash; Byte
    Latent Transformer (Pagnoni et al., 2024), section 3.2.1, for adding the sum to the tokens' embeddings.
    """

    def __init__(self, longest: int, buckets: int, d_model: int) -> None:
        super().__init__()
        self.longest, self.buckets = longest, buckets
        self.tables = nn.ModuleList(nn.Embedding(buckets, d_model) for _ in range(2, longest + 1))

    def reset_parameters(self) -> None:
        """Set the initial weights, as in a token model's embeddings."""
        for table in self.tables:
            trunc_normal_(table.weight, std=0.02)  # type: ignore[arg-type]

    def forward(
        self, tokens: Tensor, positions: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Embed the n-grams that end at each token: `[B, T, d_model]`.

        Args:
            tokens: `[B, T]` whole numbers.
            positions: `[B, T]`, the position of each token in its document.
            context: `[B, C]`, the tokens before `tokens`, for documents that began earlier. Not read if there is a
                mask.
            mask: `[B, T]`, True at real tokens. Padding may come between them, and is no part of an n-gram.
        """
        length, reach = tokens.shape[1], self.longest - 1
        before = tokens[:, :0] if context is None else context[:, max(context.shape[1] - reach, 0) :]
        tokens, before = tokens.long(), before.long()  # smaller numbers would overflow in the hash
        if mask is None:
            row = pad(torch.cat([before, tokens], 1) + 1, (reach - before.shape[1], 0))  # [B, reach + T]; 0: no token
        else:  # the tokens at their positions, and padding behind all of them
            row = torch.zeros_like(pad(tokens, (0, 1))).scatter(1, positions.where(mask, length), tokens + 1)
        hashed, found = tokens + 1, []
        for distance, table in enumerate(self.tables, start=1):
            if mask is None:
                earlier = row[:, reach - distance : reach - distance + length]
            else:
                earlier = row.gather(1, (positions - distance).clamp_min(0))
            earlier = earlier.masked_fill(positions < distance, 0)
            hashed = (hashed * _FACTOR + earlier + 1) % _PRIME
            found.append(table(hashed % self.buckets))
        return torch.stack(found).sum(0)

    def extra_repr(self) -> str:
        return f"longest={self.longest}, buckets={self.buckets}"
