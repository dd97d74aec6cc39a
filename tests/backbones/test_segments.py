"""Classifiers that read documents in segments: logits and gradients are those of reading at once."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from cases import cases
from representatives import REPRESENTATIVES
from torch import Tensor, nn
from zeros import without_zeros

from longseq import mixers
from longseq.backbones.classifier import TextClassifier
from longseq.backbones.segments import check_segments, read_in_segments
from longseq.kernels.packing import Packing

VOCABULARY = 11
CARRIED = [name for name in REPRESENTATIVES if not mixers.get(name).growing_state]
LENGTHS = (7, 0, 1, 2)


def make(mixer: str = "deltanet", depth: int = 1, **options: Any) -> TextClassifier:
    torch.manual_seed(0)
    if mixer == "window_attention":
        options["mixer_options"] = {"window": 5}  # longer than a segment
    model = TextClassifier(num_classes=3, vocab_size=VOCABULARY, d_model=16, depth=depth, mixer=mixer, **options)
    model = without_zeros(model).double()
    with torch.no_grad():  # so that tokens, and not rounding, determine the output
        model.head.weight.mul_(50)
    return model


def make_row(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Packing, Tensor]:
    """A packed row, its borders, and the places of the documents that are not empty."""
    tokens = torch.randint(VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    packing = Packing(torch.tensor([0, *accumulate(lengths)]))
    return tokens, packing, torch.tensor(lengths).nonzero()[:, 0]


def find_gradients(model: TextClassifier, logits: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    weights = torch.arange(1, logits.numel() + 1, dtype=logits.dtype).cos().view_as(logits)
    (logits * weights).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_same(model: TextClassifier, segment: int) -> None:
    tokens, packing, real = make_row()
    whole = model(tokens, cu_seqlens=packing)[real]
    cut = read_in_segments(model, tokens, cu_seqlens=packing, segment=segment)[real]
    torch.testing.assert_close(cut, whole, rtol=1e-9, atol=1e-10)
    expected, found = find_gradients(model, whole), find_gradients(model, cut)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-9, msg=lambda told: f"{name}: {told}")  # noqa: B023


@pytest.mark.slow
@cases("mixer", CARRIED)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_segments_give_the_logits_and_gradients_of_whole_documents(mixer: str, direction: str) -> None:
    if (mixer, direction) != ("window_attention", "bidirectional"):  # which sees tokens on both sides at once
        check_same(make(mixer, direction=direction), segment=3)


@pytest.mark.slow
@cases(
    "options",
    [
        {"mixer": "2xdeltanet+window_attention", "depth": 3, "direction": "alternating", "pooling": "max"},
        {"mixer": "mamba+deltanet", "depth": 2, "direction": "bidirectional", "share_directions": "none"},
        {"direction": "bidirectional", "merge": "mean", "pooling": "first"},
        {"norm_order": "post", "positions": "learned", "max_length": 7, "pooling": "last"},
        {"positions": "learned", "max_length": 7, "direction": "alternating", "depth": 2, "pooling": "attention"},
        {"mixer": "mamba", "pooling": "attention", "recompute": "block"},
        {"mixer": "rwkv7", "depth": 2, "direction": "bidirectional"},
        {"mixer": "rwkv7+window_attention+rwkv7", "depth": 3, "recompute": "block"},
        {"mixer": "rwkv7+window_attention+rwkv7", "depth": 3, "direction": "alternating"},
        {"hashed_ngrams": 4, "ngram_buckets": 50},
        {"hashed_ngrams": 4, "ngram_buckets": 50, "direction": "bidirectional", "pooling": "max"},
    ],
)
def test_every_way_of_reading_and_pooling_goes_on_from_segment_to_segment(options: dict[str, Any]) -> None:
    if "window" in options.get("mixer", ""):
        options = {**options, "mixer_options": {"window_attention": {"window": 3}}}
    check_same(make(**options), segment=2)


@cases("segment", [1, 100])
def test_a_segment_of_one_token_or_of_all_documents_gives_the_same(segment: int) -> None:
    check_same(make(direction="bidirectional"), segment)


def test_padding_does_not_change_the_logits() -> None:
    model = make(direction="bidirectional")
    tokens = make_row((10,))[0].view(2, 5)
    mask = torch.tensor([[True] * 5, [False, True, True, True, False]])
    logits = read_in_segments(model, tokens, mask=mask, segment=2)
    torch.testing.assert_close(logits[:1], model(tokens[:1]))
    torch.testing.assert_close(logits[1:], model(tokens[1:, 1:4]))
    torch.testing.assert_close(read_in_segments(model, tokens, segment=2), model(tokens))


@pytest.mark.parametrize("segments", [1, 2])
def test_gradients_through_the_last_segments_are_those_behind_a_detached_state(segments: int) -> None:
    model, segment = make("mamba", depth=2), 3
    tokens, packing, _ = make_row((8, 2))
    found = find_gradients(
        model, read_in_segments(model, tokens, cu_seqlens=packing, segment=segment, gradient_segments=segments)
    )
    start = (3 - segments) * segment
    with torch.no_grad():
        before, state = model.body.forward_features(tokens[:, :start])
    after, _ = model.body.forward_features(tokens[:, start:8], state)
    other, _ = model.body.forward_features(tokens[:, 8:])
    pooled = torch.cat([torch.cat([before, after], dim=1).mean(1), other.mean(1)])
    for name, gradient in find_gradients(model, model.classify(pooled)).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-9)


def test_no_more_tokens_than_a_segment_are_read_at_once_and_all_are_read_again_for_gradients() -> None:
    model = make()
    seen: list[int] = []
    model.body.blocks[0].register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    tokens, packing, _ = make_row((10, 1, 1, 2, 3))
    logits = read_in_segments(model, tokens, cu_seqlens=packing, segment=4)
    assert seen == [4, 4, 4, 2, 3], "documents share a segment where they fit, and a short one is not cut"
    logits.sum().backward()
    assert seen[5:] == [3, 2, 4, 4, 4], "each segment is read again, from the last to the first"


@cases(
    ("options", "gradient_segments"),
    [
        ({"mixer": "deltanet+attention", "depth": 2}, None),
        ({"mixer": "attention", "direction": "bidirectional"}, None),
        ({"mixer": "hyena"}, None),
        ({"direction": "bidirectional"}, 2),
    ],
)
def test_what_cannot_be_read_in_segments_is_refused(options: dict[str, Any], gradient_segments: int | None) -> None:
    with pytest.raises(ValueError, match="segments"):
        check_segments(make(**options), gradient_segments)


def _add_ramp(_: nn.Module, __: Any, output: Any) -> Any:
    ramp = torch.arange(16.0, dtype=torch.float64)
    return (output[0] + ramp, *output[1:]) if isinstance(output, tuple) else output + ramp


@pytest.mark.slow
def test_documents_are_cut_between_chunks() -> None:
    """Of a mixer with chunks any other cut would change the outputs, and so would cuts that the end does not share."""
    chunks = {"mixer": "ttt", "mixer_options": {"chunk_size": 4}}
    model, tokens = make(**chunks, depth=2), make_row((23,))[0]
    whole = model(tokens)
    for segment in (4, 7, 10, 23):
        torch.testing.assert_close(read_in_segments(model, tokens, segment=segment), whole, rtol=1e-9, atol=1e-10)
    with pytest.raises(ValueError, match="segment=3: the model reads chunks of 4 tokens"):
        read_in_segments(model, tokens, segment=3)
    for direction in ("bidirectional", "alternating"):
        with pytest.raises(ValueError, match="cannot be read in segments"):
            check_segments(make(**chunks, depth=2, direction=direction))


def test_a_document_has_the_gradients_that_it_has_alone() -> None:
    model = make()
    tokens, packing, _ = make_row((2, 7))
    both = read_in_segments(model, tokens, cu_seqlens=packing, segment=3, gradient_segments=1)
    together = find_gradients(model, both[1:])
    alone = find_gradients(model, read_in_segments(model, tokens[:, 2:], segment=3, gradient_segments=1))
    for name, gradient in alone.items():
        torch.testing.assert_close(together[name], gradient)
