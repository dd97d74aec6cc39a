"""A linear baseline for document classifiers: TF-IDF of words and pairs of words, logistic regression.

    model = longseq.from_pretrained("folder")
    logits = model(tokens, mask=mask)            # tokens [N, T], logits [N, num_classes]

`longseq.tasks.document.model` fits it with scikit-learn, which predictions do not need.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from longseq.kernels.packing import Packing
from longseq.models import PretrainedModel, register_kind

# A word, or a single other character but space: brackets and operators matter in code.
WORDS = r"\w+|[^\w\s]"


@register_kind("linear")
class LinearTextClassifier(PretrainedModel, nn.Module):
    """Logistic regression on n-grams of words: logits [N, num_classes] of N documents of tokens.

    A document is decoded and lowercased, `pattern` finds its words, and the n-grams of 1 to `ngrams` words in the
    vocabulary are counted. A count n becomes (1 + log n) times the n-gram's `inverse_frequency`, and a document's
    values are scaled to a Euclidean length of 1. Without a tokenizer, the words are the tokens.

    Args:
        num_classes: number of classes or labels.
        vocabulary: the n-grams, their words separated by a space.
        ngrams: the most words of an n-gram.
        pattern: the regular expression of a word.

    Attributes:
        text: the tokenizer that decodes documents (see `PretrainedModel`).
    """

    def __init__(
        self, *, num_classes: int, vocabulary: Sequence[str] = (), ngrams: int = 2, pattern: str = WORDS
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.ngrams = ngrams
        self._word = re.compile(pattern)
        self._places = {gram: place for place, gram in enumerate(vocabulary)}
        self.coefficients = nn.Parameter(torch.empty(len(self._places), num_classes))
        self.bias = nn.Parameter(torch.empty(num_classes))
        self.inverse_frequency: Tensor
        self.register_buffer("inverse_frequency", torch.empty(len(self._places)))
        self.init_weights()

    def init_weights(self) -> None:
        """Give all classes the same score, as before a fit and after `to_empty`."""
        nn.init.zeros_(self.coefficients)
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.inverse_frequency)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | Packing | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits `[N, num_classes]` of padded documents `[N, T]` with their mask, or of a packed row with borders."""
        return self.score([self.read(document) for document in _split(tokens, cu_seqlens, mask)])

    def score(self, texts: Sequence[str]) -> Tensor:
        """Logits `[N, num_classes]` of N texts."""
        counted = [self._count(text) for text in texts]
        device, dtype = self.bias.device, self.bias.dtype
        sizes = torch.tensor([0, *map(len, counted)])
        places = torch.tensor([place for one in counted for place in one], dtype=torch.long, device=device)
        counts = torch.tensor([count for one in counted for count in one.values()], dtype=dtype, device=device)
        documents = torch.arange(len(texts), device=device).repeat_interleave(sizes[1:].to(device))
        values = (1 + counts.log()) * self.inverse_frequency[places]
        squares = torch.zeros(len(texts), dtype=dtype, device=device).index_add(0, documents, values * values)
        values = values / squares.sqrt()[documents]
        scores = nn.functional.embedding_bag(
            places, self.coefficients, sizes[:-1].cumsum(0).to(device), mode="sum", per_sample_weights=values
        )
        return scores + self.bias

    def grams(self, text: str) -> Iterator[str]:
        """The n-grams of a text, once for each time that they occur."""
        words = self._word.findall(text.lower())
        yield from words
        for size in range(2, self.ngrams + 1):
            for start in range(len(words) - size + 1):
                yield " ".join(words[start : start + size])

    def read(self, document: Sequence[int]) -> str:
        """The text of a document's tokens."""
        return self._decode(document)

    def flops(self, tokens: int) -> int:
        """Count the floating-point operations over one document of `tokens` words at most."""
        return 2 * self.ngrams * tokens * self.num_classes

    def _count(self, text: str) -> Counter[int]:
        return Counter(place for gram in self.grams(text) if (place := self._places.get(gram)) is not None)

    @cached_property
    def _decode(self) -> Any:
        return _decoder((self.text or {}).get("tokenizer"))


def _decoder(tokenizer: Mapping[str, Any] | None) -> Any:
    if tokenizer is None:
        return lambda document: " ".join(map(str, document))
    if tokenizer["kind"] == "bytes":
        return lambda document: bytes(token for token in document if token < 256).decode(errors="replace")
    from tokenizers import Tokenizer

    library, separator = Tokenizer.from_str(tokenizer["json"]), tokenizer.get("separator")
    left_out = library.token_to_id(separator) if separator else None
    return lambda document: library.decode([t for t in document if t != left_out], skip_special_tokens=False)


def _split(tokens: Tensor, cu_seqlens: Tensor | Packing | None, mask: Tensor | None) -> list[list[int]]:
    """The tokens of each document of a batch."""
    if cu_seqlens is None:
        rows = tokens.tolist()
        if mask is None:
            return rows
        return [row[:length] for row, length in zip(rows, mask.sum(dim=1).tolist(), strict=True)]
    borders = (cu_seqlens.cu_seqlens if isinstance(cu_seqlens, Packing) else cu_seqlens).tolist()
    row = tokens[0].tolist()
    return [row[start:end] for start, end in pairwise(borders)]
