"""Hydra configuration groups: data, not code. Reached as `pkg://longseq.conf`, which gives Hydra their defaults."""

from hydra.core.config_store import ConfigStore

from longseq import mixers
from longseq.tasks import registry
from longseq.tasks.commands import COMMANDS, Compare, Describe, Evaluate
from longseq.tasks.config import Recipe, Scale, Schedule, Train, defaults
from longseq.tasks.probe.generators import preset

# Keys that are groups of files.
GROUPS = ("task", "data", "recipe", "model", "mixer", "scale", "trainer", "callbacks", "logger")

# The options of the group `scale`: the size in the name of an image model, width, depth (None: the image model's own),
# and values of mixer options that are null, for mixers that have these options.
SCALES: dict[str, tuple[str, int, int | None, dict[str, int]]] = {
    "nano": ("tiny", 64, 4, {"head_dim": 16}),  # image models for laptops and tests
    "tiny": ("tiny", 192, None, {}),
    "small": ("small", 384, None, {}),
    "base": ("base", 768, None, {}),
    "probe": ("tiny", 64, 2, {}),
    "document": ("tiny", 64, 2, {}),  # minutes on two cores
    "documents": ("tiny", 64, 1, {}),  # the same with n-grams
    "1m": ("tiny", 128, 3, {"num_heads": 4}),  # bytes on a laptop
    "10m": ("base", 256, 4, {}),  # from here on with about 32,000 tokens in the vocabulary
    "30m": ("base", 384, 10, {}),
    "110m": ("base", 768, 12, {}),
    "340m": ("base", 1024, 24, {}),
    "1.3b": ("base", 2048, 24, {}),
    "2.7b": ("base", 2560, 32, {}),
}


def store_defaults() -> None:
    """Give Hydra the defaults with which the files in conf begin: `base_VERB`, `data/base_TASK`, `recipe/base_TASK`
    and `recipe/base_schedule`.

    Also stores the options of the group `scale`, and each registered mixer as an option of the group `mixer`.
    """
    store = ConfigStore.instance().store
    tasks = {name: registry.keys(name) for name in registry.own_names()}
    for verb, keys in COMMANDS.items():
        node = defaults(keys)
        if keys in (Train, Evaluate):
            node = {name: value for name, value in node.items() if name not in GROUPS}
        if keys in (Describe, Compare):  # their files extend train.yaml
            node = {name: node[name] for name in node if name not in Train.model_fields or name == "output"}
        if keys is Evaluate:
            node["data"] = {key: None for task in tasks.values() for key in task.data.model_fields}
        store(name=f"base_{verb}", node=node)
    for name, task in tasks.items():
        store(group="data", name=f"base_{name}", node=defaults(task.data))
        own = {key: defaults(cls) for key in ("loss", "augment") if (cls := getattr(task, key)) is not None}
        store(group="recipe", name=f"base_{name}", node={**defaults(Recipe), **own, "optimizer": {}, "schedule": {}})
    timm = {"_target_": "create_scheduler_v2", "_partial_": True, **defaults(Schedule), "warmup_prefix": False}
    store(group="recipe", name="base_schedule", node={"schedule": timm})
    for name, (model, embed_dim, depth, mixer) in SCALES.items():
        scale = Scale(name=name, model=model, embed_dim=embed_dim, depth=depth, mixer=mixer)
        store(group="scale", name=name, node=scale.to_dict())
    for name in mixers.mixer_names():
        store_mixer(name)
    store(group="data", name="state_tracking", node=preset("state_tracking"))


def store_mixer(name: str) -> None:
    """Make a registered mixer an option of the group `mixer`, with the defaults of its constructor."""
    # The model and its direction decide the others.
    options = {key: value for key, value in mixers.options(name).items() if key not in ("backend", "causal")}
    ConfigStore.instance().store(group="mixer", name=name, node={"name": name, "options": options})


store_defaults()
