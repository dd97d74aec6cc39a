"""Batches of documents: their tokens, where each begins, and its class or classes.

A loader yields `(DocumentInputs, targets)`. All documents of a packed batch stand end to end in one row:

    inputs, targets = batch
    packing = Packing(inputs.cu_seqlens, inputs.tokens.shape[1], max_seqlen=inputs.max_seqlen)
    logits = model(inputs.tokens, cu_seqlens=packing)                 # [N, classes]
    loss = cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

A batch has more places (N) than documents, so that the shapes of packed batches are those of their loader, and so that
several processes have as many batches. An empty place has no target: IGNORED, or for several labels a number of -1.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from longseq.tasks.text.batch import IGNORED

__all__ = ["IGNORED", "DocumentBatch", "DocumentInputs"]


class DocumentInputs(NamedTuple):
    """The documents of a batch with N places. Lightning moves the tensors to the device; numbers stay on the host.

    tokens: int64, packed `[1, L]`, where L is the token budget, or padded `[N, T]`, where T is a length of the batch.
    cu_seqlens: `[N + 1]` int32, the borders of the N sequences in a packed row; None for padded batches. Documents come
        first. Sequences of padding fill the row up to L; they and empty sequences are empty places.
    mask: `[N, T]` bool, True at the tokens of documents, in padded batches; None for packed ones.
    max_seqlen: no sequence is longer; a constant of the loader for packed batches, T for padded ones.
    lengths: `[N]` int64, the tokens of each document that are read; 0 in empty places.
    whole_lengths: `[N]` int64, the tokens of each document before truncation; 0 in empty places.
    numbers: `[N]` int64, the number of each document in its split; -1 in empty places.
    units: documents in this batch on this process; 0 is possible where a split is measured on several processes.
    token_count: the tokens of these documents that are read, the sum of `lengths`.
    """

    tokens: Tensor
    cu_seqlens: Tensor | None
    mask: Tensor | None
    max_seqlen: int
    lengths: Tensor
    whole_lengths: Tensor
    numbers: Tensor
    units: int
    token_count: int


# The inputs; and the targets, `[N]` int64 (the number of the class, or IGNORED), or for several labels `[N, C]` float32
# (1 for each label of the document, else 0).
DocumentBatch = tuple[DocumentInputs, Tensor]
