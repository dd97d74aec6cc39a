"""Tokenizers give back the text, keep the separator out of it, and refuse what is no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing

from longseq.tasks.text.tokenizer import ByteTokenizer, read_tokenizer, tokenizer_from_dict, train_tokenizer
from longseq.tokenizer_files import read_folder, same_tokenizer, tokenizer_files

TEXTS = ["the cat sat on the mat", "żółw é 🐢\n\ttab", "a <|endoftext|> that somebody wrote", ""]


def test_bytes_come_back() -> None:
    tokenizer = ByteTokenizer()
    for text, tokens in zip(TEXTS, tokenizer.encode_all(TEXTS), strict=True):
        assert tokens.tolist() == list(text.encode())
        assert tokenizer.decode([tokenizer.separator, *tokens.tolist(), tokenizer.separator]) == text
    assert tokenizer.decode([0xC5]) == "�"
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("\ud800")


def test_trained_tokens_come_back_also_from_a_file(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS * 20, 300)
    assert trained.vocab_size <= 300
    path = tmp_path / "tokenizer.json"
    path.write_text(trained.to_dict()["json"], encoding="utf-8")
    for tokenizer in (trained, tokenizer_from_dict(trained.to_dict()), read_tokenizer(str(path))):
        for text, tokens in zip(TEXTS, tokenizer.encode_all(TEXTS), strict=True):
            assert tokenizer.decode(tokens.tolist()) == text
            assert tokenizer.separator not in tokens
    assert len(trained.encode(TEXTS[0])) < len(TEXTS[0])


@pytest.mark.parametrize("kind", ["bytes", "trained"])
def test_the_files_of_a_tokenizer_are_those_of_its_library(kind: str, tmp_path: Path) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else train_tokenizer(TEXTS * 20, 300)
    for name, text in tokenizer_files(tokenizer.to_dict()).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS[:2]:
        tokens = tokenizer.encode(text).tolist()
        assert library.encode(text, add_special_tokens=False).ids == tokens
        assert library.encode(text).ids == [tokenizer.separator, *tokens]
        assert library.decode(tokens) == text
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == tokenizer.separator

    library.save(str(tmp_path / "tokenizer.json"), pretty=False)  # another program writes it again
    again = read_tokenizer(str(tmp_path))
    assert type(again) is type(tokenizer)
    assert same_tokenizer(again.to_dict(), tokenizer.to_dict())
    other = train_tokenizer(TEXTS * 20, 290)
    assert not same_tokenizer(again.to_dict(), other.to_dict())


def test_a_published_model_begins_with_its_own_token(tmp_path: Path) -> None:
    """Llama begins a text with <s> and ends it with </s>; our models with that tokenizer have </s> at both places."""
    library = Library.from_str(train_tokenizer(TEXTS * 20, 300).to_dict()["json"])
    library.add_special_tokens(["<s>", "</s>"])
    first, last = library.token_to_id("<s>"), library.token_to_id("</s>")
    library.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", first)])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    of_model = read_folder(tmp_path)
    of_data = read_tokenizer(str(tmp_path)).to_dict()
    assert of_model is not None
    for values, start in ((of_model, first), (of_data, last)):
        tokenizer = tokenizer_from_dict(values)
        assert (tokenizer.start, tokenizer.separator) == (start, last)
        assert tokenizer.to_dict() == values
        folder = tmp_path / str(start)
        folder.mkdir()
        for name, text in tokenizer_files(values).items():
            (folder / name).write_text(text, encoding="utf-8")
        assert Library.from_file(str(folder / "tokenizer.json")).encode("cat").ids[0] == start
        assert json.loads((folder / "generation_config.json").read_text())["bos_token_id"] == start
        again = read_folder(folder)
        assert again is not None
        assert again.get("start") == values.get("start")
    assert same_tokenizer(of_model, of_data)


@pytest.mark.slow
def test_a_converted_model_reads_a_prompt_as_its_tokenizer_does(tmp_path: Path) -> None:
    """Qwen and GPT-2 put nothing in front of a text; a model that longseq has trained reads the separator first."""
    values = train_tokenizer(TEXTS * 20, 300).to_dict()
    (tmp_path / "tokenizer.json").write_text(values["json"], encoding="utf-8")
    assert read_folder(tmp_path) == values, "a file that somebody has put beside a model of longseq"
    (tmp_path / "source_config.json").write_text("{}")
    found = read_folder(tmp_path)
    assert found == {**values, "bare_prompts": True}
    tokenizer = tokenizer_from_dict(found)
    assert tokenizer.to_dict() == found
    assert tokenizer.encode_prompt("cat") == tokenizer.encode("cat").tolist()
    assert tokenizer.encode_prompt("") == [tokenizer.separator]
    again = tmp_path / "again"
    again.mkdir()
    for name, text in tokenizer_files(found).items():
        (again / name).write_text(text, encoding="utf-8")
    assert Library.from_file(str(again / "tokenizer.json")).encode("cat").ids == tokenizer.encode_prompt("cat")
    assert (read_folder(again) or {}).get("bare_prompts") is True, "a folder of save_pretrained keeps it"


def test_a_folder_names_its_separator(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(TEXTS, 300).to_dict()["json"], encoding="utf-8")
    settings = tmp_path / "tokenizer_config.json"
    for end in ("q", {"content": "q"}):
        settings.write_text(json.dumps({"eos_token": end}))
        tokenizer = read_tokenizer(str(tmp_path))
        assert tokenizer.decode([tokenizer.separator]) == ""
        assert tokenizer.to_dict()["separator"] == "q"
