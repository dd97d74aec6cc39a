"""Batches of tokens: rows of windows, where the documents in them begin, and what each token should predict.

A loader yields `(TokenInputs, targets)`. Every document begins with the separator, the token that also ends it: its
inputs are `separator, t_1, ..., t_n`, its targets `t_1, ..., t_n, separator`. So each token of a document is predicted,
the first one too, and no token is predicted from another document. A model that continues a text reads the separator
before it.

    (inputs, targets) = batch
    packing = Packing(inputs.cu_seqlens, inputs.tokens.shape[1], max_seqlen=inputs.max_seqlen)
    logits, _ = model(inputs.tokens, cu_seqlens=packing)              # [1, B * T, vocabulary]
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# The target of a token without a target, which torch's cross-entropies ignore.
IGNORED = -100


class Carry(NamedTuple):
    """The sequences that continue those of the batch before, in batches of streams: row b continues row b.

    first: `[B]` int64, the sequence in `cu_seqlens` with which row b begins; None where rows are not packed: row b.
    last: `[B]` int64, the sequence with which row b ends: its final state is what the next batch continues.
    fresh: `[B]` bool, True where row b begins with a document, or with a part of a document whose beginning was not in
        the batch before. Its state is then that before the first token.
    """

    first: Tensor | None
    last: Tensor | None
    fresh: Tensor


class TokenInputs(NamedTuple):
    """The inputs of a token model for a batch of B windows of T tokens, and the number of targets; see the module.

    All batches of a loader have one shape: windows that are missing at the end of a split, and the rest of a window
    that documents do not fill, hold separators without targets. Lightning moves the tensors to the device; the numbers
    stay on the host.

    tokens: `[1, B * T]` int64, all windows in one row; or `[B, T]` where the state is not reset at documents' borders.
    cu_seqlens: `[N + 1]` int32, the borders of sequences: a window begins one, and so does a document in it. N is the
        same for all batches, so that compiled and recorded steps see one shape: the last border, B * T, repeats, which
        adds empty sequences. A batch of very many short documents has 2, 4, ... times N. None for `[B, T]`.
    max_seqlen: no sequence is longer; a constant of the loader.
    units: targets of this batch on this process that are not IGNORED; 0 is possible when a split is measured on several
        processes, and a sum over no targets is 0.
    byte_count: bytes of the text that the targets stand for. A document's bytes are dealt out evenly over its targets,
        so that the windows of a split add up to the bytes of its documents. None where a loader does not know them.
    carry: how the state goes on from the batch before, for streams; else None.
    mask: `[B, T]` bool, False at padding, which is then neither read nor predicts; None where the model may read every
        token. Packed windows have none.
    """

    tokens: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int
    units: int
    byte_count: int | None
    carry: Carry | None = None
    mask: Tensor | None = None


TokenBatch = tuple[TokenInputs, Tensor]
