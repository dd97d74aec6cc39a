"""`longseq generate`: continue prompts with a language model, token by token."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from longseq.files import Kind, json_keys, replacing
from longseq.kernels.packing import Packing
from longseq.models import describe
from longseq.state import fill_state, state_tensors
from longseq.tasks.command_keys import GenerateKeys
from longseq.tasks.data.seeds import derive_seed
from longseq.tasks.devices import choose_device, is_out_of_memory
from longseq.tasks.report import quiet_libraries
from longseq.tasks.text.info import TextInfo
from longseq.tasks.text.sources import JSON_LINES, JsonObject, compression_of, is_array
from longseq.tasks.text.stream import StopStrings, TextStream
from longseq.tasks.text.tokenizer import Tokenizer
from longseq.tasks.training import checkpoint
from longseq.tasks.training.command import read_command
from longseq.tasks.training.files import prepare_file, write_text

_log = logging.getLogger(__name__)

# The tasks whose models write text.
TASKS = ("lm",)
# Files whose lines are no prompts: the columns of a table.
_WITH_COLUMNS = (".csv", ".tsv", ".parquet")
# What the file of a state holds; the checksum "weights" is not in those of earlier versions.
STATE = {"state", "scores", "read", "written", "model"}


@dataclass(frozen=True)
class Request:
    """A row of a batch: the tokens that are read first, and the number that seeds what is drawn for it."""

    tokens: list[int]
    number: int


@dataclass
class Written:
    """What was written after a prompt, so far; `reason` is length, end or stop, and None while it is written."""

    tokens: list[int]
    text: str = ""
    reason: str | None = None


@quiet_libraries()
def run(cfg: DictConfig) -> list[dict[str, Any]]:
    """Continue `cfg.prompt`, the prompts of `cfg.input` or the text of `cfg.state`; print and return what is new."""
    keys = read_command(GenerateKeys, cfg)
    assert keys.checkpoint is not None
    if keys.output is not None and Path(keys.output).suffix != ".jsonl":
        raise ValueError(f"output={keys.output} must end in .jsonl")
    for key in ("output", "save_state"):
        if (file := getattr(keys, key)) is not None:
            reads = (keys.checkpoint, keys.input, keys.state if key == "output" else None)
            prepare_file(Path(file), _KINDS[key], key, reads=reads)
    tell_escapes("stop", keys.stop)
    device = choose_device(keys.device)
    prompts = [keys.prompt] if keys.prompt is not None else [] if keys.input is None else read_prompts(Path(keys.input))
    if keys.prompt is not None:
        _check_prompt(keys.prompt, "prompt")
    loaded = checkpoint.load(keys.checkpoint, weights=keys.weights, map_location=device, tasks=TASKS)
    info = TextInfo.from_dict(loaded.data)
    tokenizer = info.make_tokenizer()
    model: Any = loaded.backbone.to(getattr(torch, keys.dtype)).eval()
    try:
        results = _write_and_show(Writer(model, tokenizer, keys), prompts)
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # stopped by hand: what has been written stands on the screen
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        together = min(len(prompts), keys.batch_size) or 1
        raise ValueError(
            f"out of memory with {together} prompts at once and max_new_tokens={keys.max_new_tokens}: give a smaller "
            "batch_size or max_new_tokens, for which attention reserves room, or dtype=bfloat16"
        ) from error
    rows = [
        {"prompt": prompt, "text": written.text, "tokens": len(written.tokens), "reason": written.reason}
        for prompt, written in zip_longest(prompts, results)
    ]
    if keys.output is not None:
        write_text(Path(keys.output), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


def _write_and_show(writer: Writer, prompts: Sequence[str]) -> list[Written]:
    """A single text is shown as it is written, several ones when all are."""
    if writer.keys.state is not None or len(prompts) == 1:
        try:
            if writer.keys.state is not None:
                return [writer.resume(Path(writer.keys.state), show=_show)]
            _show(prompts[0])
            return writer.write(prompts, show=_show)
        finally:
            print()  # an error stands below the text, in a line of its own
    results = writer.write(prompts)
    for prompt, written in zip(prompts, results, strict=True):
        _show(f"{prompt}{written.text}\n\n")
    return results


def _check_prompt(prompt: str, place: str) -> None:
    """Raise ValueError for a prompt with parts that are no characters, as JSON and terminals allow."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} is no UTF-8: {error.reason} at character {error.start + 1}") from error


def tell_escapes(key: str, texts: Iterable[str]) -> None:
    r"""Warn, in one line, of a backslash and an n, r or t: a shell passes both on, and no line break or tab."""
    if any(mark in text for text in texts for mark in (r"\n", r"\r", r"\t")):
        _log.warning(
            "%s has a backslash and a letter, which stand for no line break or tab: bash and zsh write these in %s",
            key,
            r"""$'...', as in $'stop=["\n\n"]'""",
        )


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: of JSON the `prompt` of each line or row, which may be empty, else each line with text.

    JSON are the files of JSON_LINES and .json, which may be one array. ValueError, in one line, for a file without a
    prompt, one that is no UTF-8, one of another format with columns and a row that cannot be read.
    """
    ending = path.suffix.lower()
    if ending in _WITH_COLUMNS:
        raise ValueError(f"{path}: prompts are read from .jsonl and .json, in the key prompt, and from lines of text")
    content = path.read_bytes()
    try:
        # Not splitlines(), which also splits at characters that JSON texts may hold as they are, such as U+2028.
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        told = compression_of(content)
        reason = f"compressed by {told}: decompress it" if told else f"{error.reason} at byte {error.start}"
        raise ValueError(f"{path} is no UTF-8: {reason}") from error
    lines = text.split("\n")
    if ending == ".json" and is_array(path):
        prompts = _prompts_of_array(path, text)
    elif ending in (*JSON_LINES, ".json"):
        places = [(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
        prompts = [_read_prompt(place, line) for place, line in places]
    else:
        prompts = [line for line in lines if line.strip()]
        empty = len(lines) - len(prompts) - (not lines[-1].strip())  # a line break may end the last prompt
        if empty:
            _log.warning(
                "%s: %d line(s) without text are no prompts, so that results count the others; a .jsonl file may hold "
                "empty prompts",
                path,
                empty,
            )
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def _prompts_of_array(path: Path, text: str) -> list[str]:
    try:
        rows = json.loads(text, object_pairs_hook=JsonObject)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    return [_find_prompt(f"{path}, row {number}", row) for number, row in enumerate(rows)]


def _read_prompt(place: str, line: str) -> str:
    try:
        found = json.loads(line, object_pairs_hook=JsonObject)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: no JSON object with the key prompt") from error
    return _find_prompt(place, found)


def _find_prompt(place: str, found: Any) -> str:
    """The prompt of a value of JSON: a text, or an object with the key prompt."""
    if isinstance(found, JsonObject) and "prompt" in found:
        if "prompt" in found.repeated:
            raise ValueError(f"{place}: the key prompt twice")
        found = found["prompt"]
        if not isinstance(found, str):
            raise ValueError(f"{place}: prompt is no text")
    if not isinstance(found, str):
        raise ValueError(f"{place}: no JSON object with the key prompt")
    _check_prompt(found, f"{place}: prompt")
    return found


class Writer:
    """Continues texts with a model, several at once; what is drawn for one depends on its number and the seed alone.

    With `cut_prompts` a model with learned positions reads the last tokens of a prompt that is too long, else it is
    refused.
    """

    def __init__(
        self, model: TokenBackbone, tokenizer: Tokenizer, keys: GenerateKeys, *, cut_prompts: bool = False
    ) -> None:
        self.model, self.tokenizer, self.keys, self.cut_prompts = model, tokenizer, keys, cut_prompts
        self.device = next(model.parameters()).device
        self.sampling = Sampling(keys.temperature, keys.top_k, keys.top_p, keys.repetition_penalty)
        self.uses_graph = can_record(model) if keys.cuda_graph is None else keys.cuda_graph
        StopStrings(keys.stop)

    def write(
        self,
        prompts: Sequence[str],
        show: Callable[[str], None] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[Written]:
        """Continue each prompt; `show` gets the text of a single one as it is written.

        An empty prompt is continued from the token with which texts begin (`Tokenizer.start`).
        `numbers` are those of the prompts among more than these, by default from 0 on.
        """
        numbers = range(len(prompts)) if numbers is None else numbers
        requests = [Request(self._encode(prompt), number) for number, prompt in zip(numbers, prompts, strict=True)]
        # Rows of similar lengths share a batch: the longest prompt of a batch decides how long it is read.
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].tokens))
        found: dict[int, Written] = {}
        size = self.keys.batch_size
        if self.keys.save_state is not None and len(requests) > 1:
            raise ValueError("save_state keeps the state of one text: give one prompt")
        for start in range(0, len(order), size):
            batch = [requests[index] for index in order[start : start + size]]
            found |= dict(zip(order[start : start + size], self._write(batch, show), strict=True))
        return [found[index] for index in range(len(requests))]

    def resume(self, path: Path, show: Callable[[str], None] | None = None) -> Written:
        """Continue the text whose state `save_state` has written, as if it had not been interrupted."""
        saved = _read_state(path)
        if "weights" not in saved:
            raise ValueError(
                f"state={path} is of an earlier version, which does not tell all models apart: write it again from its "
                "prompt"
            )
        if any(saved[key] != value for key, value in _fingerprint(self.model).items()):
            raise ValueError(f"state={path} is of another model, or dtype, than checkpoint={self.keys.checkpoint}")
        read, written = saved["read"], saved["written"]
        self._check_positions(len(read) + len(written), f"the text of state={path}")
        with torch.inference_mode():
            tensors = [tensor.to(self.device) for tensor in saved["state"].values()]
            state = fill_state(self.model.initial_state(1), tensors)
            state = self.model.preallocate(state, len(read) + len(written) + self.keys.max_new_tokens)
        return self._continue([Request(read, 0)], state, saved["scores"].to(self.device), [written], show)[0]

    @torch.inference_mode()
    def _write(self, requests: Sequence[Request], show: Callable[[str], None] | None) -> list[Written]:
        rows = [torch.tensor(request.tokens, device=self.device) for request in requests]
        lengths = [len(row) for row in rows]
        room = max(lengths) + self.keys.max_new_tokens
        if len(set(lengths)) == 1:
            features, state = self.model.forward_features(torch.stack(rows), max_length=room)
            last = features[:, -1]
        else:  # packed, they need no padding
            packing = Packing(torch.tensor([0, *accumulate(lengths)]), device=self.device)
            features, state = self.model.forward_features(torch.cat(rows)[None], cu_seqlens=packing, max_length=room)
            last = features[0, packing.cu_seqlens[1:] - 1]
        scores = self.model.forward_head(last)
        del features, last  # of all prompts, and not needed while tokens are drawn
        return self._continue(requests, state, scores, [[] for _ in requests], show)

    @torch.inference_mode()
    def _continue(
        self,
        requests: Sequence[Request],
        state: Any,
        scores: Tensor,
        before: Sequence[list[int]],
        show: Callable[[str], None] | None,
    ) -> list[Written]:
        """Write behind `scores [B, V]`; `before` are the tokens that an interrupted writing has drawn."""
        keys = self.keys
        written = [Written([]) for _ in requests]
        texts = [
            _Text(self.tokenizer, keys.stop, request.tokens, old) for request, old in zip(requests, before, strict=True)
        ]
        seeds = torch.tensor([derive_seed(keys.seed, request.number) for request in requests])
        seen = self._seen(requests, before, scores.shape[-1])
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
            if one.reason is None:
                one.reason = "length"
            if one.reason != "stop":
                _add(one, text.finish(), show)
        if keys.save_state is not None:
            assert len(requests) == 1
            if written[0].reason != "length":
                raise ValueError(
                    f"save_state: the text has ended by {written[0].reason}, and there is nothing to go on with"
                )
            writing.read()
            state = self.model.trim(writing.state)
            tokens = before[0] + written[0].tokens
            _save_state(Path(keys.save_state), self.model, state, writing.logits, requests[0], tokens)
        return written

    def _take(self, written: Written, text: _Text, token: int, show: Callable[[str], None] | None) -> None:
        """Add a token to a row that is not at its end."""
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
        if max(tokens) >= self.model.vocab_size:
            raise ValueError(
                f"the prompt has the token {max(tokens)}, and the model knows {self.model.vocab_size}: the tokenizer "
                "is not that of the model"
            )
        most = self.model.max_length
        if self.cut_prompts and most is not None and most > self.keys.max_new_tokens:
            tokens = tokens[self.keys.max_new_tokens - most :]
        self._check_positions(len(tokens), "the prompt")
        return tokens

    def _check_positions(self, tokens: int, what: str) -> None:
        most = self.model.max_length
        if most is not None and tokens + self.keys.max_new_tokens > most:
            raise ValueError(
                f"{what} of {tokens} tokens and max_new_tokens={self.keys.max_new_tokens} are more than the "
                f"{most} positions that the model has learned: give fewer"
            )

    def _seen(self, requests: Sequence[Request], before: Sequence[list[int]], vocabulary: int) -> Tensor | None:
        if self.sampling.repetition_penalty == 1:
            return None
        seen = torch.zeros(len(requests), vocabulary, dtype=torch.bool)
        for row, (request, old) in enumerate(zip(requests, before, strict=True)):
            seen[row, request.tokens + old] = True
        return seen.to(self.device)


def draw_tokens(writing: Continuation, count: int) -> Iterator[list[int]]:
    """Yield the next tokens of all rows, so many times.

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
    """The text of a row, of which stop strings are no part.

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


def _add(written: Written, text: str, show: Callable[[str], None] | None) -> None:
    written.text += text
    if show is not None and text:
        show(text)


def _show(text: str) -> None:
    """Print text at once; a question mark takes the place of what the terminal's encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


def _save_state(
    path: Path, model: TokenBackbone, state: Any, scores: Tensor, request: Request, written: list[int]
) -> None:
    tensors = {name: tensor.cpu() for name, tensor in state_tensors(state)}
    content = {"state": tensors, "scores": scores.cpu(), "read": request.tokens, "written": written}
    with replacing(path) as partial:
        torch.save({**content, **_fingerprint(model)}, partial)


def _fingerprint(model: TokenBackbone) -> dict[str, str]:
    """Tells models apart: by their arguments, and by all their weights."""
    arguments = json.dumps(describe(model)["model_args"], sort_keys=True, default=str).encode()
    return {
        "model": hashlib.blake2b(arguments, digest_size=16).hexdigest(),
        "weights": checksum(model.state_dict()),
    }


def _read_state(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"state={path}: there is no such file; `longseq generate save_state=FILE` writes one")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"state={path} cannot be read: it is damaged, or none of `longseq generate`") from error
    if not isinstance(saved, dict) or not saved.keys() >= STATE:
        raise ValueError(f"state={path} is none of `longseq generate save_state=FILE`")
    return saved


def _is_state(path: Path) -> bool:
    try:
        return bool(_read_state(path))
    except ValueError:
        return False


_KINDS = {
    "output": Kind(
        "texts of `longseq generate`", lambda path: json_keys(path) == {"prompt", "text", "tokens", "reason"}
    ),
    "save_state": Kind("state of `longseq generate`", _is_state),
}
