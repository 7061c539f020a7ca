"""Code in pages: a script is one block, a Markdown or reStructuredText page has several, with its own lines."""

from __future__ import annotations

import ast
import re
from typing import List, NamedTuple, Sequence, Tuple

from drumbeat.base.regex import regex
from drumbeat.lint.python_program import syntax_tree

SHELL, PYTHON, OTHER = "shell", "python", "other"
_PAGES = (".md", ".markdown", ".rst", ".mdx")
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm", ".zsh", ".pbs", ".job")

_LANGUAGES = {
    **dict.fromkeys(
        ["bash", "sh", "shell", "zsh", "console", "shell-session", "sh-session", "terminal", "slurm", "sbatch"], SHELL
    ),
    **dict.fromkeys(["python", "python3", "py", "pycon", "ipython"], PYTHON),
}
_FENCE = regex(r"^([ \t]*(?:>[ \t]?)*)(`{3,}|~{3,})([^`]*)$")
_RST = regex(r"^([ \t]*)\.\. (?:code-block|code|sourcecode)::[ \t]*(\S*)[ \t]*$")
_OPTION = regex(r"^[ \t]*:[\w-]+:")
COMMANDS = (
    "export unset set source module ml srun sbatch salloc scontrol squeue mpirun mpiexec python python3 torchrun "
    "accelerate deepspeed bash sh apptainer singularity docker podman kubectl runai pip conda ssh scp cd mkdir cp mv "
    "rm ls cat grep echo printf sed awk git wget curl make cmake sudo apt nvidia-smi rocm-smi amd-smi ibstat "
    "ibv_devices ibv_devinfo ip rdma watch nc kill pkill ulimit taskset numactl rocprof rocprofv3 nsys if then else fi for "
    "while do done case esac exec trap wait time"
)
_SHELL_LINE = regex(
    r"(?:#!|[A-Z_][A-Z0-9_]*=\S|[a-z_]+=[\"'$]|\\?\$\{?\w|\./|\||(?:" + "|".join(COMMANDS.split()) + r")(?=\s|$))"
)
_PYTHON_LINE = regex(r"(?:import \w|from [\w.]+ import |def \w+\(|class \w|@\w|with .+:$|[\w., ]+ = \w[\w.]*\()")
_PROMPT = regex(r"^(\s*)(?:\$|[\w.-]{1,64}@[\w.-]{1,64}:?\S{0,200}\$|%|>>>) (?=\S)")


class Block(NamedTuple):
    kind: str
    text: str
    line: int  # of its first line, as the file counts
    indents: Tuple[int, ...]  # characters taken off the front of each line


def is_document(text: str, name: str) -> bool:
    """Return true for a page, by its name, else by its content."""
    if name.endswith(_PAGES):
        return True
    if name.endswith((*SCRIPTS, ".py")) or text.startswith("#!"):
        return False
    lines = text.splitlines()
    return sum(bool(_FENCE.match(line)) for line in lines) > 1 or any(_RST.match(line) for line in lines)


def blocks(text: str, name: str = "") -> List[Block]:
    lines = text.split("\n")
    if is_document(text, name):
        return _joined(_in_document(lines), lines)
    first = lines[0] if lines else ""
    python = name.endswith(".py") or (first.startswith("#!") and "python" in first)
    if not python and not name.endswith(SCRIPTS) and not first.startswith("#!"):
        python = _is_program(text)
    return [Block(PYTHON if python else SHELL, text, 1, (0,) * len(lines))]


_OF_A_PROGRAM = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def _is_program(text: str) -> bool:
    """Return true for Python by its own grammar; a word or an assignment alone is shell as well."""
    tree = syntax_tree(text)
    return tree is not None and any(isinstance(node, _OF_A_PROGRAM) for node in tree.body)


def _in_document(lines: Sequence[str]) -> List[Block]:
    found: List[Block] = []
    at = 0
    while at < len(lines):
        fence, directive = _FENCE.match(lines[at]), _RST.match(lines[at])
        if fence:
            end = _fence_end(lines, at + 1, fence.group(2))
            found += _block(lines, at + 1, end, _language(fence.group(3)))
            at = end + 1
        elif directive:
            end = _indented_end(lines, at + 1, len(directive.group(1)) + 1)
            found += _block(lines, at + 1, end, _LANGUAGES.get(directive.group(2).lower(), OTHER))
            at = end
        elif lines[at].startswith(("    ", "\t")) and (at == 0 or not lines[at - 1].strip()):
            # It names no language, and a list's second paragraph looks the same: it must begin with a command.
            end = _indented_end(lines, at, 4)
            inner = next((place for place in range(at, end) if _FENCE.match(lines[place])), end)
            found += [block for block in _block(lines, at, inner, "") if block.kind == SHELL]
            at = max(inner, at + 1)
        else:
            at += 1
    return found


def _fence_end(lines: Sequence[str], at: int, opening: str) -> int:
    while at < len(lines):
        match = _FENCE.match(lines[at])
        if match and match.group(2).startswith(opening) and not match.group(3).strip():
            return at
        at += 1
    return at


def _indented_end(lines: Sequence[str], at: int, least: int) -> int:
    last = at
    while at < len(lines) and (not lines[at].strip() or len(lines[at]) - len(lines[at].lstrip()) >= least):
        at += 1
        if lines[at - 1].strip():
            last = at
    return last


def _language(info: str) -> str:
    words = info.replace("{", " {").replace("}", "} ").split()
    if words and words[0] in ("{code-block}", "{code}", "{sourcecode}", "{code-cell}"):
        words = words[1:]
    return _LANGUAGES.get(words[0].lower().lstrip(".{").rstrip("},"), OTHER) if words else ""


def _block(lines: Sequence[str], first: int, end: int, kind: str) -> List[Block]:
    while first < end and (not lines[first].strip() or _OPTION.match(lines[first])):
        first += 1
    body = [line.rstrip() if not line.strip() else line for line in lines[first:end]]
    if not any(body) or kind == OTHER:
        return []
    quote = re.match(r"[ \t]*(?:>[ \t]?)+", body[0])
    common = min(len(line) - len(line.lstrip()) for line in body if line.strip()) if not quote else quote.end()
    indents = [min(common, len(line)) for line in body]
    cut = [line[common:] for line in body]
    kind = kind or _guess(cut)
    if any(_PROMPT.match(line) for line in cut) and kind == SHELL:
        cut, indents = _typed(cut, indents)
    return [Block(kind, "\n".join(cut), first + 1, tuple(indents))] if kind != OTHER else []


def _guess(lines: Sequence[str]) -> str:
    code = [line for line in lines if line.strip() and (not line.startswith("#") or line.startswith("#!"))]
    if not code:
        return SHELL
    first = code[0]
    if _PROMPT.match(first) or _SHELL_LINE.match(first):
        return SHELL
    return PYTHON if _PYTHON_LINE.match(first) else OTHER


def _typed(lines: Sequence[str], indents: Sequence[int]) -> Tuple[List[str], List[int]]:
    """Keep only what was typed in a terminal's transcript; answers become empty lines."""
    typed: List[str] = []
    taken: List[int] = []
    going_on = False
    for line, indent in zip(lines, indents):
        prompt = _PROMPT.match(line)
        keep = line[prompt.end() :] if prompt else line if going_on else ""
        taken.append(indent + (prompt.end() if prompt else 0))
        typed.append(keep)
        going_on = keep.endswith("\\")
    return typed, taken


def _joined(found: Sequence[Block], lines: Sequence[str]) -> List[Block]:
    """Join neighbouring fences of one kind with nothing between them: slides cut one script into a fence per line."""
    groups: List[List[Block]] = []
    for block in found:
        before = groups[-1][-1] if groups else block
        between = lines[before.line + before.text.count("\n") : block.line - 1]
        alone = all(not line.strip() or re.fullmatch(r"\s*(`{3,}|~{3,})\s*", line) for line in between)
        if groups and before.kind == block.kind == SHELL and alone:
            groups[-1].append(block)
        else:
            groups.append([block])
    return [_one(group) for group in groups]


def _one(group: Sequence[Block]) -> Block:
    texts: List[str] = []
    indents: List[int] = []
    for block in group:
        empty = block.line - group[0].line - len(indents)
        # A command that goes on in the next fence must find its way there.
        going_on = texts and texts[-1].rstrip().endswith("\\")
        texts += ["\\" if going_on else ""] * empty
        texts.append(block.text)
        indents += [0] * empty + list(block.indents)
    return Block(group[0].kind, "\n".join(texts), group[0].line, tuple(indents))


# Python in a page, a heredoc or `python -c`: its lines without comments and docstrings.


_TRIPLE = regex(r"\"\"\"|'''")
_STRING_OR_COMMENT = regex(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|#.*")


def lines(text: str, first: int) -> List[Tuple[int, str]]:
    """Return lines without comments. Strings stay, since a device is often named in one; excerpts need not parse, so this
    does not ask Python."""
    kept: List[Tuple[int, str]] = []
    inside = ""
    for number, line in enumerate(text.split("\n"), first):
        if inside:
            if inside in line:
                inside = ""
            continue
        quote = _TRIPLE.search(line)
        if quote:
            if line.count(quote.group()) % 2:
                inside = quote.group()
            line = line[: quote.start()]
        line = _STRING_OR_COMMENT.sub(lambda found: "" if found.group()[0] == "#" else found.group(), line[:2000])
        if line.strip():
            kept.append((number, line))
    return kept
