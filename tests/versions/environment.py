"""`python tests/versions/environment.py FOLDER`: let the virtual environment FOLDER see the packages of the one that runs this.

What pip installs there later stands before them. Its constraints keep pip from bringing another torch.
"""

from __future__ import annotations

import importlib.metadata
import site
import subprocess
import sys
from pathlib import Path

_OWN = "import site; print(site.getsitepackages()[0])"


def main(folder: Path) -> None:
    python = str(folder / "bin" / "python")
    own = subprocess.run([python, "-c", _OWN], capture_output=True, text=True, check=True).stdout.strip()
    lines = [f"import site; site.addsitedir({place!r})" for place in site.getsitepackages()]
    Path(own, "borrowed.pth").write_text("\n".join(lines) + "\n")
    torch = importlib.metadata.version("torch").partition("+")[0]
    (folder / "constraints").write_text(f"torch=={torch}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
