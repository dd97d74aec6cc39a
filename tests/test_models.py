"""Models as files: what is written is built again, whatever the defaults have become, with timm and without training
packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import longseq
from longseq import mixers, models
from longseq.backbones.autoencoder import SequenceAutoencoder
from longseq.backbones.image import ImageBackbone
from longseq.backbones.tokens import TokenBackbone
from longseq.mixers.deltanet import DeltaNet

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(12).reshape(2, 6)
TINY: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_classes": 3}


def tiny(name: str = "longseq_tiny_patch16_224", **options: Any) -> Any:
    return timm.create_model(name, **{**TINY, "mixer": "deltanet", **options}).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        scored = model(IMAGES if isinstance(model, timm.models.VisionTransformer | ImageBackbone) else TOKENS)
    return scored[0] if isinstance(scored, tuple) else scored


def edit(folder: Path, change: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return folder


MODELS = {
    "image": tiny,
    "vit": lambda: tiny("longseq_vit_tiny_patch16_224", mixer="deltanet+attention@1", direction="cross"),
    "built without timm": lambda: ImageBackbone(**TINY, norm="layer", norm_eps=1e-3).eval(),
    "token": lambda: TokenBackbone(vocab_size=12, d_model=16, positions="learned", max_length=8).eval(),
    "autoencoder": lambda: SequenceAutoencoder(TokenBackbone(vocab_size=12, d_model=16, mixer="attention")).eval(),
    "timm": lambda: timm.create_model(
        "deit_tiny_patch16_224", img_size=16, patch_size=8, depth=1, num_classes=3, drop_path_rate=0.1
    ).eval(),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_comes_back(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    assert longseq.save_pretrained(model, tmp_path / "deep" / "folder") == tmp_path / "deep" / "folder"
    assert {path.name for path in (tmp_path / "deep" / "folder").iterdir()} == {
        "config.json", "model.safetensors", "README.md",
    }  # fmt: skip
    random = torch.get_rng_state()
    loaded = longseq.from_pretrained(tmp_path / "deep" / "folder")
    assert torch.equal(torch.get_rng_state(), random)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert torch.equal(logits(loaded), logits(model))
    assert models.describe(loaded) == models.describe(model)


def token_model(**options: Any) -> TokenBackbone:
    return TokenBackbone(vocab_size=257, d_model=16, depth=1, **options).eval()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_model_that_reads_text_brings_its_tokenizer(tmp_path: Path) -> None:
    model = token_model()
    model.text = {"tokenizer": {"kind": "bytes"}, "window": 64}
    model.save_pretrained(tmp_path / "one")
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} < names_in(tmp_path / "one")
    loaded = longseq.from_pretrained(tmp_path / "one")
    assert loaded.text == model.text
    loaded.save_pretrained(tmp_path / "two")
    for name in names_in(tmp_path / "one") - {"model.safetensors"}:
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_large_models_have_several_files(tmp_path: Path) -> None:
    model = token_model()
    model.save_pretrained(tmp_path, max_shard_size=8000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert "model.safetensors" not in names_in(tmp_path)
    # Another file may hold a weight of the same name: the index names the one that counts.
    name = next(name for name, place in index["weight_map"].items() if place == shards[0])
    last = tmp_path / shards[-1]
    save_file({**load_file(last), name: torch.zeros(1)}, last)
    assert torch.equal(logits(longseq.from_pretrained(tmp_path)), logits(model))

    other = token_model(mixer="gla")
    other.save_pretrained(tmp_path, max_shard_size="1GB")  # leaves nothing of the first
    assert names_in(tmp_path) == {"config.json", "model.safetensors", "README.md"}
    assert torch.equal(logits(longseq.from_pretrained(tmp_path)), logits(other))
    model.save_pretrained(tmp_path, max_shard_size=8000)
    assert "model.safetensors" not in names_in(tmp_path)
    assert torch.equal(logits(longseq.from_pretrained(tmp_path)), logits(model))


def change_defaults(monkeypatch: pytest.MonkeyPatch, constructor: Any, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setitem(constructor.__init__.__wrapped__.__kwdefaults__, name, value)


def test_a_changed_default_changes_no_saved_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = {
        "image": lambda: ImageBackbone(**TINY, mixer="deltanet"),
        "token": lambda: TokenBackbone(vocab_size=12, d_model=16),
    }
    before = {}
    for name, build in make.items():
        torch.manual_seed(1)
        model = build().eval()
        model.save_pretrained(tmp_path / name)
        before[name] = logits(model)

    change_defaults(monkeypatch, ImageBackbone, merge="mean", norm_eps=0.1, class_token="first", direction="cross")
    change_defaults(monkeypatch, TokenBackbone, norm="layer", norm_eps=0.1, mlp_ratio=1.0, tie_embeddings=False)
    change_defaults(monkeypatch, DeltaNet, num_heads=4, norm_eps=0.1, feature_map="relu", convolution_width=2)
    for name, build in make.items():
        assert torch.equal(logits(longseq.from_pretrained(tmp_path / name)), before[name])
        torch.manual_seed(1)
        assert not torch.allclose(logits(build().eval()), before[name], atol=1e-2), "the defaults did not change"
    image = timm.create_model(f"local-dir:{tmp_path / 'image'}", pretrained=True).eval()
    assert torch.equal(logits(image), before["image"])


def test_config_holds_every_argument(tmp_path: Path) -> None:
    """None is left where the constructor computes a value, so that computing it otherwise changes nothing."""
    follows = {key: {"head_dim"} for key in ("gated_deltanet", "comba", "delta_product")}  # from num_heads
    follows |= {key: {"head_dim", "rotary_scaling"} for key in ("retnet", "supra")}
    free = {"vla": {"refresh_period"}, "kda": {"gate_bound"}, "gdn2": {"gate_bound"}, **follows}
    free |= {name: {"rotary_scaling"} for name in ("attention", "window_attention")}
    for name in mixers.mixer_names():
        model = TokenBackbone(vocab_size=12, d_model=16, depth=1, mixer=name)
        options = models.describe(model)["model_args"]["mixer_options"]
        added = mixers.registry.missing_options(mixers.get(name))  # by default these change nothing
        assert set(options) == set(mixers.options(name)) - {"backend", *TokenBackbone.decided_options, *added}
        assert {key for key, value in options.items() if value is None} <= free.get(name, set())
    arguments = models.describe(ImageBackbone(**TINY))["model_args"]
    # None is no LayerScale, patches without overlap, and heads of at most 64 channels.
    assert {name for name, value in arguments.items() if value is None} == {"init_values", "stride", "pool_num_heads"}
    assert models.describe(TokenBackbone(vocab_size=12, d_model=16))["model_args"]["mlp_ratio"] == 4.0


def test_a_plugins_mixer_and_kind_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers.registry, "_REGISTRY", dict(mixers.registry._REGISTRY))
    monkeypatch.setattr(models, "_KINDS", dict(models._KINDS))

    @mixers.register("mine")
    class Mine(DeltaNet):
        def __init__(self, d_model: int, *, sharpness: float = 2.0, norm_eps: float = 0.5) -> None:
            super().__init__(d_model, num_heads=2, norm_eps=norm_eps)
            self.sharpness = sharpness

    @longseq.register_kind("sums")
    class Sums(models.PretrainedModel, nn.Module):
        def __init__(self, width: int, scale: float = 0.5) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((width,), scale))

    model = TokenBackbone(vocab_size=12, d_model=16, mixer="mine", mixer_options={"norm_eps": 1e-3}).eval()
    model.save_pretrained(tmp_path / "mine")
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert config["model_args"]["mixer_options"] == {"sharpness": 2.0, "norm_eps": 1e-3}
    assert config["plugins"] == [__name__]
    assert torch.equal(logits(longseq.from_pretrained(tmp_path / "mine")), logits(model))
    Sums(4).save_pretrained(tmp_path / "sums")
    assert longseq.from_pretrained(tmp_path / "sums").arguments == {"width": 4, "scale": 0.5}

    monkeypatch.undo()
    with pytest.raises(ValueError, match="unknown mixer 'mine'"):
        longseq.from_pretrained(tmp_path / "mine")
    with pytest.raises(ValueError, match="of the kind sums"):
        longseq.from_pretrained(tmp_path / "sums")
    with pytest.raises(ValueError, match="Sums is no registered kind of model"):
        longseq.save_pretrained(Sums(4), tmp_path / "again")


def test_changes_that_a_model_follows_are_saved(tmp_path: Path) -> None:
    model = tiny()
    model.set_input_size(24)
    model.reset_classifier(5, "avg")
    model.save_pretrained(tmp_path)
    loaded = longseq.from_pretrained(tmp_path)
    x = torch.randn(1, 3, 24, 24)
    assert torch.equal(loaded(x), model.eval()(x))
    assert timm.data.resolve_model_data_config(loaded)["input_size"] == (3, 24, 24)


def test_arguments_can_be_changed_where_weights_stay(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    loaded = longseq.from_pretrained(tmp_path, dynamic_img_size=True, backend="torch")
    assert loaded(torch.zeros(1, 3, 24, 40)).shape == (1, 3)
    assert {part.backend for part in loaded.modules() if isinstance(part, mixers.Mixer)} == {"torch"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        longseq.from_pretrained(tmp_path, colour=1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kind": "video"}, ValueError, "of the kind video"),
        ({"model_args": {**TINY, "mixer": "deltanet", "embed_dim": 24}}, RuntimeError, "size mismatch"),
        ({"model_args": {**TINY, "mixer": "deltanet", "mlp_ratio": 1.0}}, RuntimeError, "Missing key"),
        ({"model_args": {**TINY, "mixer": "deltanet", "colour": 1}}, TypeError, "colour"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    tiny().save_pretrained(tmp_path)
    with pytest.raises(error, match=message):
        longseq.from_pretrained(edit(tmp_path, lambda config: config.update(change)))


def test_a_run_continues_with_the_same_model_only() -> None:
    config = models.describe(ImageBackbone(**TINY))
    models.check_continues(ImageBackbone(**TINY), config)
    with pytest.raises(ValueError, match="built with merge=sum, this one with merge=mean"):
        models.check_continues(ImageBackbone(**TINY, merge="mean"), config)


def test_timm_saves_and_loads(tmp_path: Path) -> None:
    model = tiny("longseq_vit_tiny_patch16_224", drop_path_rate=0.1)
    timm.models.save_for_hf(model, tmp_path / "timm", safe_serialization=True)
    model.save_pretrained(tmp_path / "ours")
    for folder in ("timm", "ours"):
        by_timm = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True).eval()
        assert torch.equal(logits(by_timm), logits(model))
        assert torch.equal(logits(longseq.from_pretrained(tmp_path / folder)), logits(model))
    theirs, ours = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("timm", "ours"))
    rates = dict.fromkeys(("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate"), 0.0)
    rates |= {"drop_path_rate": 0.1, "img_size": 16}
    assert {"num_classes": 3, **ours["model_args"]} == theirs["model_args"] | rates
    assert {key: ours[key] for key in theirs if key != "model_args"} == {
        key: value for key, value in theirs.items() if key != "model_args"
    }
    fewer = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True, num_classes=2)
    assert fewer.head.weight.shape == (2, 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["image", "vit", "timm"])
def test_transformers_loads_image_models(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = MODELS[name]()
    longseq.save_pretrained(model, tmp_path)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(theirs(IMAGES).logits, logits(model))


class FakeHub:
    """What `huggingface_hub` does for a repository, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, **options: Any) -> FakeHub:
        return self

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        (self.folder / "user" / repo_id).mkdir(parents=True)
        return type("Repository", (), {"repo_id": f"user/{repo_id}"})

    def file_exists(self, repo_id: str, filename: str, **options: Any) -> bool:
        return (self.folder / repo_id / filename).exists()

    def upload_folder(self, repo_id: str, folder_path: str, **options: Any) -> Any:
        for file in Path(folder_path).iterdir():
            (self.folder / repo_id / file.name).write_bytes(file.read_bytes())
        return type("Commit", (), {"commit_url": f"https://hub/{repo_id}/commit/1"})

    def snapshot(self, repo_id: str, **options: Any) -> str:
        return str(self.folder / repo_id)

    def download(self, repo_id: str, filename: str, **options: Any) -> str:
        path = self.folder / repo_id / filename
        if not path.exists():
            raise FileNotFoundError(f"{filename} is not in {repo_id}")
        return str(path)


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot)
    monkeypatch.setattr("timm.models._hub.HfApi", hub)
    monkeypatch.setattr("timm.models._hub.hf_hub_download", hub.download)
    model = tiny()
    assert model.push_to_hub("ours", metrics={"test/accuracy": 0.5}) == "https://hub/user/ours/commit/1"
    assert "| test/accuracy | 0.5 |" in (tmp_path / "user" / "ours" / "README.md").read_text()
    timm.models.push_to_hf_hub(model, "theirs")
    for name in ("user/ours", "user/theirs"):
        assert torch.equal(logits(longseq.from_pretrained(name)), logits(model))
        assert torch.equal(logits(timm.create_model(f"hf-hub:{name}", pretrained=True).eval()), logits(model))
        assert timm.models.load_model_config_from_hf(name)[1] == "longseq_tiny_patch16_224"
    spread = token_model()
    spread.text = {"tokenizer": {"kind": "bytes"}, "window": None}
    spread.save_pretrained(tmp_path / "user" / "spread", max_shard_size=8000)
    found = longseq.from_pretrained("user/spread")
    assert torch.equal(logits(found), logits(spread))
    assert found.text == spread.text
    next((tmp_path / "user" / "spread").glob("model-00002*")).unlink()
    for name in ("user/spread", "user/none"):
        with pytest.raises(FileNotFoundError):
            longseq.from_pretrained(name)


def test_weights_have_stable_names_and_may_share_memory(tmp_path: Path) -> None:
    model = TokenBackbone(vocab_size=12, d_model=16, depth=1, tie_embeddings=False)
    assert model.head is not None
    model.head.weight = model.embedding.weight
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert torch.equal(saved["head.weight"], saved["embedding.weight"])
    save_file({**saved, "extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="Unexpected key"):
        longseq.from_pretrained(tmp_path)


@pytest.mark.slow
def test_import_and_loading_need_no_training_packages_and_import_adds_no_triton_and_no_cuda(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "image")
    reader = token_model()
    reader.text = {"tokenizer": {"kind": "bytes"}, "window": 64}
    reader.save_pretrained(tmp_path / "text")
    absent = ("lightning", "hydra", "omegaconf", "torchmetrics", "tensorboard", "sklearn", "rich", "longseq.tasks")
    absent += ("transformers", "tokenizers", "datasets", "accelerate")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "import torch, timm\n"
        "before = {name for name in sys.modules if name.split('.')[0] == 'triton'}\n"
        "import longseq, longseq.kernels, longseq.mixers\n"
        "after = {name for name in sys.modules if name.split('.')[0] == 'triton'}\n"
        "print(sorted(after - before), torch.cuda.is_initialized(), len(timm.list_models('longseq_*')) > 0)\n"
        f"model = longseq.from_pretrained({str(tmp_path / 'image')!r})\n"
        f"model.save_pretrained({str(tmp_path / 'again')!r})\n"
        f"longseq.from_pretrained({str(tmp_path / 'text')!r}).save_pretrained({str(tmp_path / 'text_again')!r})\n"
        "print(list(model(torch.zeros(1, 3, 16, 16)).shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[] False True", "[1, 3]"], done.stderr


def test_weights_are_loaded_in_float32_in_the_type_of_the_file_or_in_a_given_one(tmp_path):
    torch.manual_seed(0)
    options = {"vocab_size": 40, "d_model": 16, "depth": 2, "mixer": "hyena+deltanet", "max_length": 8}
    half, exact = TokenBackbone(**options).bfloat16(), TokenBackbone(**options).double()
    half.save_pretrained(tmp_path / "half")
    exact.save_pretrained(tmp_path / "exact")

    def differing(one, other):
        found = other.state_dict()
        return [
            name for name, x in one.state_dict().items() if x.dtype != found[name].dtype or (x != found[name]).any()
        ]

    load = longseq.from_pretrained
    assert not differing(load(tmp_path / "half"), half.float())
    half.bfloat16()
    assert not differing(load(tmp_path / "half", dtype="auto"), half)
    # Rounding has not been in between.
    for dtype in ("auto", "float64", torch.float64):
        assert not differing(load(tmp_path / "exact", dtype=dtype), exact)
    rounded = load(tmp_path / "exact", dtype="bfloat16")
    # The filters of Hyena stay in float32.
    assert not differing(rounded, exact.float().bfloat16())
    assert {value.dtype for value in rounded.parameters()} == {torch.bfloat16, torch.float32}
