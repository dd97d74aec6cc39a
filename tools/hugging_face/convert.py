"""`longseq convert`: a model of another library becomes one of ours, or ours one of theirs, with the same weights."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from longseq.tasks.commands import Convert
from longseq.tasks.report import quiet_libraries
from longseq.tasks.training.configuration import command_word, read_command
from longseq.tokenizer_files import TOKENIZER_FILE
from longseq.tools.hugging_face.conversion import change_mixer, read_model, write_family, write_model
from longseq.tools.hugging_face.families import FAMILIES


@quiet_libraries()
def run(cfg: DictConfig) -> Path:
    """Convert a model as configured; returns the folder that was written."""
    keys = read_command(Convert, cfg)
    output = Path(keys.output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"output={output} is not empty")
    model = read_model(Path(keys.source))
    if keys.mixer.name is not None:
        model = change_mixer(model, keys.mixer.name, keys.mixer.options, keys.seed)
    if keys.format == "longseq":
        write_model(model, output)
    else:
        write_family(model, FAMILIES[keys.format], output)
    backbone = model.backbone()
    count = sum(parameter.numel() for parameter in backbone.parameters())
    print(f"{output}: {count:,} parameters, {backbone.mixer_name}, format={keys.format}")
    if keys.format == "longseq" and (output / TOKENIZER_FILE).is_file():
        init = command_word("init", str(output))
        print(f"to classify documents with it: longseq train task=document {init}")
        print(f"to train it further: longseq train task=lm {init}")
    return output
