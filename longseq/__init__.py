"""longseq: image and sequence models with recurrent mixers in place of attention.

Importing it registers the image models with timm: `timm.list_models("longseq_*")`.
"""

from longseq.backbones import image as _image  # noqa: F401
