"""Continues texts with a language model, token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longseq.backbones.generation import Continuation, Sampling, TokenSampler, can_record
from longseq.backbones.tokens import TokenBackbone
from longseq.checksum import checksum
from longseq.files import replacing
from longseq.kernels.packing import Packing
from longseq.models import describe
from longseq.state import fill_state, state_tensors
from longseq.tasks.commands import Generate
from longseq.tasks.data.sampler import derive_seed
from longseq.tasks.text.tokenizer import StopStrings, TextStream, Tokenizer

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
        if self.keys.save_state is not None and len(prompts) > 1:
            raise ValueError("save_state keeps the state of one text: give one prompt")
        numbers = range(len(prompts)) if numbers is None else numbers
        rows = []
        most, new = self.model.max_length, self.keys.max_new_tokens
        for number, prompt in zip(numbers, prompts, strict=True):
            tokens = self.tokenizer.encode_prompt(prompt)
            if self.cut_prompts and most is not None and most > new:
                tokens = tokens[new - most :]
            rows.append(Written(self, tokens, number, [], show))
        # Rows of similar lengths share a batch: its longest prompt determines the time of reading.
        order = sorted(rows, key=lambda row: len(row.read))
        for start in range(0, len(order), self.keys.batch_size):
            self._write(order[start : start + self.keys.batch_size])
        return rows

    @torch.inference_mode()
    def resume(self, path: Path, show: Show | None = None) -> Written:
        """Continue the text of a file of `save_state`."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved["model"] != _fingerprint(self.model):
            raise ValueError(f"{path} holds the state of another model or dtype")
        row = Written(self, saved["read"], 0, saved["written"], show)
        room = self._check_positions(len(row.read) + len(row.before))
        tensors = [tensor.to(self.device) for tensor in saved["state"].values()]
        state = self.model.preallocate(fill_state(self.model.initial_state(1), tensors), room)
        self._continue([row], state, saved["scores"].to(self.device))
        return row

    @torch.inference_mode()
    def _write(self, rows: Sequence[Written]) -> None:
        tokens = [torch.tensor(row.read, device=self.device) for row in rows]
        lengths = [len(row) for row in tokens]
        room = self._check_positions(max(lengths))
        if len(set(lengths)) == 1:
            features, state = self.model.forward_features(torch.stack(tokens), max_length=room)
            last = features[:, -1]
        else:  # packed, without padding
            packing = Packing(torch.tensor([0, *accumulate(lengths)]), device=self.device)
            features, state = self.model.forward_features(torch.cat(tokens)[None], cu_seqlens=packing, max_length=room)
            last = features[0, packing.cu_seqlens[1:] - 1]
        scores = self.model.forward_head(last)
        del features, last  # of all tokens of the prompts
        self._continue(rows, state, scores)

    def _continue(self, rows: Sequence[Written], state: Any, scores: Tensor) -> None:
        """Write after `scores [B, V]`."""
        keys = self.keys
        seen = None
        if self.sampling.repetition_penalty != 1:
            seen = torch.zeros(scores.shape, dtype=torch.bool)
            for index, row in enumerate(rows):
                seen[index, row.read + row.before] = True
            seen = seen.to(self.device)
        seeds = torch.tensor([derive_seed(keys.seed, row.number) for row in rows]).to(self.device)
        sampler = TokenSampler(self.sampling, seeds, drawn=len(rows[0].before), seen=seen)
        writing = Continuation(self.model, state, scores, sampler, cuda_graph=self.uses_graph)
        del state, scores
        for drawn in draw_tokens(writing, keys.max_new_tokens):
            for row, token in zip(rows, drawn, strict=True):
                row.push(token)
            if all(row.reason is not None for row in rows):
                break
        sampler.check()
        for row in rows:
            row.finish()
        if keys.save_state is not None:
            path, row = Path(keys.save_state), rows[0]
            if row.reason != "length":
                raise ValueError(f"no state is saved: the text has ended by {row.reason}")
            writing.read()
            content = {
                "state": {name: tensor.cpu() for name, tensor in state_tensors(self.model.trim(writing.state))},
                "scores": writing.logits.cpu(),
                "read": row.read,
                "written": row.before + row.tokens,
                "model": _fingerprint(self.model),
            }
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                torch.save(content, partial)

    def _check_positions(self, tokens: int) -> int:
        """`tokens` and the new ones. ValueError if the model has fewer positions."""
        most, room = self.model.max_length, tokens + self.keys.max_new_tokens
        if most is not None and room > most:
            raise ValueError(f"{tokens} tokens and {room - tokens} new ones exceed the model's {most} positions")
        return room


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

    `number` seeds the draws; `before` are the tokens that were written before the state was saved, `tokens` and `text`
    what is written after them. `reason` is length, end or stop, and None until the text ends.
    """

    reason: str | None = None

    def __init__(self, writer: Writer, read: list[int], number: int, before: list[int], show: Show | None) -> None:
        self.read, self.number, self.before, self.show = read, number, before, show
        self.tokens: list[int] = []
        self.text = ""
        self._ends = writer.tokenizer.ends if writer.keys.end else ()
        self._stream = TextStream(writer.tokenizer, read)
        self._stops = StopStrings(writer.keys.stop, "".join([self._stream.push(token) for token in before]))

    def push(self, token: int) -> None:
        """Add a token, unless the text has ended."""
        if self.reason is not None:
            return
        if token in self._ends:
            self.reason = "end"
            return
        self.tokens.append(token)
        self._add(self._stops.push(self._stream.push(token)))
        if self._stops.stopped:
            self.reason = "stop"

    def finish(self) -> None:
        """Add the text that waits for more tokens."""
        self.reason = self.reason or "length"
        if self.reason != "stop":
            self._add(self._stops.push(self._stream.finish()) + self._stops.finish())

    def _add(self, text: str) -> None:
        self.text += text
        if self.show is not None and text:
            self.show(text)


def _fingerprint(model: TokenBackbone) -> str:
    """A model's arguments and the checksum of its weights; the checksum of an exported file."""
    if (checksum_of_file := getattr(model, "sha256", None)) is not None:
        return str(checksum_of_file)
    return json.dumps([describe(model)["model_args"], checksum(model.state_dict())], sort_keys=True, default=str)
