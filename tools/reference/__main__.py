"""Write the pages of docs/ that are made from the code, from the root of the source tree: python -m tools.reference"""

from __future__ import annotations

from typing import Callable, Dict

from tools.reference import codes, commands, environment, jobfile

PAGES: Dict[str, Callable[[], str]] = {
    "codes": codes.page,
    "environment": environment.page,
    "job": lambda: jobfile.page("job"),
    "site": lambda: jobfile.page("site"),
    "commands": commands.page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        text = page()
        with open(f"docs/{name}.md", "w", encoding="utf-8") as file:
            file.write(text)
