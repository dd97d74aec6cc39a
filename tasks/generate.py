"""`longseq generate`: continue prompts with a language model, token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from longseq.backbones.continuation import Continuation
from longseq.backbones.sampling import Sampling, TokenSampler
from longseq.backbones.step_graph import can_record
from longseq.backbones.tokens import TokenBackbone
from longseq.checksum import checksum
from longseq.files import replacing
from longseq.kernels.packing import Packing
from longseq.models import describe
from longseq.state import fill_state, state_tensors
from longseq.tasks.circumstances import choose_device
from longseq.tasks.commands import Generate
from longseq.tasks.data.sampler import derive_seed
from longseq.tasks.report import quiet_libraries
from longseq.tasks.text.info import TextInfo
from longseq.tasks.text.stream import StopStrings, TextStream
from longseq.tasks.text.tokenizer import Tokenizer
from longseq.tasks.training import checkpoint
from longseq.tasks.training.configuration import read_command
from longseq.tasks.training.files import write_text

# The tasks whose models write text.
TASKS = ("lm",)

Show = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """A row of a batch: the tokens of the prompt, and the number that seeds its random draws."""

    tokens: list[int]
    number: int


@dataclass
class Written:
    """What was written after a prompt, so far; `reason` is length, end or stop, and None until the text ends."""

    tokens: list[int]
    text: str = ""
    reason: str | None = None


@quiet_libraries()
def run(cfg: DictConfig) -> list[dict[str, Any]]:
    """Continue `cfg.prompt`, the prompts of `cfg.input` or the text of `cfg.state`; print and return what is new."""
    keys = read_command(Generate, cfg)
    assert keys.checkpoint is not None
    device = choose_device(keys.device)
    prompts = [] if keys.prompt is None else [keys.prompt]
    if keys.input is not None:
        prompts = read_prompts(Path(keys.input))
    loaded = checkpoint.load(keys.checkpoint, weights=keys.weights, map_location=device, tasks=TASKS)
    tokenizer = TextInfo.from_dict(loaded.data).make_tokenizer()
    model: Any = loaded.backbone.to(getattr(torch, keys.dtype)).eval()
    writer = Writer(model, tokenizer, keys)
    if keys.state is not None:
        results = [writer.resume(Path(keys.state), show=_show)]
        print()
    elif len(prompts) == 1:  # shown while it is written
        _show(prompts[0])
        results = writer.write(prompts, show=_show)
        print()
    else:
        results = writer.write(prompts)
        for prompt, written in zip(prompts, results, strict=True):
            print(f"{prompt}{written.text}\n")
    rows = [
        {"prompt": prompt, "text": written.text, "tokens": len(written.tokens), "reason": written.reason}
        for prompt, written in zip_longest(prompts, results)
    ]
    if keys.output is not None:
        Path(keys.output).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(keys.output), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


def _show(text: str) -> None:
    print(text, end="", flush=True)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file.

    A line of a .jsonl or .ndjson file, and an entry of the array in a .json file, is a text or an object with the key
    `prompt`, which may be empty. Of any other file, each line with text is a prompt.
    """
    # Not splitlines(), which also splits at characters that JSON texts may contain, such as U+2028.
    text = path.read_text(encoding="utf-8-sig")
    lines = [line for line in text.split("\n") if line.strip()]
    ending = path.suffix.lower()
    if ending not in (".json", ".jsonl", ".ndjson"):
        return lines
    rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    return [row if isinstance(row, str) else row["prompt"] for row in rows]


class Writer:
    """Continues texts with a model, several at once; the draws for a text depend only on its number and the seed.

    With `cut_prompts`, a model with learned positions reads the last tokens of a prompt that is too long.
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

        An empty prompt is continued from the token with which texts begin (`Tokenizer.start`). `numbers` seed the
        prompts, by default from 0 on.
        """
        if self.keys.save_state is not None and len(prompts) > 1:
            raise ValueError("save_state keeps the state of one text: give one prompt")
        numbers = range(len(prompts)) if numbers is None else numbers
        requests = [Request(self._encode(prompt), number) for number, prompt in zip(numbers, prompts, strict=True)]
        # Rows of similar lengths share a batch: the longest prompt of a batch decides how long it is read.
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].tokens))
        found: dict[int, Written] = {}
        for start in range(0, len(order), self.keys.batch_size):
            chosen = order[start : start + self.keys.batch_size]
            found |= dict(zip(chosen, self._write([requests[index] for index in chosen], show), strict=True))
        return [found[index] for index in range(len(requests))]

    @torch.inference_mode()
    def resume(self, path: Path, show: Show | None = None) -> Written:
        """Continue the text whose state `save_state` has written, as if it had not been interrupted."""
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved["model"] != _fingerprint(self.model):
            raise ValueError(f"{path} holds the state of another model or dtype")
        read, written = saved["read"], saved["written"]
        room = self._check_positions(len(read) + len(written))
        tensors = [tensor.to(self.device) for tensor in saved["state"].values()]
        state = self.model.preallocate(fill_state(self.model.initial_state(1), tensors), room)
        return self._continue([Request(read, 0)], state, saved["scores"].to(self.device), [written], show)[0]

    @torch.inference_mode()
    def _write(self, requests: Sequence[Request], show: Show | None) -> list[Written]:
        rows = [torch.tensor(request.tokens, device=self.device) for request in requests]
        lengths = [len(row) for row in rows]
        room = self._check_positions(max(lengths))
        if len(set(lengths)) == 1:
            features, state = self.model.forward_features(torch.stack(rows), max_length=room)
            last = features[:, -1]
        else:  # packed, they need no padding
            packing = Packing(torch.tensor([0, *accumulate(lengths)]), device=self.device)
            features, state = self.model.forward_features(torch.cat(rows)[None], cu_seqlens=packing, max_length=room)
            last = features[0, packing.cu_seqlens[1:] - 1]
        scores = self.model.forward_head(last)
        del features, last  # they hold memory for all tokens of the prompts
        return self._continue(requests, state, scores, [[] for _ in requests], show)

    def _continue(
        self, requests: Sequence[Request], state: Any, scores: Tensor, before: Sequence[list[int]], show: Show | None
    ) -> list[Written]:
        """Write after `scores [B, V]`; `before` are the tokens that an interrupted writing has drawn."""
        keys = self.keys
        written = [Written([]) for _ in requests]
        texts = [
            _Text(self.tokenizer, keys.stop, request.tokens, old) for request, old in zip(requests, before, strict=True)
        ]
        seen = None
        if self.sampling.repetition_penalty != 1:
            seen = torch.zeros(scores.shape, dtype=torch.bool)
            for row, (request, old) in enumerate(zip(requests, before, strict=True)):
                seen[row, request.tokens + old] = True
            seen = seen.to(self.device)
        seeds = torch.tensor([derive_seed(keys.seed, request.number) for request in requests])
        sampler = TokenSampler(self.sampling, seeds.to(self.device), drawn=len(before[0]), seen=seen)
        writing = Continuation(self.model, state, scores, sampler, cuda_graph=self.uses_graph)
        del state, scores
        for drawn in draw_tokens(writing, keys.max_new_tokens):
            for one, text, token in zip(written, texts, drawn, strict=True):
                self._take(one, text, token, show)
            if all(one.reason is not None for one in written):
                break
        sampler.check()
        for one, text in zip(written, texts, strict=True):
            one.reason = one.reason or "length"
            if one.reason != "stop":
                _add(one, text.finish(), show)
        if keys.save_state is not None:
            if written[0].reason != "length":
                raise ValueError(f"no state is saved: the text has ended by {written[0].reason}")
            writing.read()
            content = {
                "state": {name: tensor.cpu() for name, tensor in state_tensors(self.model.trim(writing.state))},
                "scores": writing.logits.cpu(),
                "read": requests[0].tokens,
                "written": before[0] + written[0].tokens,
                "model": _fingerprint(self.model),
            }
            Path(keys.save_state).parent.mkdir(parents=True, exist_ok=True)
            with replacing(Path(keys.save_state)) as partial:
                torch.save(content, partial)
        return written

    def _take(self, written: Written, text: _Text, token: int, show: Show | None) -> None:
        """Add a token to a text that has not ended."""
        if written.reason is not None:
            return
        if token == self.tokenizer.separator and self.keys.end:
            written.reason = "end"
            return
        written.tokens.append(token)
        _add(written, text.push(token), show)
        if text.stopped:
            written.reason = "stop"

    def _encode(self, prompt: str) -> list[int]:
        tokens = self.tokenizer.encode_prompt(prompt)
        most = self.model.max_length
        if self.cut_prompts and most is not None and most > self.keys.max_new_tokens:
            tokens = tokens[self.keys.max_new_tokens - most :]
        return tokens

    def _check_positions(self, tokens: int) -> int:
        """The tokens in all, after `tokens` that are read."""
        most, room = self.model.max_length, tokens + self.keys.max_new_tokens
        if most is not None and room > most:
            raise ValueError(f"{tokens} tokens and {room - tokens} new ones exceed the model's {most} positions")
        return room


def draw_tokens(writing: Continuation, count: int) -> Iterator[list[int]]:
    """Yield the next tokens of all rows, `count` times.

    A GPU draws the next ones while the host handles these. So one more may have been drawn when a caller stops.
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


class _Text:
    """The text of a row, without stop strings.

    `prompt` are the tokens of its prompt, and `old` those that an interrupted writing has drawn.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], prompt: Sequence[int], old: Sequence[int]) -> None:
        # A stop string may have begun in the text of the last tokens; a character has at most four tokens.
        last = max(len(old) - 4 * max(map(len, stops), default=0), 0)
        self._stream = TextStream(tokenizer, [*prompt, *old[:last]])
        self._stops = StopStrings(stops, "".join([self._stream.push(token) for token in old[last:]]))

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def push(self, token: int) -> str:
        return self._stops.push(self._stream.push(token))

    def finish(self) -> str:
        return self._stops.push(self._stream.finish()) + self._stops.finish()


def _add(written: Written, text: str, show: Show | None) -> None:
    written.text += text
    if show is not None and text:
        show(text)


def _fingerprint(model: TokenBackbone) -> str:
    """A model's arguments and the checksum of its weights."""
    return json.dumps([describe(model)["model_args"], checksum(model.state_dict())], sort_keys=True, default=str)
