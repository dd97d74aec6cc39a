"""The configuration keys of probes."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from longseq.tasks.config import Count, Keys, TaskKeys, key
from longseq.tasks.training.configuration import TokenModelKeys

Slices = Annotated[list[dict[str, Any]], Field(min_length=1)]


class ProbeDataKeys(Keys):
    """The keys of `data`; `ProbeDataModule` explains them."""

    name: str = key(..., "the name in tables")
    generator: str = key(..., "mqar, copying, a task of MAD, regbench, or a registered one")
    options: dict[str, Any] = key({}, "options of the generator")
    train: Slices = key(..., "a list of slices: `samples`, an optional `name`, and any option of the generator")
    validation: Slices = key(..., "as train")
    test: Slices = key(..., "as train")
    eval_batch_size: Count | None = key(None, "sequences at a time; null: the training batch")
    draw_seed: int = key(0, "the seed of the samples; `seed` decides their order")


@dataclass(frozen=True)
class ProbeKeys(TaskKeys):
    """The keys of probes."""

    data: type[Keys] = ProbeDataKeys
    model: type[Keys] = TokenModelKeys
