"""The interpreter for batch jobs: Slurm's variables, variables that differ by task, and commands that list the nodes."""

from __future__ import annotations

import re
from typing import FrozenSet, List, Optional, Sequence

from drumbeat.commands.events import Event, Variable
from drumbeat.commands.interpret import Shell
from drumbeat.commands.programs import ASK, FILTERS, LOOK, PRINTS, STATE, words
from drumbeat.commands.state import ShellState
from drumbeat.commands.syntax import DECLARING, Node, exports, names_read, parse
from drumbeat.commands.values import (
    HEAD,
    HOSTS,
    JOB,
    MARK,
    ONCE,
    SUBMIT,
    TASK,
    Unknown,
    outside_quotes,
    split_marks,
    whole_marks,
)

_FIRST_OF = re.compile(
    r"head\s+-(?:n\s*)?1\b|-f\s*1\b|\$1\b|sed\s+-n\s+['\"]?1p|NR\s*==\s*1|%%|\[0\]|head\s+--lines=1|tail\s+-n\s*1\b.*-1"
)
_HOST_LIST = re.compile(r"scontrol\s+show\s+hostnames?|nodeset\s+-e|expand_hostlist|hostlist|PBS_NODEFILE|LSB_")
_OWN_HOST = re.compile(
    r"\s*srun\b[^|]*(?:-n ?1|--ntasks[= ]1|-w|--nodelist)\b[^|]*\bhostname\b"
    r"|\s*(?:/bin/|/usr/bin/)?(?:hostname\b|uname\s+-n|ip\s+(?:-\S+\s+)*(?:a|addr|address|route)\b|ifconfig\b)"
    r"|\s*python3?\s+-c\b.*gethost"
)
_TASK_VARIABLES = words(
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURMD_NODENAME HOSTNAME RANK LOCAL_RANK NODE_RANK GROUP_RANK "
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK PMIX_RANK SLURM_TOPOLOGY_ADDR "
    "CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES"
)
_OF_DRUMBEAT = frozenset(("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NNODES", "LOCAL_WORLD_SIZE"))
_OF_HEAD = frozenset(("HOSTNAME", "SLURMD_NODENAME", "SLURM_LAUNCH_NODE_IPADDR"))
_SITE = re.compile(
    r"(?:HOME|USER|TMPDIR|SCRATCH|WORK|PWD|SHELL|LANG|LOGNAME)|XDG_\w+|CONDA_\w+|(?:SLURM|PBS)_\w+"
    r"|(?:LD_\w+_|\w*LIBRARY_|PYTHON|MAN|MODULE|C|\w*INCLUDE_|\w*CONFIG_|\w*PREFIX_)?PATH"
)

OWN_PATH = re.compile(r"(?<!\\)\$\{?(?:0|BASH_SOURCE(?:\[0\])?)(?![\w\[])")  # of the batch script
_READS_A_PROGRAM = re.compile(r"(?:\S*/)?(?:python[\d.]*|(?:ba)?sh)")


def by_own_name(text: str) -> str:
    """Return the text with $0 for BASH_SOURCE, which `bash -c` does not have."""
    return OWN_PATH.sub(lambda found: found[0][: 1 + found[0].startswith("${")] + "0", text)


class JobShell(Shell):
    prints, state, asks, looks = PRINTS, STATE, ASK, LOOK
    acts = re.compile(
        r"\bscontrol\s+(?:-\S+\s+)*(?:requeue\w*|update|hold|release|suspend|resume|write|cancel_reboot)\b"
    )

    def outside(self, name: str) -> str:
        if name == "SLURM_SUBMIT_DIR":
            return self.mark("${PWD}", SUBMIT)
        of_task = name in _TASK_VARIABLES
        if self.task and (of_task or (name in _OF_DRUMBEAT and name not in self.known)):
            return self.mark(f"${{{name}}}", TASK)
        if name not in self.known and not self.task and name in _OF_HEAD:
            return self.mark(f"${{{name}}}", HEAD, False)
        if name not in self.known and name.startswith("SLURM_"):
            return self.mark(f"${{{name}}}", JOB)
        return super().outside(name)

    def unset(self, name: str, default: str) -> Optional[bool]:
        if _SITE.fullmatch(name):
            return None
        shown = f"${name}" if name.isdigit() else name
        if shown in self.required or name in self.known:
            return False
        self.defaults.setdefault(shown, default)
        return True

    def fed(self, words: List[str], node: Node) -> List[str]:
        dash = next((place for place, word in enumerate(words) if word in ("-", "-s")), len(words))
        if not node.heredocs or dash == 0 or not _READS_A_PROGRAM.fullmatch(words[dash - 1]):
            return []
        document = node.heredocs[-1]
        text = document.text if document.literal else self.words.heredoc(document.text)
        of_a_shell = words[dash + 1 :] and not words[dash - 1].rsplit("/", 1)[-1].startswith("python")
        return [*words[:dash], "-c", text, *([words[dash - 1]] if of_a_shell else []), *words[dash + 1 :]]

    def sourced(self, event: Event) -> None:
        words = event.words
        text = self.read(words[1]) if words[0] != "eval" and len(words) > 1 and not event.soft else ""
        inside = [each for top in parse(text) for each in top.walk()]
        writes = frozenset(name for each in inside for name in each.writes())
        if text:
            called = {word.text for each in inside if each.kind == "simple" for word in each.words[:1]}
            event.soft = not called & {"source", ".", "eval"} and not any(each.kind == "unknown" for each in inside)
            event.writes = writes if event.soft else frozenset()
            if not called <= self.prints | self.state | self.asks | self.looks | DECLARING:
                event.kind = "once"  # what it starts is started once
        for name in writes:
            mark = self.marks.mark(Unknown(f"${{{name}}}", JOB, frozenset((name,)), False, event.text))
            old = self.variables.get(name)
            exported = bool(old and old.exported) or self.exports_all or exports(inside, name)
            self.variables[name] = Variable(mark, exported, len(self.events) - 1, line=event.line)
        if not event.soft and self.variables:
            self.unread.append((event.line, event.text, tuple(name for name in self.variables if name not in writes)))

    def with_names(self, text: str, line: int) -> str:
        def variable(found: re.Match[str]) -> str:
            unknown = self.marks.get(found[0])
            late = unknown.kind in (ONCE, TASK, HEAD) or unknown.text.startswith("$(") or OWN_PATH.match(unknown.text)
            if self.marks.named(found[0]) or not late or "[@]" in unknown.text:
                return found[0]
            name = f"VALUE_{1 + sum(any(each.startswith('VALUE_') for each in event.writes) for event in self.events)}"
            self.assign(name, whole_marks(found[0]), f'"{unknown.text}"', line, False)
            mark = str(self.variables[name].value)
            return split_marks(mark) if outside_quotes(found[0]) else mark

        return MARK.sub(variable, text)

    def host_of(self, text: str, nodes: Sequence[Node], inner: ShellState) -> str:
        """Return a mark for a list of the job's nodes, or for the first of them."""
        reads = "".join("".join(inner.lookup(name) or "") for name in names_read(text))
        kinds = {unknown.kind for unknown in self.marks.of(reads)}
        names = [
            word.text.rsplit("/", 1)[-1]
            for node in nodes
            for each in node.walk()
            for word in each.words[:1]
            if each.kind == "simple"
        ]
        counted = re.search(r"\|\s*wc\s+(?:-[lw]|--(?:lines|words))\s*$", text)
        if counted and (_HOST_LIST.search(text) or HOSTS in kinds) and len(names) == 2 and "SLURM_NNODES" in self.known:
            return self.known["SLURM_NNODES"]
        if _HOST_LIST.search(text) or (HOSTS in kinds and set(names) <= (FILTERS | {"srun"})):
            return self.mark(f"$({text})", HEAD if _FIRST_OF.search(text) else HOSTS, False)
        if (HEAD in kinds and set(names) <= (FILTERS | {"srun"})) or (
            _OWN_HOST.match(text) and not re.search(r"\$\{?SLURM_(?:PROC|NODE|LOCAL)ID", text)
        ):
            return self.mark(f"$({text})", HEAD, False)
        return ""

    def name_hosts(self, words: Sequence[str], text: str, names: FrozenSet[str]) -> None:
        if self.task or not _HOST_LIST.search(text):
            return
        for name in names:
            mark = (
                self.marks.mark(Unknown(f"${{{name}}}", HEAD, frozenset((name,)), False, text))
                if _FIRST_OF.search(text)
                else self.marks.mark(Unknown(f"${{{name}[@]}}", HOSTS, frozenset((name,)), False))
            )
            self.variables[name] = self.variables[name]._replace(value=mark if words[0] == "read" else [mark])
