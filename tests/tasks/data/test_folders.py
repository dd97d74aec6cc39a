"""Names of folders as the files of a run hold them."""

from __future__ import annotations

import os

import pytest

from longseq.tasks.data.folders import class_name, is_unicode, written_name


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("food/K\udcc3\udca4se", "Käse"),  # as Python reads a folder in a locale of ASCII
        ("Käse", "Käse"),  # of an archive that says its encoding
        ("K\udce4se", "K\udce4se"),  # no UTF-8 on the disk
    ],
)
def test_a_class_has_the_name_on_the_disk_in_a_locale_of_ascii(monkeypatch, given, wanted):
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode("ascii", "surrogateescape"))
    assert class_name(given) == wanted
    assert is_unicode(wanted) == (wanted == "Käse")
    assert not is_unicode(wanted) or written_name(f"{given}/1.png").endswith("Käse/1.png")
