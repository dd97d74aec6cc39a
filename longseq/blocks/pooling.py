"""One vector for each sequence: the pooling of features over padded rows and packed sequences."""

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from longseq.arguments import check_choice
from longseq.blocks.precision import at_least_float32
from longseq.kernels.packing import Packing
from longseq.kernels.precision import without_autocast

POOLINGS = ("mean", "max", "last", "first", "attention")


class Pooling(nn.Module):
    """Reduce the features of each sequence to one vector.

        mean, max    over the tokens, for each channel
        last, first  the features of one token
        attention    Σ_t a_t x_t with a = softmax(v · tanh(W x_t + b)) over the tokens; `projection` is W, b, `query` v

    The vector of an empty sequence is zero. inf and NaN stay in their sequence. Padding may be on either side, with any
    features. Sums are float32 (float64 for float64 features) and use no atomics, so that results are reproducible.
    Means and attention multiply the features by a matrix with a row for each sequence and a column for each token,
    which needs little memory compared with the features if there are fewer than 10 D packed sequences.

    Source: Hierarchical Attention Networks for Document Classification (Yang et al., 2016), equations 5 to 7, for
    attention.
    """

    def __init__(self, kind: str, d_model: int) -> None:
        super().__init__()
        check_choice("pooling", kind, POOLINGS)
        self.kind = kind
        self.projection = nn.Linear(d_model, d_model) if kind == "attention" else None
        self.query = nn.Linear(d_model, 1, bias=False) if kind == "attention" else None

    def reset_parameters(self) -> None:
        """Set the initial weights. The query is small, so that attention begins close to the mean."""
        if self.projection is not None and self.query is not None:
            self.projection.reset_parameters()
            nn.init.zeros_(self.projection.bias)
            trunc_normal_(self.query.weight, std=0.02)

    def forward(self, x: Tensor, *, packing: Packing | None = None, mask: Tensor | None = None) -> Tensor:
        """Pool features: `[B, D]`, or `[N, D]` for packed sequences.

        Args:
            x: `[B, T, D]`.
            packing: N sequences packed into one row (B = 1).
            mask: `[B, T]`, True at real tokens of rows that are not packed; None if all are real.
        """
        own = _own_tokens(x, packing, mask)
        if x.shape[1] == 0:
            return x.new_zeros(own.shape[0] * own.shape[1], x.shape[2])
        features = at_least_float32(x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0))
        if self.kind == "max":
            pooled = _largest(features, packing, mask)
        elif self.kind in ("first", "last"):
            pooled = _one_token(features, own, last=self.kind == "last")
        else:
            spoilt = None if packing is None else ~features.isfinite().all(-1)
            if spoilt is not None:  # zero times inf is NaN, and would reach all sequences of the row
                features = features.masked_fill(spoilt.unsqueeze(-1), 0)
            weights = self._weights(x, own).to(features.dtype)
            with without_autocast(x):
                pooled = weights @ features
            if spoilt is not None:
                pooled = pooled.masked_fill((own & spoilt.unsqueeze(1)).any(-1, keepdim=True), torch.nan)
        return pooled.flatten(0, 1).masked_fill(~own.any(-1).view(-1, 1), 0).to(x.dtype)

    def scores(self, x: Tensor) -> Tensor:
        """The log weight of each token in attention, up to a constant: `[B, T]`."""
        assert self.projection is not None, f"pooling={self.kind} scores no tokens"
        assert self.query is not None
        return at_least_float32(self.query(self.projection(x).tanh()).squeeze(-1))

    def _weights(self, x: Tensor, own: Tensor) -> Tensor:
        """The weight of each token in each sequence, like `own`."""
        if self.kind == "mean":
            counted = own.to(at_least_float32(x).dtype)
            return counted / counted.sum(-1, keepdim=True).clamp_min(1)
        scores = self.scores(x).unsqueeze(1)
        # The lowest number and not -inf: the softmax of a sequence without tokens is then finite.
        weights = scores.masked_fill(~own, torch.finfo(scores.dtype).min).softmax(-1)
        return weights.masked_fill(~own, 0)

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"


def _own_tokens(x: Tensor, packing: Packing | None, mask: Tensor | None) -> Tensor:
    """True where a token belongs to a sequence: `[1, N, T]` for packed sequences, `[B, 1, T]` for rows."""
    if packing is not None:
        numbers = torch.arange(packing.count, device=x.device)
        return (packing.sequence == numbers[:, None]).unsqueeze(0)
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    return real.unsqueeze(1)


def _largest(x: Tensor, packing: Packing | None, mask: Tensor | None) -> Tensor:
    """The largest value of each channel: `[1, N, D]` or `[B, 1, D]`; -inf for a sequence without tokens."""
    if packing is None:
        real = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), -torch.inf)
        return real.amax(1, keepdim=True)
    least = x.new_full((packing.count, x.shape[2]), -torch.inf)
    return least.scatter_reduce(0, packing.sequence[:, None].expand_as(x[0]), x[0], "amax").unsqueeze(0)


def _one_token(x: Tensor, own: Tensor, *, last: bool) -> Tensor:
    """The features of the first or the last token of each sequence: `[1, N, D]` or `[B, 1, D]`."""
    place = torch.arange(1, x.shape[1] + 1, device=x.device)
    index = (own * (place if last else place.flip(0))).argmax(-1)
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[2]))
