"""Generated text: what a row depends on, how tokens become text, and where it ends."""

from __future__ import annotations

from random import Random

import pytest
import torch
from representatives import REPRESENTATIVES
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers

from longseq.backbones.tokens import TokenBackbone
from longseq.tasks import generate
from longseq.tasks.commands import Generate
from longseq.tasks.lm.writer import Writer
from longseq.tasks.text.tokenizer import ByteTokenizer, FileTokenizer, TextStream

PROMPTS = ["a", "some text", "", "état", "a longer prompt than the others"]
KEYS = {
    "checkpoint": "x.ckpt", "weights": "auto", "prompt": "x", "input": None, "output": None, "max_new_tokens": 12,
    "temperature": 1.0, "top_k": None, "top_p": None, "repetition_penalty": 1.0, "stop": [], "end": True, "seed": 0,
    "batch_size": 64, "device": "cpu", "dtype": "float32", "cuda_graph": None,
}  # fmt: skip


def make_writer(mixer="gated_deltanet", device="cpu", **keys):
    torch.manual_seed(0)
    model = TokenBackbone(vocab_size=257, d_model=16, depth=2, mixer=mixer).double().eval()
    if device != "cpu":
        model = model.float().to(device)  # the Triton kernels take no float64
    return Writer(model, ByteTokenizer(), Generate(**{**KEYS, **keys}))


@pytest.mark.parametrize("mixer", REPRESENTATIVES)
def test_prompts_of_different_lengths_are_continued_as_if_alone(mixer):
    writer = make_writer(mixer, temperature=0.0, max_new_tokens=6)
    together = writer.write(PROMPTS)
    for prompt, written in zip(PROMPTS, together, strict=True):
        assert writer.write([prompt])[0].tokens == written.tokens
        start = torch.tensor([[256, *prompt.encode()]])
        wanted = writer.model.generate(start, 6, temperature=0)[0, start.shape[1] :].tolist()
        assert written.tokens == (wanted[: wanted.index(256)] if 256 in wanted else wanted)


@pytest.mark.slow
def test_what_is_drawn_depends_on_the_seed_and_the_number_of_the_prompt_alone():
    hot = {"temperature": 10.0}
    whole = make_writer(batch_size=4, **hot).write(PROMPTS)
    assert [one.tokens for one in make_writer(batch_size=1, **hot).write(PROMPTS)] == [one.tokens for one in whole]
    assert [one.tokens for one in make_writer(seed=1, **hot).write(PROMPTS)] != [one.tokens for one in whole]
    same = make_writer(**hot).write(["same"] * 64)
    assert len({tuple(one.tokens) for one in same}) == 64
    assert make_writer(**hot).write(["same"])[0].tokens == same[0].tokens


@pytest.mark.slow
def test_nothing_is_read_in_front_of_a_bare_prompt():
    writer = make_writer(temperature=0.0, max_new_tokens=6, end=False)
    with torch.no_grad():  # the first token must count
        for weight in writer.model.blocks.parameters():
            weight.mul_(5 if weight.ndim > 1 else 1)
    behind = writer.write(["some"])[0].tokens
    writer.tokenizer.bare_prompts = True
    for prompt, read in (("some", [*b"some"]), ("", [256])):
        wanted = writer.model.generate(torch.tensor([read]), 6, temperature=0)[0, -6:]
        assert writer.write([prompt])[0].tokens == wanted.tolist() != behind
    together = writer.write(["some", "", "longer"])
    assert [one.tokens for one in together] == [writer.write([one])[0].tokens for one in ("some", "", "longer")]


@pytest.mark.parametrize("mixer", ["gated_deltanet", "attention", "deltanet+window_attention"])
def test_what_a_graph_records_writes_the_same_text(mixer, graphs_on_cpu):
    check_that_graphs_change_nothing(mixer, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["gated_deltanet", "attention", "deltanet+window_attention"])
def test_a_graph_writes_the_same_text(mixer):
    check_that_graphs_change_nothing(mixer, "cuda")


def test_a_model_with_learned_positions_reads_the_end_of_a_long_prompt():
    model = TokenBackbone(
        vocab_size=257, d_model=16, depth=1, mixer="linear_attention", positions="learned", max_length=8
    )
    keys = Generate(**{**KEYS, "max_new_tokens": 3, "temperature": 0.0, "end": False})
    (written,) = Writer(model, ByteTokenizer(), keys, cut_prompts=True).write(["a long prompt"])
    assert written.tokens == model.generate(torch.tensor([list(b"rompt")]), 3, temperature=0)[0, -3:].tolist()


def check_that_graphs_change_nothing(mixer, device):
    options = {"temperature": 5.0, "repetition_penalty": 1.2, "device": device, "end": False}
    plain, graph = (make_writer(mixer, cuda_graph=cuda_graph, **options) for cuda_graph in (False, True))
    whole = plain.write(PROMPTS)
    assert [one.tokens for one in graph.write(PROMPTS)] == [one.tokens for one in whole]
    assert len({token for one in whole for token in one.tokens}) > 20


def test_a_stop_string_is_found_across_tokens_and_what_may_begin_one_is_held_back():
    stream = TextStream(ByteTokenizer(), stops=["END", "ENOUGH"])
    shown = ["".join(stream.push(token) for token in part) for part in (b"text E", b"N", b"O", b"R ", b"EN", b"D")]
    assert shown == ["text ", "", "", "ENOR ", "", ""]
    assert stream.stopped
    unfinished = TextStream(ByteTokenizer(), stops=["END"])
    assert "".join(unfinished.push(token) for token in b"the EN") + unfinished.finish() == "the EN"


@pytest.mark.parametrize("text", ["été 漢字 a😀b e\u0301".encode(), b"Y\x8b\x9b\xde\xb6r", b"\xf0\xb6\xac\xff\x80\x9f"])
def test_text_that_comes_token_by_token_is_that_of_all_tokens(text):
    stream = TextStream(ByteTokenizer())
    assert "".join(stream.push(token) for token in text) + stream.finish() == text.decode(errors="replace")


def test_text_after_a_prompt_of_byte_tokens_has_whole_characters():
    """Llama 2 and Mistral spell characters outside their vocabulary as bytes: <0xE6> <0xBC> <0xA2> is 漢."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b"]
    numbers = {name: number for number, name in enumerate(names)}
    library = Library(models.BPE(numbers, [], unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    tokenizer = FileTokenizer({"kind": "file", "json": library.to_str(), "separator": "</s>", "start": "<s>"})
    random = Random(0)
    for _ in range(200):
        prompt, text = ("".join(random.choices("漢字é😀ab ", k=random.randint(1, 40))) for _ in range(2))
        read = tokenizer.encode_prompt(prompt)
        stream = TextStream(tokenizer, read)
        shown = [stream.push(token) for token in tokenizer.encode_prompt(prompt + text)[len(read) :]]
        assert "".join(shown) == text
    assert stream.push(numbers["<0xE6>"]) + stream.push(numbers["a"]) == "�a"


@pytest.mark.slow
def test_prompts_come_from_lines_and_from_json(tmp_path):
    for name, content, prompts in (
        ("a.txt", "one\n\ntwo words\n", ["one", "two words"]),
        ("b.jsonl", '{"prompt": "two\\nlines"}\n"bare"\n', ["two\nlines", "bare"]),
        ("c.json", '[{"prompt": "film"},\n "book"]', ["film", "book"]),
    ):
        (tmp_path / name).write_text(content)
        assert generate.read_prompts(tmp_path / name) == prompts
