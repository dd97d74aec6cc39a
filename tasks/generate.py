"""`longseq generate`: continue prompts with a language model."""

import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from longseq.tasks.circumstances import choose_device
from longseq.tasks.commands import Generate
from longseq.tasks.lm.writer import Writer
from longseq.tasks.report import quiet_libraries
from longseq.tasks.text.tokenizer import TextInfo
from longseq.tasks.training import checkpoint
from longseq.tasks.training.configuration import read_command
from longseq.tasks.training.system import write_text

TASKS = ("lm",)


@quiet_libraries()
def run(cfg: DictConfig) -> list[dict[str, Any]]:
    """Continue `cfg.prompt` or the prompts of `cfg.input`; print and return the new text."""
    keys = read_command(Generate, cfg)
    device = choose_device(keys.device)
    prompts = [] if keys.prompt is None else [keys.prompt]
    if keys.input is not None:
        prompts = read_prompts(Path(keys.input))
    loaded = checkpoint.load(keys.checkpoint, weights=keys.weights, map_location=device, tasks=TASKS)
    tokenizer = TextInfo.from_dict(loaded.data).make_tokenizer()
    model: Any = loaded.backbone.to(getattr(torch, keys.dtype)).eval()
    writer = Writer(model, tokenizer, keys)
    if len(prompts) == 1:
        _show(prompts[0])
        results = writer.write(prompts, show=_show)
        print()
    else:
        results = writer.write(prompts)
        for prompt, written in zip(prompts, results, strict=True):
            print(f"{prompt}{written.text}\n")
    rows = [
        {"prompt": prompt, "text": written.text, "tokens": len(written.tokens), "reason": written.reason}
        for prompt, written in zip(prompts, results, strict=True)
    ]
    if keys.output is not None:
        Path(keys.output).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(keys.output), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


def _show(text: str) -> None:
    print(text, end="", flush=True)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: the texts, or the values of `prompt`, of .jsonl, .ndjson or .json; else each line."""
    # Not splitlines(), which also splits at characters that JSON texts may contain, such as U+2028.
    text = path.read_text(encoding="utf-8-sig")
    lines = [line for line in text.split("\n") if line.strip()]
    if path.suffix.lower() not in (".json", ".jsonl", ".ndjson"):
        return lines
    rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    return [row if isinstance(row, str) else row["prompt"] for row in rows]
