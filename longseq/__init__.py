"""longseq: image and sequence models with recurrent mixers in place of attention.

Importing it registers the image models with timm: `timm.list_models("longseq_*")`.

    model = longseq.from_pretrained("folder, checkpoint or OWNER/NAME on the hub")
    model.save_pretrained("folder")
"""

from longseq.backbones import autoencoder as _autoencoder  # noqa: F401
from longseq.backbones import image as _image  # noqa: F401
from longseq.backbones import tokens as _tokens  # noqa: F401
from longseq.models import from_pretrained, push_to_hub, register_kind, save_pretrained

__all__ = ["from_pretrained", "push_to_hub", "register_kind", "save_pretrained"]
