"""The tokenizer in the folder of a saved model: tokenizer.json and the settings next to it, in Hugging Face's format.

A tokenizer is a dictionary of plain values. `{"kind": "bytes"}` is the 256 bytes of UTF-8 and the separator, number
256. `{"kind": "file", "json": TEXT, "separator": NAME}` is a file of the library `tokenizers`: `separator` names the
token that begins and ends each document (None if unknown). Its key `start` names the token in front of a text that the
model continues, if that is another one, as in Llama. `bare_prompts` is True if the model reads a prompt without a token
in front, as Qwen and GPT-2 do. Both kinds have the key `ends` if other tokens than the separator also end a text that
the model writes: their numbers. Reading and writing need no other library.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
GENERATION_FILE = "generation_config.json"
# The config.json of a converted model's source (see `longseq.tools.hugging_face.conversion`).
SOURCE_CONFIG = "source_config.json"

# The tokens that end a text in the vocabularies of published models, in the order of preference.
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "[EOS]", "[SEP]")

# The side on which transformers cuts a document.
_SIDES = {"head": "right", "tail": "left"}

BYTES: Mapping[str, Any] = {"kind": "bytes"}
_BYTE_SEPARATOR = (SEPARATORS[0], 256)


def read_tokenizer(path: Path, separator: str | None = None) -> dict[str, Any]:
    """Read a tokenizer.json (see `as_read`); `separator` defaults to the eos_token of the settings next to it."""
    text = path.read_text(encoding="utf-8")
    content = json.loads(text)
    if separator in (None, _BYTE_SEPARATOR[0]) and _is_of_bytes(content):
        return dict(BYTES)
    numbers = _numbers(content)
    usual = next((name for name in SEPARATORS if name in numbers), None)
    end = _settings(path.with_name(SETTINGS_FILE)).get("eos_token")  # a text, or a dictionary with it
    end = end.get("content") if isinstance(end, dict) else end
    return as_read({"kind": "file", "separator": separator or end or usual, "json": text})


def as_read(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer without truncation and padding, and without dropout of merges, which varies the tokens."""
    content = json.loads(tokenizer["json"]) if tokenizer["kind"] == "file" else {}
    off: dict[str, Any] = {key: None for key in ("truncation", "padding") if content.get(key) is not None}
    if (content.get("model") or {}).get("dropout"):
        off["model"] = {**content["model"], "dropout": None}
    return {**tokenizer, "json": json.dumps({**content, **off}, ensure_ascii=False)} if off else dict(tokenizer)


def read_folder(folder: Path) -> dict[str, Any] | None:
    """The tokenizer in the folder of a model; None if it has no tokenizer.json."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return None
    tokenizer = read_tokenizer(path)
    if ends := _other_ends(folder, tokenizer):
        tokenizer["ends"] = ends
    if tokenizer["kind"] == "bytes":
        return tokenizer
    start = _first_token(json.loads(tokenizer["json"]))
    is_converted = (folder / SOURCE_CONFIG).is_file()
    if start is None and (is_converted or _settings(folder / SETTINGS_FILE).get("add_bos_token") is False):
        return {**tokenizer, "bare_prompts": True}
    return tokenizer if start in (None, tokenizer["separator"]) else {**tokenizer, "start": start}


def tokenizer_files(tokenizer: Mapping[str, Any], documents: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The files of a tokenizer, as a dictionary from names to contents.

    With them transformers does what `longseq generate` does: a text begins with the separator, with `start`, or with
    nothing if `bare_prompts` is True, and ends with the separator or one of `ends`; batches are padded on the left.

    For a classifier, `documents` gives `truncation` and `max_length`; its documents begin with the separator.
    transformers has only the truncations `head` and `tail`.
    """
    content = _byte_tokenizer() if tokenizer["kind"] == "bytes" else json.loads(as_read(tokenizer)["json"])
    files = {}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    if (found := find_separator(tokenizer)) is not None:
        name, number = found
        start = (tokenizer.get("start") if documents is None else None) or name
        first = number if start == name else _numbers(content)[start]
        settings |= {"bos_token": start, "eos_token": name, "pad_token": name}
        if documents is None and tokenizer.get("bare_prompts"):
            settings["add_bos_token"] = False
            content = {**content, "post_processor": None} if _ends_texts(content) else content
        elif _first_token(content) != start or _ends_texts(content):
            content = {**content, "post_processor": _beginning_with(start, first)}
        ends = [number, *tokenizer["ends"]] if "ends" in tokenizer else number
        generation = {"bos_token_id": first, "eos_token_id": ends, "pad_token_id": number}
        if documents is None:
            files[GENERATION_FILE] = json.dumps(generation, indent=2) + "\n"
    if documents is not None:
        settings |= {"padding_side": "right", "model_input_names": ["input_ids", "attention_mask"]}
        if documents["truncation"] in _SIDES:
            settings |= {
                "model_max_length": documents["max_length"],
                "truncation_side": _SIDES[documents["truncation"]],
            }
    files[SETTINGS_FILE] = json.dumps(settings, indent=2) + "\n"
    files[TOKENIZER_FILE] = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return files


def find_separator(tokenizer: Mapping[str, Any]) -> tuple[str, int] | None:
    """The name and the number of the separator; None if the tokenizer has none."""
    if tokenizer["kind"] == "bytes":
        return _BYTE_SEPARATOR
    numbers = _numbers(json.loads(tokenizer["json"]))
    name = tokenizer["separator"]
    return (name, numbers[name]) if name in numbers else None


def find_start(tokenizer: Mapping[str, Any]) -> int | None:
    """The number of the token with which a document begins: `start`, or else the separator, or None."""
    start = tokenizer.get("start")
    if start is not None:
        return _numbers(json.loads(tokenizer["json"])).get(start)
    found = find_separator(tokenizer)
    return None if found is None else found[1]


def count_tokens(tokenizer: Mapping[str, Any]) -> int:
    """The size of the vocabulary: the highest number of a token plus one."""
    if tokenizer["kind"] == "bytes":
        return _BYTE_SEPARATOR[1] + 1
    return max(_numbers(json.loads(tokenizer["json"])).values(), default=-1) + 1


def same_tokenizer(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two tokenizers give the same tokens, even if another program rewrote the file."""
    if one == other or (one["kind"] == other["kind"] == "bytes"):
        return True
    if one["kind"] != other["kind"] or find_separator(one) != find_separator(other):
        return False
    return _coded(json.loads(one["json"])) == _coded(json.loads(other["json"]))


def _coded(content: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a tokenizer file that decide how text becomes tokens; the rest is added around a text."""
    coded = {key: value for key, value in content.items() if key not in ("padding", "truncation", "post_processor")}
    return {**coded, "model": {**(content.get("model") or {}), "dropout": None}}


def _numbers(content: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of all tokens of a tokenizer file."""
    vocabulary = (content.get("model") or {}).get("vocab", {})
    if isinstance(vocabulary, list):  # of the kind Unigram: tokens with their scores
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens") or ()}}


def _other_ends(folder: Path, tokenizer: Mapping[str, Any]) -> list[int]:
    """The tokens at which transformers ends a text, without the separator."""
    listed = _settings(folder / GENERATION_FILE).get("eos_token_id")
    _, separator = find_separator(tokenizer) or (None, None)
    return [end for end in (listed if isinstance(listed, list) else [listed]) if end not in (None, separator)]


def _settings(path: Path) -> Mapping[str, Any]:
    """The settings in a file next to a tokenizer file; empty if there are none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _is_of_bytes(content: Mapping[str, Any]) -> bool:
    """True for the file of the byte tokenizer, even if another program rewrote it."""
    model, splitter = content.get("model") or {}, content.get("pre_tokenizer") or {}
    return (
        model.get("type") == "BPE"
        and not model.get("merges")
        and not content.get("normalizer")
        and splitter.get("type") == "ByteLevel"
        and not splitter.get("add_prefix_space")
        and _numbers(content) == {**_byte_names(), _BYTE_SEPARATOR[0]: _BYTE_SEPARATOR[1]}
    )


def _first_token(content: Mapping[str, Any]) -> str | None:
    """The token that a tokenizer file puts in front of a text."""
    for part in _templates(content):
        if "SpecialToken" in part["single"][0]:
            return part["special_tokens"][part["single"][0]["SpecialToken"]["id"]]["tokens"][0]
    return None


def _ends_texts(content: Mapping[str, Any]) -> bool:
    """True if a tokenizer file puts a token behind a text."""
    return any("SpecialToken" in part["single"][-1] for part in _templates(content))


def _templates(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of a tokenizer file that put tokens around a text."""
    outer = content.get("post_processor") or {}
    parts = (outer, *(outer.get("processors") or ()))
    return [part for part in parts if part.get("type") == "TemplateProcessing" and part["single"]]


def _beginning_with(name: str, number: int) -> dict[str, Any]:
    """The part of a tokenizer file that puts a token in front of a text."""
    first, second = ({"Sequence": {"id": part, "type_id": place}} for place, part in enumerate("AB"))
    start = {"SpecialToken": {"id": name, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, second],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }


def _byte_tokenizer() -> dict[str, Any]:
    """The byte tokenizer as byte-pair encoding without merges."""
    name, number = _BYTE_SEPARATOR
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": name, **flags}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": _byte_names(), "merges": []},
    }


def _byte_names() -> dict[str, int]:
    """The characters for bytes in GPT-2's vocabulary: printing ones stay, the others are numbered from 256."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printing)
    names = {byte: chr(byte) for byte in printing} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return {names[byte]: byte for byte in range(256)}
