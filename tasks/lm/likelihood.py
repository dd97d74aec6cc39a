"""Losses of language models: metrics over batches, and log-probabilities of texts and continuations, many at once."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from longseq.backbones.tokens import TokenBackbone
from longseq.backbones.vocabulary_loss import CHUNK_SCORES, IGNORED
from longseq.blocks.precision import at_least_float32
from longseq.state import select_state

PIECE_TOKENS = 1 << 16  # tokens that a model reads at a time, over all rows; they bound the memory
_GROUPS = 32  # of positions: 0, 1, 2 to 3, 4 to 7, ...; the last one has all from 2^30 on


class TokenLoss(Metric):
    """The mean loss of a token, in nats, over all batches and processes; summed in float64, as tokens can be many.

    `unit` maps the mean to another unit. With `groups` there is a mean for each group of tokens.
    """

    full_state_update = False
    higher_is_better = False

    total: Tensor
    count: Tensor

    def __init__(self, unit: Callable[[Tensor], Tensor] | None = None, groups: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.unit = unit
        self.add_state("total", torch.zeros(groups, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(groups, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, count: Any) -> None:
        """Add a sum of losses over `count` tokens or bytes."""
        # Not in place: see `longseq.tasks.training.metrics.WeightedMean`.
        self.total = self.total + loss
        self.count = self.count + count

    def compute(self) -> Tensor:
        """The mean loss; NaN without tokens."""
        mean = self.total / self.count
        return mean if self.unit is None else self.unit(mean)


def to_bits(nats: Tensor) -> Tensor:
    """A loss in bits."""
    return nats / math.log(2)


class LossByPosition(TokenLoss):
    """The mean loss of tokens by position in their sequence, in groups: 0, 1, 2 to 3, 4 to 7, ..."""

    def __init__(self) -> None:
        super().__init__(groups=(_GROUPS,))

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
                perplexity = math.inf if loss > 709 else math.exp(loss)  # where it would overflow
                rows.append({"from": first, "to": last, "perplexity": perplexity, "tokens": int(count)})
        return rows


class Row(NamedTuple):
    """Tokens; those from `start` (at least 1) on are scored, given the tokens before them."""

    tokens: Sequence[int]
    start: int = 1


class Likelihood(NamedTuple):
    """The natural log-probability of a row's scored tokens; `is_greedy` if each is the most probable one."""

    log_probability: float
    is_greedy: bool


def document_rows(model: TokenBackbone, tokens: Sequence[int]) -> list[Row]:
    """Rows that together score the tokens of a document after the first one.

    With learned positions, windows of `max_length` tokens are read, of which the last overlaps; otherwise the whole.
    """
    most = model.max_length
    if most is None or len(tokens) - 1 <= most:
        return [Row(tokens)]
    rows = []
    for place in range(0, len(tokens) - 1, most):
        stop = min(place + most + 1, len(tokens))
        begin = max(0, stop - 1 - most)
        rows.append(Row(tokens[begin:stop], place + 1 - begin))
    return rows


@torch.inference_mode()
def score_rows(model: TokenBackbone, rows: Sequence[Row]) -> list[Likelihood]:
    """The likelihood of each row; all rows are read together.

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
    rows = [fitting[index] for index in order]  # the longest first
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
        asked = targets[:going_on, part]
        for some in (asked != IGNORED).nonzero().split(max(1, CHUNK_SCORES // model.vocab_size)):
            row, place = some.unbind(1)
            wanted = asked[row, place]
            scores = at_least_float32(model.forward_head(features[row, place]))
            total.index_add_(0, row, scores.log_softmax(-1).gather(1, wanted[:, None])[:, 0].double())
            missed.index_add_(0, row, (scores.argmax(-1) != wanted).double())
        begin = end
    back = torch.tensor(order).argsort()
    return [Likelihood(*one) for one in zip(total[back].tolist(), (missed[back] == 0).tolist(), strict=True)]
