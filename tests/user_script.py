# pyright: basic
"""A user's own program: the type checker reads it as a user's editor does, with all of its rules."""

import timm
import torch
from torch import Tensor, nn

import longseq  # registers the image models with timm
from longseq import kernels, mixers
from longseq.mixers import Mixer

model: nn.Module = timm.create_model("longseq_tiny_patch16_224", mixer="deltanet", num_classes=10)
logits: Tensor = model(torch.zeros(1, 3, 224, 224))

mixer: Mixer = mixers.create("gated_deltanet", d_model=64, num_heads=2)
y, state = mixer(torch.zeros(2, 16, 64))
token, state = mixer.step(torch.zeros(2, 64), state)

q = k = torch.zeros(1, 8, 2, 16)
output, final = kernels.delta_rule(q, k, torch.zeros(1, 8, 2, 16), torch.ones(1, 8, 2), output_final_state=True)
print(longseq.__name__, logits.shape, y.shape, token.shape, output.shape)
