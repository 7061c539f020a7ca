"""The syntax tree of every file in src/drumbeat, parsed once for all checks that read it."""

import ast
import functools
import gc
from pathlib import Path

SRC = Path(__file__).parent.parent.parent / "src" / "drumbeat"

_checks = []
_results = {}


def of_each_file(check):
    """Decorate `check(path, nodes)`, where `nodes` is the list of a file's nodes, the module first: it becomes a function that
    returns the path of each file -> what the check returned. All checks read a file before the next one is parsed: the trees
    of all files would take hundreds of megabytes."""
    _checks.append(check)

    def results():
        if check not in _results:
            waiting = [each for each in _checks if each not in _results]
            found = {each: {} for each in waiting}
            gc.disable()  # trees have no cycles
            for path in sorted(SRC.rglob("*.py")):
                nodes = list(ast.walk(ast.parse(text_of(path))))
                for each in waiting:
                    found[each][path] = each(path, nodes)
            gc.enable()
            _results.update(found)
        return _results[check]

    return results


@functools.cache
def text_of(path):
    return path.read_text(encoding="utf-8")
