"""Losses of language models: metrics over batches, and log-probabilities of texts and continuations, many at once.

`score_documents` is `longseq evaluate checkpoint=FILE input=TEXT`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from longseq.backbones.tokens import TokenBackbone
from longseq.backbones.vocabulary_loss import CHUNK_SCORES, IGNORED
from longseq.blocks.precision import at_least_float32
from longseq.files import replacing
from longseq.state import select_state
from longseq.tasks.text.sources import Columns, Document, Malformed, Part, read_parts
from longseq.tasks.text.tokenizer import Tokenizer

PIECE_TOKENS = 1 << 16  # tokens that a model reads at a time, over all rows; they bound the memory
_BLOCK = 1024  # documents in memory, which share batches by their lengths
_GROUPS = 32  # of positions: 0, 1, 2 to 3, 4 to 7, ...; the last one has all from 2^30 on


def perplexity_of(loss: float) -> float:
    """The exponential of the mean loss of a token; infinite where it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _bits(log_probability: float, size: int) -> float:
    return -log_probability / math.log(2) / size


class TokenLoss(Metric):
    """The mean loss of a token, in nats, over all batches and processes; summed in float64, as tokens can be many."""

    full_state_update = False
    higher_is_better = False

    total: Tensor
    count: Tensor

    def __init__(self, groups: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(groups, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(groups, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, count: Any) -> None:
        """Add a sum of losses over `count` tokens or bytes."""
        # Not in place: see `longseq.tasks.training.metrics.WeightedMean`.
        self.total = self.total + loss
        self.count = self.count + count

    def compute(self) -> Tensor:
        """The mean loss; NaN without tokens."""
        return self.total / self.count


class Perplexity(TokenLoss):
    """The exponential of the mean loss of a token."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class BitsPerByte(TokenLoss):
    """The negative log2 probability of the text per byte, with a count of bytes."""

    def compute(self) -> Tensor:
        return super().compute() / math.log(2)


class LossByPosition(TokenLoss):
    """The mean loss of tokens by position in their sequence, in groups: 0, 1, 2 to 3, 4 to 7, ..."""

    def __init__(self) -> None:
        super().__init__((_GROUPS,))

    def update(self, loss: Tensor, position: Tensor, counts: Tensor) -> None:  # type: ignore[override]
        """Add the losses of the tokens at `position` where `counts` is True; all three have one shape."""
        edges = 2 ** torch.arange(_GROUPS - 1, device=position.device)
        group = torch.bucketize(position.flatten(), edges, right=True)
        self.total = self.total.index_add(0, group, (loss * counts).flatten().double())
        self.count = self.count.index_add(0, group, counts.flatten().double())

    def compute(self) -> Tensor:
        """`[2, groups]`: the mean losses and the numbers of tokens."""
        return torch.stack([self.total / self.count, self.count])

    def table(self) -> list[dict[str, Any]]:
        """Each group with tokens: its first and last position, perplexity and tokens. All processes must call it."""
        rows = []
        for group, (loss, count) in enumerate(self.compute().T.tolist()):
            if count:
                first, last = (2 ** (group - 1) if group else 0), 2**group - 1
                rows.append({"from": first, "to": last, "perplexity": perplexity_of(loss), "tokens": int(count)})
        return rows


class Row(NamedTuple):
    """Tokens; those from `start` (at least 1) on are scored, given the tokens before them."""

    tokens: Sequence[int]
    start: int = 1


class Likelihood(NamedTuple):
    """The natural log-probability of a row's scored tokens; `is_greedy` if each is the most probable one."""

    log_probability: float
    is_greedy: bool


def document_rows(model: TokenBackbone, tokens: Sequence[int], start: int = 1) -> list[Row]:
    """Rows that together score the tokens of a document from `start` on.

    A model with learned positions reads windows of `max_length` tokens, counted from the beginning of the document; the
    last one overlaps the one before, and those before `start` are left out. Other models read the document whole.
    """
    most = model.max_length
    if most is None or len(tokens) - 1 <= most:
        return [Row(tokens, start)]
    rows = []
    for place in range((start - 1) // most * most, len(tokens) - 1, most):
        stop = min(place + most + 1, len(tokens))
        begin = max(0, stop - 1 - most)
        rows.append(Row(tokens[begin:stop], max(start, place + 1) - begin))
    return rows


@torch.inference_mode()
def score_rows(model: TokenBackbone, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
    """The likelihood of each row; `batch_size` rows of similar lengths are read together.

    Long rows are read in pieces, with the state carried from one to the next. A model with learned positions reads only
    the last `max_length` tokens before the last token of a row. ValueError if it has too few for the scored tokens.
    """
    fitting = []
    for tokens, start in rows:
        left_out = 0 if model.max_length is None else max(0, len(tokens) - 1 - model.max_length)
        if left_out >= start:
            raise ValueError(f"{len(tokens) - start} scored tokens exceed the model's {model.max_length} positions")
        fitting.append(Row(tokens[left_out:], start - left_out))
    order = sorted(range(len(rows)), key=lambda index: -len(fitting[index].tokens))
    found: dict[int, Likelihood] = {}
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        found |= dict(zip(chosen, _score_batch(model, [fitting[index] for index in chosen]), strict=True))
    return [found[index] for index in range(len(rows))]


def _score_batch(model: TokenBackbone, rows: Sequence[Row]) -> list[Likelihood]:
    """The likelihoods of rows, of which the first is the longest."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(row.tokens) - 1 for row in rows])
    longest = int(lengths[0])
    inputs, targets = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), IGNORED)
    for index, (tokens, start) in enumerate(rows):
        read = torch.tensor(tokens)
        inputs[index, : len(tokens) - 1] = read[:-1]
        targets[index, start - 1 : len(tokens) - 1] = read[start:]
    inputs, targets = inputs.to(device), targets.to(device)
    total = torch.zeros(len(rows), dtype=torch.float64, device=device)
    missed = torch.zeros(len(rows), dtype=torch.float64, device=device)  # scored tokens that are not the most probable
    state: Any = None
    begin, multiple = 0, model.piece_multiple
    while begin < longest:
        # Rows that end in this piece need no mask: padding changes nothing before it.
        going_on = int((lengths > begin).sum())
        end = min(longest, begin + max(1, PIECE_TOKENS // going_on // multiple) * multiple)
        if state is not None:
            state = select_state(state, torch.arange(going_on, device=device))
        part = slice(begin, end)
        features, state = model.forward_features(inputs[:going_on, part], state, output_final_state=end < longest)
        _score(model, features, targets[:going_on, part], total, missed)
        begin = end
    return [Likelihood(*one) for one in zip(total.tolist(), (missed == 0).tolist(), strict=True)]


def _score(model: TokenBackbone, features: Tensor, targets: Tensor, total: Tensor, missed: Tensor) -> None:
    """Add to `total [B]` the log-probabilities of the targets `[B, T]`, to `missed [B]` those that are not greedy."""
    places = (targets != IGNORED).nonzero()
    for some in places.split(max(1, CHUNK_SCORES // model.vocab_size)):
        row, place = some.unbind(1)
        wanted = targets[row, place]
        scores = at_least_float32(model.forward_head(features[row, place]))
        own = scores.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        total.index_add_(0, row, own.double())
        missed.index_add_(0, row, (scores.argmax(-1) != wanted).double())


@dataclass
class Totals:
    """The sums over the documents of a text, and the numbers of those that were left out."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    log_probability: float = 0.0
    malformed: int = 0
    empty: int = 0

    def metrics(self) -> dict[str, float]:
        """The mean loss of a token in nats, the perplexity, and the bits per byte, over all documents."""
        loss = -self.log_probability / self.tokens
        bits = _bits(self.log_probability, self.bytes)
        return {"loss": loss, "perplexity": perplexity_of(loss), "bits_per_byte": bits}


def score_documents(
    model: TokenBackbone,
    tokenizer: Tokenizer,
    parts: Sequence[Part],
    columns: Columns,
    output: Path,
    *,
    batch_size: int,
    context: AbstractContextManager[Any],
) -> Totals:
    """Write a line of JSON for each document of `parts`, in their order, and return the sums.

    The model reads the token with which texts begin, then the document. As in training, the log-probability is of the
    text and the separator at its end; a prompt (`columns.prompt`) is read and not scored. A line has `document`
    (its number, from 0), `log_probability` (in nats), `tokens`, `bytes`, `bits_per_byte` and `perplexity`; or
    `document` and `error`, for a malformed or empty document. `context` is entered while the model computes.
    """
    totals = Totals()
    documents = read_parts(parts, columns, "evaluating")
    with replacing(output) as partial, partial.open("w", encoding="utf-8") as file, context:
        while block := list(islice(documents, _BLOCK)):
            for row in _score_block(model, tokenizer, block, batch_size, totals):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return totals


def _score_block(
    model: TokenBackbone,
    tokenizer: Tokenizer,
    block: Sequence[Document | Malformed],
    batch_size: int,
    totals: Totals,
) -> Iterator[dict[str, Any]]:
    """Score the documents of a block together; yields their lines and adds them to `totals`."""
    documents = [one for one in block if isinstance(one, Document) and not one.is_empty]
    encoded = tokenizer.encode_all([text for one in documents for text in (one.prompt, one.text)])
    rows, lengths, owners = [], [], []
    for index, (prompt, text) in enumerate(zip(encoded[::2], encoded[1::2], strict=True)):
        read = [tokenizer.start, *prompt.tolist(), *text.tolist(), tokenizer.separator]
        own = document_rows(model, read, 1 + len(prompt))
        rows += own
        owners += [index] * len(own)
        lengths.append(len(text) + 1)
    sums = [0.0] * len(documents)
    for index, likelihood in zip(owners, score_rows(model, rows, batch_size), strict=True):
        sums[index] += likelihood.log_probability
    scored = zip(lengths, sums, strict=True)
    for one in block:
        number = totals.documents + totals.malformed + totals.empty
        if isinstance(one, Malformed):
            totals.malformed += 1
            yield {"document": number, "error": one.describe()}
        elif one.is_empty:
            totals.empty += 1
            yield {"document": number, "error": "empty"}
        else:
            tokens, log_probability = next(scored)
            size = len(one.text.encode())
            totals.documents += 1
            totals.tokens += tokens
            totals.bytes += size
            totals.log_probability += log_probability
            yield {
                "document": number,
                "log_probability": log_probability,
                "tokens": tokens,
                "bytes": size,
                "bits_per_byte": _bits(log_probability, size),
                "perplexity": perplexity_of(-log_probability / tokens),
            }
