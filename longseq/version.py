"""The version of the installed package."""

from importlib import metadata


def installed_version() -> str:
    """Such as 0.1.0; "0+sources" if the repository is used without installation."""
    try:
        return metadata.version("longseq")
    except metadata.PackageNotFoundError:
        return "0+sources"
