"""Chromium for tests of the page: unpacked from Debian packages, so neither root nor an installation is needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from support.lab.components import unpack
from support.lab.places import cache, key, made_once

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PINS = Path(__file__).with_name("chromium.txt")
ARGUMENTS = (
    "--no-sandbox",  # tests may run as root, and in containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)
# The same fonts on every machine: texts are as wide as in the screenshots.
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <dir prefix="relative">usr/share/fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
  <alias binding="same"><family>system-ui</family><prefer><family>Inter</family></prefer></alias>
  <alias binding="same"><family>sans-serif</family><prefer><family>Inter</family></prefer></alias>
  <alias binding="same"><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
"""


def chromium() -> Path:
    """The folder with the unpacked packages; they are fetched on first use."""
    return made_once(cache() / "debian" / key(PINS.read_bytes(), _FONTS), _unpack)


def executable(folder: Path) -> Path:
    return folder / "usr/lib/chromium/chromium-headless-shell"


def environment(folder: Path) -> dict[str, str]:
    """Variables of the browser's process: the libraries and the fonts that were unpacked."""
    usr = folder / "usr/lib/x86_64-linux-gnu"
    libraries = [usr, usr / "pulseaudio", folder / "lib/x86_64-linux-gnu"]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "FONTCONFIG_FILE": str(folder / "fonts.conf"),
    }


@contextmanager
def launched(*arguments: str) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    folder = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable(folder), env=dict(environment(folder)), args=[*ARGUMENTS, *arguments]
        )
        yield browser
        browser.close()


def _unpack(folder: Path) -> None:
    unpack(PINS, folder)
    shutil.rmtree(folder / "archives")
    (folder / "fonts.conf").write_text(_FONTS)
