"""Pages that are made from the code when the site is built: commands and events."""

import os
import sys

from mkdocs.structure.files import File

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tools.reference.__main__ import BUILT  # noqa: E402 - found beside this folder


def on_files(files, config):
    for name, page in BUILT.items():
        files.append(File.generated(config, f"{name}.md", content=page()))
    return files
