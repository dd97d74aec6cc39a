"""The families of models that `longseq convert` reads and writes, by the `model_type` of their config.json."""

from __future__ import annotations

from longseq.tools.hugging_face.families.family import Family
from longseq.tools.hugging_face.families.fla import FLA
from longseq.tools.hugging_face.families.mamba import MAMBAS
from longseq.tools.hugging_face.families.rwkv import RWKV7
from longseq.tools.hugging_face.families.transformers import TRANSFORMERS

FAMILIES: dict[str, Family] = {family.model_type: family for family in (*TRANSFORMERS, *FLA, RWKV7, *MAMBAS)}
