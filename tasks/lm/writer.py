"""Continues texts with a language model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from longseq.backbones.generation import Continuation, can_record
from longseq.backbones.sampling import Sampling, TokenSampler
from longseq.backbones.tokens import TokenBackbone
from longseq.kernels.packing import Packing
from longseq.tasks.commands import Generate
from longseq.tasks.data.sampler import derive_seed
from longseq.tasks.text.tokenizer import TextStream, Tokenizer

Show = Callable[[str], None]


class Writer:
    """Continues texts with a model, several at once; the draws for a text depend only on its number and the seed.

    With `cut_prompts`, a model with learned positions reads only the last tokens of a long prompt.
    """

    def __init__(
        self, model: TokenBackbone, tokenizer: Tokenizer, keys: Generate, *, cut_prompts: bool = False
    ) -> None:
        self.model, self.tokenizer, self.keys, self.cut_prompts = model, tokenizer, keys, cut_prompts
        self.device = next(model.parameters()).device
        self.sampling = Sampling(keys.temperature, keys.top_k, keys.top_p, keys.repetition_penalty)
        self.uses_graph = can_record(model) if keys.cuda_graph is None else keys.cuda_graph

    def write(
        self, prompts: Sequence[str], show: Show | None = None, numbers: Sequence[int] | None = None
    ) -> list[Written]:
        """Continue each prompt; `show` gets the text of a single one as it is written.

        An empty prompt is continued from `Tokenizer.start`. `numbers` seed the prompts, by default from 0 on.
        """
        numbers = range(len(prompts)) if numbers is None else numbers
        rows = []
        most, new = self.model.max_length, self.keys.max_new_tokens
        for number, prompt in zip(numbers, prompts, strict=True):
            tokens = self.tokenizer.encode_prompt(prompt)
            if self.cut_prompts and most is not None and most > new:
                tokens = tokens[new - most :]
            rows.append(Written(self, tokens, number, show))
        # Rows of similar lengths share a batch: its longest prompt determines the time of reading.
        order = sorted(rows, key=lambda row: len(row.read))
        for start in range(0, len(order), self.keys.batch_size):
            self._write(order[start : start + self.keys.batch_size])
        return rows

    @torch.inference_mode()
    def _write(self, rows: Sequence[Written]) -> None:
        tokens = [torch.tensor(row.read, device=self.device) for row in rows]
        lengths = [len(row) for row in tokens]
        most, room = self.model.max_length, max(lengths) + self.keys.max_new_tokens
        if most is not None and room > most:
            raise ValueError(f"a prompt and the new tokens, {room} in all, exceed the model's {most} positions")
        if len(set(lengths)) == 1:
            features, state = self.model.forward_features(torch.stack(tokens), max_length=room)
            last = features[:, -1]
        else:  # packed, without padding
            packing = Packing(torch.tensor([0, *accumulate(lengths)]), device=self.device)
            features, state = self.model.forward_features(torch.cat(tokens)[None], cu_seqlens=packing, max_length=room)
            last = features[0, packing.cu_seqlens[1:] - 1]
        scores = self.model.forward_head(last)
        seen = torch.zeros(scores.shape, dtype=torch.bool)
        for index, row in enumerate(rows):
            seen[index, row.read] = True
        seeds = torch.tensor([derive_seed(self.keys.seed, row.number) for row in rows])
        sampler = TokenSampler(self.sampling, seeds.to(self.device), seen=seen.to(self.device))
        writing = Continuation(self.model, state, scores, sampler, cuda_graph=self.uses_graph)  # type: ignore[arg-type]
        del features, last, state, scores
        for drawn in draw_tokens(writing, self.keys.max_new_tokens):
            for row, token in zip(rows, drawn, strict=True):
                row.push(token)
            if all(row.reason is not None for row in rows):
                break
        sampler.check()
        for row in rows:
            row.finish()


def draw_tokens(writing: Continuation, count: int) -> Iterator[list[int]]:
    """Yield the next tokens of all rows, `count` times.

    A GPU draws the next tokens while the host handles these, so one more may be drawn when a caller stops.
    """
    ahead: tuple[Tensor, torch.cuda.Event] | None = None
    for _ in range(count):
        token = writing.draw()
        if token.device.type != "cuda":
            yield token.tolist()
            continue
        before, ahead = ahead, (token.to("cpu", non_blocking=True), torch.cuda.Event())
        ahead[1].record()
        if before is not None:
            before[1].synchronize()
            yield before[0].tolist()
    if ahead is not None:
        ahead[1].synchronize()
        yield ahead[0].tolist()


class Written:
    """A text after the prompt `read`, which ends at an end-of-text token or before a stop string.

    `number` seeds the draws; `tokens` and `text` are what is written. `reason` is length, end or stop at the end.
    """

    reason: str | None = None

    def __init__(self, writer: Writer, read: list[int], number: int, show: Show | None) -> None:
        self.read, self.number, self.show = read, number, show
        self.tokens: list[int] = []
        self.text = ""
        self._ends = writer.tokenizer.ends if writer.keys.end else ()
        self._stream = TextStream(writer.tokenizer, read, writer.keys.stop)

    def push(self, token: int) -> None:
        """Add a token, unless the text has ended."""
        if self.reason is not None:
            return
        if token in self._ends:
            self.reason = "end"
            return
        self.tokens.append(token)
        self._add(self._stream.push(token))
        if self._stream.stopped:
            self.reason = "stop"

    def finish(self) -> None:
        """Add the text that waits for more tokens."""
        self.reason = self.reason or "length"
        if self.reason != "stop":
            self._add(self._stream.finish())

    def _add(self, text: str) -> None:
        self.text += text
        if self.show is not None and text:
            self.show(text)
