"""The keys of `longseq prepare task=image`, without what the command itself imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from longseq.tasks.training.command import CommandKeys
from longseq.tasks.training.options import Length, Range, Required
from longseq.tasks.training.processes import refuse_many

QUALITY = 90  # of JPEG files, where the command does not give it


@dataclass(frozen=True, kw_only=True)
class PrepareImagesKeys(CommandKeys):
    """The keys of `longseq prepare task=image`, explained in conf/prepare_image.yaml."""

    input: Annotated[
        str | None, Required("give input=FOLDER or input=FILE.csv: the images to prepare, as data.root names them")
    ]
    output: Annotated[str | None, Required("give output=FOLDER: where the shards are written")]
    format: Literal["jpeg", "keep"]
    size: Annotated[int | None, Range(1)]
    quality: Annotated[int, Range(1, 100)]
    shard_bytes: Annotated[int, Range(1_000)]
    multi_label: bool
    file_column: str | None
    label_column: str | Annotated[list[str], Length(1)] | None
    label_delimiter: str | None
    processes: Annotated[int | None, Range(1)]

    def __post_init__(self) -> None:
        refuse_many(self.processes, "processes")
        if self.format == "keep" and self.size is not None:
            raise ValueError(f"size={self.size} changes images, and format=keep keeps them: leave one out")
        if self.format == "keep" and self.quality != QUALITY:
            raise ValueError(
                f"quality={self.quality} is of files that are encoded anew, and format=keep keeps them: leave one out"
            )
