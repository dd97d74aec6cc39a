# pyright: basic
"""A user's own program: our data, model and Lightning module, and Lightning's Trainer."""

import timm
from lightning.pytorch import Trainer

import longseq
from longseq.tasks import ImageClassifier, ImageDataKeys, ImageDataModule, Training

keys = ImageDataKeys(name="digits", source="digits", img_size=8, in_chans=1, num_workers=0)
data = ImageDataModule(keys, batch_size=64)
options = {"mixer": "deltanet", "img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 10}
model = timm.create_model("longseq_tiny_patch16_224", embed_dim=64, depth=2, **options)
module = ImageClassifier(model, num_classes=10, training=Training(learning_rate=2e-3))
trainer = Trainer(max_epochs=1, use_distributed_sampler=False)
trainer.fit(module, datamodule=data)
trainer.test(module, datamodule=data)
longseq.save_pretrained(model, "digits")
