"""longseq: image and sequence models with recurrent mixers in place of attention.

Importing it registers the image models with timm: `timm.list_models("longseq_*")`.
"""

try:
    from longseq.backbones import image as _image  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "longseq.kernels":
        raise
    # A checkout without symbolic links (git on Windows, some unpackers), imported from its root.
    raise ImportError(
        f"{__path__[0]} lacks the links conf, kernels, tasks and tools to the folders beside it: run Python in another "
        "folder, where the installed package is found, or check out anew after `git config core.symlinks true`"
    ) from None
