"""Tokenizers give back the text, keep the separator out of it, and refuse what is no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from longseq.tasks.data.units import count_units
from longseq.tasks.text.batch import Carry, TokenInputs
from longseq.tasks.text.round_trip import describe_loss
from longseq.tasks.text.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    read_tokenizer,
    tokenizer_from_dict,
    train_tokenizer,
)
from longseq.tokenizer_files import as_read, read_folder, same_tokenizer, tokenizer_files

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
    with pytest.raises(ValueError, match="surrogate"):
        trained.encode("\ud800")


def test_a_token_that_a_file_puts_behind_texts_is_not_in_the_folder_of_a_model(tmp_path: Path) -> None:
    library = Library.from_str(train_tokenizer(TEXTS * 20, 300).to_dict()["json"])
    name, number = "<|endoftext|>", library.token_to_id("<|endoftext|>")
    library.post_processor = TemplateProcessing(single=f"{name} $A {name}", special_tokens=[(name, number)])
    library.save(str(tmp_path / "tokenizer.json"))
    written = tokenizer_files(read_tokenizer(str(tmp_path / "tokenizer.json")).to_dict())["tokenizer.json"]
    plain = library.encode(TEXTS[0], add_special_tokens=False).ids
    assert Library.from_str(written).encode(TEXTS[0]).ids == [number, *plain]


@pytest.mark.slow
def test_dropout_of_a_tokenizer_file_leaves_a_text_its_tokens(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS * 20, 300)
    content = json.loads(trained.to_dict()["json"])
    content["model"]["dropout"] = 0.9
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    found = read_tokenizer(str(path))
    before = FileTokenizer(path.read_text(encoding="utf-8"))  # as a checkpoint may hold it
    for text in TEXTS * 5:
        assert found.encode(text).tolist() == before.encode(text).tolist() == trained.encode(text).tolist()
    written = tokenizer_files(found.to_dict())["tokenizer.json"]
    assert json.loads(written)["model"]["dropout"] is None, "other programs that read it get these tokens, too"
    assert same_tokenizer(found.to_dict(), before.to_dict())
    written = tokenizer_files(before.to_dict())["tokenizer.json"]
    assert json.loads(written)["model"]["dropout"] is None, "so does the folder that an older checkpoint is saved to"


@pytest.mark.slow
def test_truncation_and_padding_of_a_tokenizer_file_are_left_out(tmp_path: Path) -> None:
    """Training reads whole texts; a program that reads the file of the saved or exported model must, too."""
    trained = train_tokenizer(TEXTS * 20, 300)
    library = Library.from_str(trained.to_dict()["json"])
    library.enable_truncation(2)
    library.enable_padding(length=40, pad_id=0, pad_token="<|endoftext|>")
    library.save(str(tmp_path / "tokenizer.json"))
    found = read_tokenizer(str(tmp_path / "tokenizer.json")).to_dict()
    before = FileTokenizer(
        (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    ).to_dict()  # of an older checkpoint
    assert same_tokenizer(found, before)
    for text in (
        found["json"],
        as_read(before)["json"],
        *(tokenizer_files(one)["tokenizer.json"] for one in (found, before)),
    ):
        ids = Library.from_str(text).encode(TEXTS[0], add_special_tokens=False).ids
        assert ids == trained.encode(TEXTS[0]).tolist()


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


def test_what_a_tokenizer_loses_is_told_with_an_example() -> None:
    library = pytest.importorskip("tokenizers")
    texts = ["small letters", "Large Letters", "and A long text " * 2000]
    trained = train_tokenizer(texts, 300)
    assert describe_loss(texts, trained) is describe_loss(texts, ByteTokenizer()) is None
    small = library.Tokenizer.from_str(trained.to_dict()["json"])
    small.normalizer = library.normalizers.Lowercase()
    assert describe_loss(texts, FileTokenizer(small.to_str())) == (
        "2 of 3 compared documents do not come back from their tokens: the tokenizer turns 'Large Letters' into 'large "
        "letters'"
    )
    words = library.Tokenizer(library.models.WordLevel({"a": 0, "<unk>": 1, "</s>": 2}, unk_token="<unk>"))
    told = describe_loss((text for text in ("a", "a żółw")), FileTokenizer(words.to_str(), "</s>"))
    assert told is not None
    assert told.startswith("1 of 2 compared documents do not come back")
    assert told.endswith("turns 'a żółw' into '<unk>'")


def test_the_names_of_special_tokens_in_a_text_are_told() -> None:
    library = Library.from_str(train_tokenizer(TEXTS * 20, 300).to_dict()["json"])
    library.add_special_tokens(["<|user|>", "<|model|>"])
    texts = ["a cat", "<|user|>a cat<|model|>a dog"]
    tokenizer = FileTokenizer(library.to_str())
    assert describe_loss(texts, tokenizer) == (
        "1 of 2 compared documents hold names of special tokens, such as <|model|>, which are read as ordinary text: "
        'where a name is to be its token, set "special": false beside it in tokenizer.json'
    )
    assert library.token_to_id("<|user|>") not in tokenizer.encode(texts[1])
    content = json.loads(library.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] == "<|endoftext|>"
    tokenizer = FileTokenizer(json.dumps(content))
    assert describe_loss(texts, tokenizer) is None
    assert tokenizer.encode(texts[1]).tolist() == library.encode(texts[1]).ids


def test_a_vocabulary_without_a_word_of_the_text_is_told(tmp_path: Path) -> None:
    words = Library(WordLevel({"a": 0, "</s>": 1}, unk_token="<unk>"))
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(str(tmp_path))
    assert tokenizer.encode("a").tolist() == [0]
    with pytest.raises(ValueError, match=r"the tokenizer cannot encode a text: .*Missing"):
        tokenizer.encode("b")


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


@pytest.mark.parametrize(
    ("choice", "separator", "message"),
    [
        ("nowhere", None, "tokenizer=nowhere is no file: give bytes, train:SIZE"),
        ("empty", None, "holds no tokenizer.json"),
        ("latin.json", None, "utf-8"),
        ("good.json", "<stop>", "has no '<stop>': give separator=TOKEN"),
    ],
)
def test_what_is_no_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, separator: str | None, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("wrong.json").write_text("{}")
    Path("latin.json").write_bytes(b"\xff")
    Path("good.json").write_text(train_tokenizer(TEXTS, 300).to_dict()["json"], encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_tokenizer(choice, separator)


def test_a_batch_moves_and_tells_its_units() -> None:
    carry = Carry(first=None, last=None, fresh=torch.ones(1, dtype=torch.bool))
    inputs = TokenInputs(torch.zeros(1, 4, dtype=torch.long), None, 4, 3, 2, carry)
    moved, targets = move_data_to_device((inputs, torch.zeros(1, 4)), torch.device("meta"))
    assert all(part.is_meta for part in (moved.tokens, moved.carry.fresh, targets))
    assert (moved.max_seqlen, moved.byte_count, moved.cu_seqlens, moved.carry.first) == (4, 2, None, None)
    assert count_units((moved, targets)) == 3
