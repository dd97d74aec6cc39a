"""Language models in transformers: the same folder, the same numbers, generation, training and adapters."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from representatives import REPRESENTATIVES
from torch import Tensor, nn
from torch.nn import functional

import longseq
from longseq import mixers
from longseq.backbones.tokens import TokenBackbone

pytest.importorskip("transformers", reason='needs transformers: pip install "longseq[text]"')

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline

from longseq.tools.hugging_face.cache import CACHE_NAME, LongseqCache
from longseq.tools.hugging_face.causal_lm import LongseqConfig, LongseqForCausalLM

VOCABULARY = 40
PROMPTS = ([3, 4, 5, 6, 7, 8, 9], [10, 11], [12])
TOKENS = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4]])


def make(mixer: Any = "gated_deltanet", **options: Any) -> Any:
    """A small model in float64, whose scores differ clearly."""
    torch.manual_seed(0)
    arguments = {"vocab_size": VOCABULARY, "d_model": 16, "depth": 1, "mixer": mixer, **options}
    return LongseqForCausalLM(LongseqConfig(model_args=arguments)).double().eval()


def make_writer(mixer: Any = "gated_deltanet") -> Any:
    """A small model in float64, whose texts depend on all that it has read; `make` often repeats a token."""
    model = make(mixer, depth=2, tie_embeddings=False)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, value in model.model.named_parameters():
            if value.ndim == 2 and "embedding" not in name:
                value.mul_(3)
        model.model.head.weight.normal_()
    return model


def pad(prompts: Any, side: str = "left") -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        padding = [0] * (longest - len(prompt))
        real = [1] * len(prompt)
        rows.append(padding + prompt if side == "left" else prompt + padding)
        masks.append(padding + real if side == "left" else real + padding)
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


@pytest.mark.parametrize("mixer", REPRESENTATIVES)
@pytest.mark.slow
def test_generate_continues_padded_prompts_and_beams_as_each_alone(mixer: str) -> None:
    model = make_writer(mixer)
    options = {"max_new_tokens": 5, "do_sample": False}
    written = model.generate(**pad(PROMPTS), **options)[:, -5:]
    assert max(len(set(row.tolist())) for row in written) > 2
    for row, prompt in zip(written, PROMPTS, strict=True):
        assert torch.equal(row, model.model.generate(torch.tensor([prompt]), 5, temperature=0)[0, -5:])
    beams = model.generate(**pad(PROMPTS[:2]), num_beams=3, **options)
    assert torch.equal(beams, model.generate(**pad(PROMPTS[:2]), num_beams=3, use_cache=False, **options))


@pytest.mark.parametrize("mixer", ["deltanet", "attention"])
def test_a_second_turn_reads_only_what_the_cache_of_the_first_has_not(mixer: str) -> None:
    """`generate` is given the whole conversation, and the cache of its first part by the installed version's name."""
    model = make_writer(mixer)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(TOKENS, **options)
    conversation = torch.cat([first.sequences, TOKENS[:, :3]], 1)
    second = model.generate(conversation, **{CACHE_NAME: first[CACHE_NAME]}, **options)
    assert torch.equal(second.sequences, model.generate(conversation, **options).sequences)
    assert second[CACHE_NAME].get_seq_length() == second.sequences.shape[1] - 1


@pytest.mark.parametrize("mixer", ["deltanet", "attention"])
def test_a_prompt_is_read_in_chunks_without_a_given_cache(mixer: str) -> None:
    model, options = make_writer(mixer), {"max_new_tokens": 4, "do_sample": False}
    for more in ({}, {"num_beams": 2}):
        whole = model.generate(**pad(PROMPTS), **more, **options)
        assert torch.equal(model.generate(**pad(PROMPTS), prefill_chunk_size=3, **more, **options), whole)
        settings = GenerationConfig(prefill_chunk_size=3, **more, **options)
        assert torch.equal(model.generate(**pad(PROMPTS), generation_config=settings), whole)


def test_a_cache_of_another_text_or_other_rows_is_refused() -> None:
    """transformers would leave out too much of the text, or read some of it twice."""
    model, options = make_writer(), {"max_new_tokens": 4, "do_sample": False}
    for read, text in ((6, TOKENS), (6, TOKENS[:, :4]), (3, TOKENS.flip(0))):
        with pytest.raises(ValueError, match="the cache has read other tokens"):
            model.generate(text, **{CACHE_NAME: model(TOKENS[:, :read])[CACHE_NAME]}, **options)
    cache = model(TOKENS)[CACHE_NAME]
    with pytest.raises(ValueError, match="the state is one of 2 sequences, and 1 are read"):
        model(TOKENS[:1, :1], cache=cache)
    following = {"attention_mask": torch.ones_like(TOKENS), CACHE_NAME: model(TOKENS[:, :2])[CACHE_NAME]}
    text = model.generate(TOKENS, **options)
    assert torch.equal(model.generate(TOKENS[:, 2:], **following, **options), text[:, 2:])


@torch.no_grad()
def test_a_mask_of_other_tokens_than_the_cache_has_read_is_refused() -> None:
    """As at the next turn of a row that has ended: the state has read its padding."""
    model = make("deltanet+attention", depth=2)
    read = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1]])
    for cuts in ((0, 4), (0, 2, 4), (0, 3, 4)):
        cache = LongseqCache()
        for begin, end in itertools.pairwise(cuts):
            model(TOKENS[:, begin:end], attention_mask=read[:, :end], cache=cache)
        for wrong in ([1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]):
            marked = functional.pad(torch.tensor([[1, 1, 1, 1], wrong]), (0, 2), value=1)
            with pytest.raises(ValueError, match="attention_mask marks other tokens"):
                model(TOKENS[:, 4:], attention_mask=marked, cache=cache)
        # Padding in front of all rows hides no token, and the padding stays with its row.
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0]))
        wider = functional.pad(read, (1, 2), value=1)
        wider[:, 0] = 0
        logits = model(TOKENS[:, 4:].flip(0), attention_mask=wider.flip(0), cache=cache).logits
        torch.testing.assert_close(logits, model(TOKENS, attention_mask=wider[:, 1:]).logits[:, 4:].flip(0))


@pytest.mark.parametrize("mixer", ["deltanet", "attention"])
def test_the_side_of_padding_does_not_change_the_loss(mixer: str) -> None:
    """The padding in front of a text predicts nothing, not the first token of the text either."""
    model = make(mixer)
    longer = PROMPTS[:2]  # the last one has nothing to predict
    alone = [model(torch.tensor([one]), labels=torch.tensor([one]), use_cache=False).loss for one in longer]
    targets = torch.tensor([len(one) - 1 for one in longer], dtype=alone[0].dtype)
    expected = torch.stack(alone) @ targets
    for side in ("left", "right"):
        batch = pad(PROMPTS, side)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        given = labels.clone()
        mean = model(**batch, labels=labels, use_cache=False).loss
        torch.testing.assert_close(mean, expected / targets.sum())
        number = int((labels[:, 1:] != -100).sum())  # as the Trainer counts
        told = model(**batch, labels=labels, use_cache=False, num_items_in_batch=number).loss
        torch.testing.assert_close(told, mean)
        assert torch.equal(labels, given)


@pytest.mark.parametrize("mixer", [*REPRESENTATIVES, "deltanet+attention"])
@pytest.mark.slow
def test_adapters_of_every_projection_train_and_merge(mixer: str) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    options = {"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = make(mixer, depth=2 if "+" in mixer else 1)
    plain = model(TOKENS).logits.detach()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **options)).double().eval()
    output = adapted(input_ids=TOKENS, labels=TOKENS, use_cache=False)
    output.loss.backward()
    learning = {name: value.grad for name, value in adapted.named_parameters() if value.requires_grad}
    layers = sum(isinstance(part, nn.Linear) for part in make(mixer, depth=2 if "+" in mixer else 1).modules())
    assert len(learning) == 2 * layers
    assert not [name for name, grad in learning.items() if grad is None or not grad.any()]
    scores = output.logits.detach()
    assert not torch.allclose(scores, plain, rtol=0, atol=1e-3)
    with torch.no_grad():
        cache = adapted(input_ids=TOKENS[:, :5]).past_key_values
        step = adapted(input_ids=TOKENS[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(step[:, 0], scores[:, -1], rtol=0, atol=1e-9)
    merged = adapted.merge_and_unload()
    assert isinstance(merged, LongseqForCausalLM)
    torch.testing.assert_close(merged(TOKENS).logits, scores, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_saved_adapter_finds_its_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    make().float().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    options = {"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **options)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(again(TOKENS).logits, adapted(input_ids=TOKENS).logits)
    third = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(third(TOKENS).logits, again(TOKENS).logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mixer", mixers.mixer_names())
def test_a_saved_model_of_each_mixer_is_loaded_by_its_auto_class(mixer: str, tmp_path: Path) -> None:
    model = make(mixer).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    # The filters of long convolutions are float32 whatever the type of the rest.
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=0)


def test_an_adapter_of_the_embedding_also_changes_the_tied_head() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    adapted = peft.get_peft_model(
        make(), peft.LoraConfig(r=2, target_modules=["embedding"], init_lora_weights=False)
    ).double()
    adapted = adapted.eval()
    scores = adapted(input_ids=TOKENS).logits.detach()
    backbone = adapted.base_model.model.model
    summed = backbone.summed_loss(backbone.forward_features(TOKENS)[0], TOKENS).objective
    wanted = functional.cross_entropy(scores.flatten(0, 1), TOKENS.flatten(), reduction="sum")
    torch.testing.assert_close(summed.detach(), wanted)
    torch.testing.assert_close(adapted.merge_and_unload()(TOKENS).logits, scores)


@pytest.mark.parametrize("mixer", ["gated_deltanet", "attention", "lattice"])
@pytest.mark.parametrize("shards", [False, True])
def test_one_folder_serves_both_libraries(mixer: str, shards: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TokenBackbone(vocab_size=257, d_model=16, depth=2, mixer=mixer, tie_embeddings=shards).eval()
    model.text = {"tokenizer": {"kind": "bytes"}, "window": 64}
    options: dict[str, Any] = {"max_shard_size": 9000} if shards else {}
    model.save_pretrained(tmp_path / "ours", **options)
    random = torch.get_rng_state()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(torch.get_rng_state(), random)
    assert isinstance(theirs, LongseqForCausalLM)
    assert theirs.generation_config.eos_token_id == 256
    assert torch.equal(theirs(TOKENS).logits, model(TOKENS)[0])

    theirs.save_pretrained(tmp_path / "theirs", **options)
    AutoTokenizer.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    back = longseq.from_pretrained(tmp_path / "theirs")
    assert back.text == model.text
    for name, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], value)
    config = AutoConfig.from_pretrained(tmp_path / "theirs")
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (257, 16, 2)


def test_the_pipeline_writes_text_of_a_byte_tokenizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TokenBackbone(vocab_size=257, d_model=16, depth=1).eval()
    model.text = {"tokenizer": {"kind": "bytes"}, "window": None}
    model.save_pretrained(tmp_path)
    written = pipeline("text-generation", model=str(tmp_path), device="cpu")(
        "état", max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    tokens = model.generate(torch.tensor([[256, *"état".encode()]]), 6, temperature=0)[0].tolist()
    assert written[0]["generated_text"] == bytes(token for token in tokens if token < 256).decode(errors="replace")


def test_the_loss_is_that_of_transformers() -> None:
    model = make()
    labels = TOKENS.clone()
    labels[0, :3] = -100
    output = model(TOKENS, labels=labels)
    wanted = functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    targets = int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(output.loss.double(), wanted / targets, rtol=1e-5, atol=0)
    summed = model(TOKENS, labels=labels, num_items_in_batch=4).loss
    torch.testing.assert_close(summed.double(), wanted / 4, rtol=1e-5, atol=0)
    assert model(TOKENS, labels=labels, return_dict=False)[0] == output.loss


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.slow
def test_a_cache_goes_on_where_it_ended(side: str) -> None:
    """In parts of several tokens, in steps beyond the room of attention's first cache, and in a copy."""
    model = make("deltanet+attention", depth=2)
    batch = pad(PROMPTS[:2], side)
    with torch.no_grad():
        cache = model(**batch).past_key_values
        assert cache.get_seq_length() == 7
        further = torch.randint(0, VOCABULARY, (2, 300))
        other = copy.deepcopy(cache)
        steps = [model(further[:, :3], past_key_values=cache).logits]
        steps += [model(further[:, i : i + 1], past_key_values=cache).logits for i in range(3, 300)]
        for row, prompt in enumerate(PROMPTS[:2]):
            alone = model(torch.cat([torch.tensor(prompt), further[row]])[None]).logits[0, len(prompt) :]
            torch.testing.assert_close(torch.cat(steps, 1)[row], alone)
        torch.testing.assert_close(model(further[:, :1], past_key_values=other).logits, steps[0][:, :1])


@pytest.mark.parametrize("mixer", ["deltanet", "attention"])
def test_packed_sequences_are_told_apart_in_all_ways_of_transformers(mixer: str) -> None:
    """By their numbers alone, where the first one is the rest of a longer one, and with padding around them."""
    model = make(mixer)
    row = torch.cat([TOKENS[0, :4], TOKENS[1]])[None]
    positions = torch.tensor([[5, 6, 7, 8, 0, 1, 2, 3, 4, 5]])
    numbers = torch.tensor([[0] * 4 + [1] * 6])
    for packed in ({"seq_idx": numbers}, {"position_ids": positions}):
        around = {name: functional.pad(value, (1, 2)) for name, value in packed.items()}
        mask = functional.pad(torch.ones_like(row), (1, 2))
        padded = model(functional.pad(row, (1, 2)), attention_mask=mask, use_cache=False, **around).logits[0, 1:-2]
        for scores in (model(row, use_cache=False, **packed).logits[0], padded):
            torch.testing.assert_close(scores[:4], model(TOKENS[:1, :4]).logits[0])
            torch.testing.assert_close(scores[4:], model(TOKENS[1:]).logits[0])


@pytest.mark.parametrize("tied", [True, False])
def test_the_body_and_the_head_score_as_the_model_does(tied: bool, tmp_path: Path) -> None:
    """As trainers of TRL call them, which score the features of some tokens alone."""
    model = make(tie_embeddings=tied)
    model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (model.model.head is None) == tied
    batch = pad(PROMPTS)
    real = batch["attention_mask"] == 1
    if tied:
        peft = pytest.importorskip("peft", reason="needs peft")
        lora = peft.LoraConfig(target_modules=["embedding"], init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora).get_base_model()
    assert list(model.base_model.parameters()) == list(model.model.parameters())
    features = model.base_model(**batch, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    for scores in (head(features), functional.linear(features, head.weight, head.bias)):
        torch.testing.assert_close(scores[real], model(**batch).logits[real])


def test_the_vocabulary_can_grow(tmp_path: Path) -> None:
    for tied in (True, False):
        model = make(tie_embeddings=tied).float()
        before = model(TOKENS).logits
        model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
        assert model.config.vocab_size == VOCABULARY + 3
        after = model(TOKENS).logits
        torch.testing.assert_close(after[..., :VOCABULARY], before)
        model.save_pretrained(tmp_path / str(tied))
        again = longseq.from_pretrained(tmp_path / str(tied))
        torch.testing.assert_close(again(TOKENS)[0], after)
        assert longseq.models.describe(again)["model_args"]["vocab_size"] == VOCABULARY + 3


@pytest.mark.slow
def test_the_trainer_resumes_exactly_and_loads_the_best_weights(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (12, 6))]
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}

    def train(resume: str | None = None, **options: Any) -> Any:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, learning_rate=0.01, per_device_train_batch_size=2, report_to=[],
            use_cpu=True, disable_tqdm=True, save_steps=2, **options,
        )  # fmt: skip
        trainer = Trainer(model=make().float(), args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict()

    whole = train()
    half, end = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"
    for resumed in (train(str(half)), train(str(end))):
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    # The loss falls, so that the highest is that of the first checkpoint.
    chosen = train(**best, metric_for_best_model="eval_loss", greater_is_better=True)
    expected = longseq.from_pretrained(half).state_dict()
    assert all(torch.equal(chosen[f"model.{name}"], value) for name, value in expected.items())


def test_what_would_change_numbers_unnoticed_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make()
    for options in ({"cu_seqlens": torch.tensor([0, 3, 6])}, {"atention_mask": torch.ones(2, 6)}):
        with pytest.raises(TypeError, match="unexpected argument"):
            model(TOKENS, **options)
    for mask in (torch.ones(2, 1, 6, 6), torch.tensor([[1, 1, 1, 2, 2, 2]] * 2)):
        with pytest.raises(ValueError, match="attention_mask has"):
            model(TOKENS, attention_mask=mask)
    with pytest.raises(ValueError, match="direction=forward"):
        make(direction="bidirectional")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    missing = next(name for name in weights if "in_proj" in name)
    save_file({name: value for name, value in weights.items() if name != missing}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks weights: {missing}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
