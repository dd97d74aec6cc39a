"""longseq: image and sequence models with recurrent mixers in place of attention.

Importing it registers the image models with timm: `timm.list_models("longseq_*")`.

    model = longseq.from_pretrained("folder, checkpoint or OWNER/NAME on the hub")
    model.save_pretrained("folder")

`longseq.plugins.load(["my_module"])` imports modules that register mixers, tasks and more (see `longseq.plugins`).
"""

try:
    from longseq import plugins
    from longseq.backbones import autoencoder as _autoencoder  # noqa: F401
    from longseq.backbones import classifier as _classifier  # noqa: F401
    from longseq.backbones import image as _image  # noqa: F401
    from longseq.backbones import tokens as _tokens  # noqa: F401
    from longseq.models import from_pretrained, push_to_hub, register_kind, save_pretrained
except ModuleNotFoundError as error:
    if error.name != "longseq.kernels":
        raise
    # A checkout that is imported from its root and has no symbolic links (git on Windows, some unpackers).
    raise ImportError(
        f"{__path__[0]} lacks the links conf, kernels, tasks and tools to the folders beside it: run Python in another "
        "folder, where the installed package is found, or check out anew after `git config core.symlinks true`"
    ) from None

__all__ = ["from_pretrained", "plugins", "push_to_hub", "register_kind", "save_pretrained"]
