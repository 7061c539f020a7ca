"""Shell text as a tree: lists, pipelines, conditions, loops, functions. Built on the lexer's tokens; nothing is run."""

from __future__ import annotations

import re
from dataclasses import field
from typing import FrozenSet, Iterator, List, Optional, Sequence, Set, Tuple

from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.problem import Problem
from drumbeat.base.regex import regex
from drumbeat.commands.shell import Heredoc, Lexer, Token, Word

MAX_NESTING = 100  # compound commands inside each other; more is no script that a person wrote
_ASSIGNMENT = regex(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
_FUNCTION = regex(r"[\w.:-]+")
DECLARING = frozenset(("export", "declare", "typeset", "readonly", "local"))
_READING = frozenset(("read", "mapfile", "readarray", "getopts", "printf"))
CALCULATED = regex(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)|\b([A-Za-z_]\w*)\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))"
)  # variables that arithmetic changes
_ENDS = frozenset(("then", "else", "elif", "fi", "do", "done", "esac", "}", ";;"))


@dataclass
class Node:
    """One command. `kind`: simple, pipeline, list (&& and ||), if, for, while, case, function, group, subshell,
    arithmetic, unknown."""

    kind: str
    line: int
    start: int  # its place in the text
    end: int
    # simple: its words; for: the variable and its items; case: the word; function: its name
    words: Tuple[Word, ...] = ()
    assigned: Tuple[Word, ...] = ()  # simple: assignments before its words
    redirects: Tuple[Token, ...] = ()
    heredocs: Tuple[Heredoc, ...] = ()
    # pipeline, list: one command each; if: condition, body, …, else
    bodies: List[List[Node]] = field(default_factory=list)
    joints: Tuple[str, ...] = ()  # list: the operators between commands; case: the patterns of each body
    negated: bool = False
    background: bool = False

    def walk(self) -> Iterator[Node]:
        """Yield this command and all inside it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += [each for body in reversed(node.bodies) for each in reversed(body)]

    def writes(self) -> FrozenSet[str]:
        """Return the variables that this command, or one inside it, may assign."""
        found = set()
        for node in self.walk():
            if node.kind == "for":
                found.add(node.words[0].text)
            named = [word.text for word in node.words]
            declared = node.words[1:] if named[:1] and named[0] in DECLARING else ()
            found |= {
                match[1]
                for word in (*(node.assigned if not node.words else ()), *declared)  # NAME=x COMMAND is of the command
                for match in [_ASSIGNMENT.match(word.raw)]
                if match
            }
            if node.kind == "arithmetic" or named[:1] == ["let"]:
                found |= {match[1] or match[2] for match in CALCULATED.finditer(" ".join(named))}
            if named[:1] and named[0] in _READING:
                found |= {name for name in named[1:] if re.fullmatch(r"[A-Za-z_]\w*", name)}
        return frozenset(found)


def parse(text: str, line: int = 1) -> List[Node]:
    """Parse shell text. From the first error on, the rest is one node of kind `unknown`."""
    return _Parser(Lexer(text, line).run()).top()


def parse_loosely(lexer: Lexer) -> List[Node]:
    """Parse text that may be an excerpt: misplaced words are skipped, and the end closes all open commands."""
    return _Parser(lexer, loose=True).body(frozenset())


def assignment(word: Word) -> Optional[Tuple[str, str, bool, str]]:
    """Return name, index (with its brackets), true for +=, and the value as written."""
    found = _ASSIGNMENT.match(word.raw)
    return (found[1], found[2] or "", bool(found[3]), word.raw[found.end() :]) if found else None


class _Broken(Exception):
    pass


class _Parser:
    def __init__(self, lexer: Lexer, loose: bool = False) -> None:
        self.text, self.loose = lexer.text, loose
        self.tokens = [token for token in lexer.tokens if token.kind != "comment"]
        self.tokens.append(Token("operator", "\n", lexer.line, None, len(self.text), len(self.text)))
        self.heredocs = list(lexer.heredocs)
        self.at, self.depth = 0, 0

    def top(self) -> List[Node]:
        nodes: List[Node] = []
        try:
            self.body(frozenset(), nodes)
        except _Broken:
            start = nodes[-1].end if nodes else 0
            first = next((token for token in self.tokens if token.start >= start and token.text not in "\n;&"), None)
            if first:
                nodes.append(Node("unknown", first.line, first.start, len(self.text)))
        return nodes

    def body(self, ends: FrozenSet[str], nodes: Optional[List[Node]] = None) -> List[Node]:
        nodes = [] if nodes is None else nodes
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.text in ("\n", ";") and token.kind == "operator":
                self.at += 1
            elif self.is_word(*ends) or (token.text in ends and token.kind == "operator"):
                return nodes
            elif self.is_word(*_ENDS) or (token.kind == "operator" and token.text in (")", ";;", "&", "|", "&&", "||")):
                self.broken()
                self.at += 1
            else:
                start = self.at
                try:
                    node = self.chain()
                except _Broken:
                    self.broken()
                    self.at = max(start + 1, self.at)
                    continue
                if self.take("&"):
                    node.background = True
                nodes.append(node)
        if ends:
            self.broken()
        return nodes

    def broken(self) -> None:
        if not self.loose:
            raise _Broken

    def is_word(self, *texts: str) -> bool:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        return bool(token and token.word and token.word.raw in texts)

    def take(self, operator: str) -> bool:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if token and token.kind == "operator" and token.text == operator:
            self.at += 1
            return True
        return False

    def need(self, text: str) -> None:
        if self.is_word(text) or (self.peek().kind == "operator" and self.peek().text == text):
            self.at += 1
        else:
            self.broken()

    def peek(self) -> Token:
        if self.at >= len(self.tokens):
            self.broken()
            return self.tokens[-1]
        return self.tokens[self.at]

    @property
    def ended(self) -> bool:
        return self.at >= len(self.tokens)

    def chain(self) -> Node:
        first = self.pipeline()
        parts, joints = [first], []
        while self.at < len(self.tokens) and self.peek().kind == "operator" and self.peek().text in ("&&", "||"):
            joint = self.peek().text
            self.at += 1
            self.skip_lines()
            try:
                parts.append(self.pipeline())
            except _Broken:
                self.broken()
                break
            joints.append(joint)
        if not joints:
            return first
        return Node(
            "list", first.line, first.start, parts[-1].end, bodies=[[part] for part in parts], joints=tuple(joints)
        )

    def skip_lines(self) -> None:
        while self.at < len(self.tokens) and self.take("\n"):
            pass

    def pipeline(self) -> Node:
        start, line, negated = self.peek().start, self.peek().line, False
        while self.is_word("!", "time"):
            timed, negated = self.is_word("time"), negated ^ self.is_word("!")
            self.at += 1
            self.at += timed and self.is_word("-p")
        parts = [self.command()]
        while self.at < len(self.tokens) and (self.take("|") or self.take("|&")):
            self.skip_lines()
            try:
                parts.append(self.command())
            except _Broken:
                self.broken()
                break
        if len(parts) == 1:
            parts[0].negated, parts[0].start = negated, start
            return parts[0]
        return Node("pipeline", line, start, parts[-1].end, bodies=[[part] for part in parts], negated=negated)

    def command(self) -> Node:
        token = self.peek()
        self.depth += 1
        try:
            if self.depth > MAX_NESTING:
                if self.loose:
                    return self.simple()
                raise Problem(
                    f"line {token.line}: commands are nested more than {MAX_NESTING} deep", "no person wrote that"
                )
            node = self.compound(token)
            if node is None:
                return self.simple()
            redirects = []
            while self.at < len(self.tokens) and self.tokens[self.at].kind == "redirect":
                redirects.append(self.tokens[self.at])
                self.at += 1
            node.redirects, node.end = tuple(redirects), self.tokens[min(self.at, len(self.tokens)) - 1].end
            self.bring_heredocs(node)
            return node
        finally:
            self.depth -= 1

    def compound(self, token: Token) -> Optional[Node]:
        node = Node("", token.line, token.start, token.end)
        following = self.tokens[self.at + 1 : self.at + 3]
        if self.take("("):
            if self.text.startswith("((", token.start):
                return self.arithmetic(node)
            node.kind, node.bodies = "subshell", [self.body(frozenset(")"))]
            self.at += 1
            return node
        raw = token.word.raw if token.word else ""
        if raw == "if":
            return self.condition(node)
        if raw in ("while", "until"):
            self.at += 1
            node.kind, node.joints = "while", (raw,)
            node.bodies = [self.until("do"), self.until("done")]
        elif raw == "for":
            return self.loop(node)
        elif raw == "case":
            return self.cases(node)
        elif raw == "{":
            self.at += 1
            node.kind, node.bodies = "group", [self.until("}")]
        elif raw == "function" or (_FUNCTION.fullmatch(raw) and [each.text for each in following] == ["(", ")"]):
            return self.function(node, raw == "function")
        else:
            return None
        return node

    def until(self, end: str) -> List[Node]:
        body = self.body(frozenset((end,)))
        self.at += 1
        return body

    def condition(self, node: Node) -> Node:
        node.kind = "if"
        while self.is_word("if", "elif"):
            self.at += 1
            node.bodies += [self.until("then"), self.body(frozenset(("elif", "else", "fi")))]
        if self.is_word("else"):
            self.at += 1
            node.bodies.append(self.body(frozenset(("fi",))))
        self.need("fi")
        return node

    def loop(self, node: Node) -> Node:
        self.at += 1
        name = self.peek().word
        node.kind = "for"
        if name is None:  # for ((i = 0; …))
            if not self.text.startswith("((", self.peek().start):
                raise _Broken
            inside = Node("", node.line, self.peek().start, 0)
            self.at += 1
            texts = [*self.arithmetic(inside).words[0].raw.split(";"), "", ""][:3]
            first, asked, step = (
                [Node("arithmetic", node.line, node.start, node.start, (Word(text, text, node.line, 0),))]
                for text in (texts[0], texts[1].strip() or "1", texts[2])
            )
            node.kind = "while"
            while self.take(";") or self.take("\n"):
                pass
            self.need("do")
            node.bodies = [asked, self.until("done"), first, step]
            return node
        self.at += 1
        words = [name]
        self.skip_lines()
        if self.is_word("in"):
            self.at += 1
            while self.peek().word and self.peek().kind == "word":
                words.append(self.peek().word or name)
                self.at += 1
        while self.take(";") or self.take("\n"):
            pass
        self.need("do")
        node.words, node.bodies = tuple(words), [self.until("done")]
        return node

    def cases(self, node: Node) -> Node:
        self.at += 1
        subject = self.peek().word
        self.at += 1
        self.skip_lines()
        self.need("in")
        patterns: List[str] = []
        bodies: List[List[Node]] = []
        while True:
            self.skip_lines()
            if self.is_word("esac") or self.ended:
                break
            self.take("(")
            some: List[str] = []
            while not self.take(")") and not self.ended:
                some += [self.peek().word.raw] if self.peek().word else []  # type: ignore[union-attr]
                self.at += 1
            patterns.append("\n".join(some))
            bodies.append(self.body(frozenset((";;", ";;&", "esac"))))
            if not self.is_word("esac"):
                self.at += 1
        self.need("esac")
        node.kind, node.words, node.joints = "case", (subject,) if subject else (), tuple(patterns)
        node.bodies = bodies
        return node

    def function(self, node: Node, keyword: bool) -> Node:
        self.at += keyword
        name = self.peek().word
        self.at += 1
        if self.take("("):
            self.need(")")
        self.skip_lines()
        if name is None:
            raise _Broken
        node.kind, node.words, node.bodies = "function", (name,), [[self.command()]]
        return node

    def arithmetic(self, node: Node) -> Node:
        level = 1
        while level and not self.ended:
            level += (self.peek().text == "(") - (self.peek().text == ")")
            self.at += 1
        node.kind, node.end = "arithmetic", self.tokens[min(self.at, len(self.tokens)) - 1].start + 1
        inside = self.text[node.start + 2 : node.end - 2]
        node.words = (Word(inside, inside, node.line, 0),)
        return node

    def simple(self) -> Node:
        first, words, redirects = self.peek(), [], []
        inside = first.word is not None and first.word.raw == "[["
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.kind == "redirect" and not inside:
                redirects.append(token)
            elif token.word and token.kind == "word":
                words.append(token.word)
                inside = inside and token.word.raw != "]]"
            elif inside and token.text != "\n":  # && and < are words between [[ and ]]
                words.append(Word(token.text, token.text, token.line, 0))
                words += [token.word] if token.word else []
            elif not inside:
                break
            self.at += 1
        if not words and not redirects:
            raise _Broken
        count = 0
        while count < len(words) and _ASSIGNMENT.match(words[count].raw):
            count += 1
        node = Node(
            "simple", first.line, first.start, self.tokens[self.at - 1].end, tuple(words[count:]), tuple(words[:count])
        )
        node.redirects = tuple(redirects)
        self.bring_heredocs(node)
        return node

    def bring_heredocs(self, node: Node) -> None:
        """Attach a command's heredocs and extend the command to their end."""
        wanted = [token for token in node.redirects if token.text in ("<<", "<<-")]
        for token in wanted:
            mine = next((each for each in self.heredocs if each.owner == token.line), None)
            if mine:
                self.heredocs.remove(mine)
                node.heredocs = (*node.heredocs, mine)
                node.end = max(node.end, mine.end)


def names_read(text: str) -> FrozenSet[str]:
    """Return the variables that shell text may read, including those in single quotes."""
    found = set(re.findall(r"\$\{?[#!]?([A-Za-z_]\w*)", text))
    for inside in re.findall(r"\$?\(\((.*?)\)\)", text, re.DOTALL):
        found |= set(re.findall(r"[A-Za-z_]\w*", inside))
    return frozenset(found)


_OPTIONAL = regex(r"\$\{([A-Za-z_]\w*)(?:\[[^\]]*\])?(?::?([-=+]))")  # unset, it has a default or is left out


def names_needed(text: str) -> FrozenSet[str]:
    """Return the variables without whose value shell text has no meaning: not those that it gives a default."""
    assigned = {found[1] for found in _OPTIONAL.finditer(text) if found[2] == "="}
    return names_read(_OPTIONAL.sub("{", text)) - assigned


_POSITIONAL = regex(r"\$(?:\{?([1-9@*#])(?![A-Za-z_{]))")


def arguments_read(text: str, needed: bool = False) -> Set[str]:
    """Return the script's arguments (1 to 9, @, *, #) that a text reads, not those of its functions or after `set --`.
    `needed`: not those that it gives a default."""
    nodes = sorted((each for top in parse(text) for each in top.walk()), key=lambda each: each.start)
    plain, end, last = "", 0, len(text)
    for each in nodes:
        if each.start < end or each.start >= last:
            continue  # inside a function, or after its arguments were replaced
        if each.kind == "function":
            plain, end = plain + text[end : each.start], each.end
        elif program_of(each) == "set" and any(word.raw == "--" for word in each.words):
            last = each.end
    plain += text[end:last]
    plain = re.sub(r"<<-?\s*(['\"])(\w+)\1[\s\S]*?^\t*\2$", "", plain, flags=re.M)  # nothing is filled in there
    plain = re.sub(r"\\.|'[^']*'", "", plain)
    return set(_POSITIONAL.findall(re.sub(r"\$\{\d:?[-=+]", "{", plain) if needed else plain))


def flat(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield from node.walk()


def own_variables(nodes: Sequence[Node]) -> FrozenSet[str]:
    """Return the variables that some statement sets without using their old value."""
    words = [
        word
        for each in nodes
        for word in (each.words if program_of(each) in DECLARING else () if each.words else each.assigned)
    ]
    given = [(parts, word) for word in words for parts in [assignment(word)] if parts]
    goes_on = {parts[0] for parts, word in given if parts[0] in names_read(word.raw) or parts[2]}
    return frozenset(parts[0] for parts, _ in given) - goes_on


def program_of(node: Node) -> str:
    return node.words[0].text.rsplit("/", 1)[-1] if node.kind == "simple" and node.words else ""


def substituted(nodes: Sequence[Node]) -> Set[str]:
    """Return the programs that command substitutions in these commands start."""
    found: Set[str] = set()
    for node in (each for top in nodes for each in top.walk()):
        for part in (part for word in (*node.words, *node.assigned) for part in word.parts):
            inside = parse(part.text)
            found |= substituted(inside) | {program_of(each) for top in inside for each in top.walk()} - {""}
    return found


def files_of(node: Node) -> str:
    """Return a command's redirections to and from files, as written."""
    given = [(each.text, each.word.raw) for each in node.redirects if each.word]
    return " ".join(
        f"{sign} {name}"
        for sign, name in given
        if not sign.endswith("&") and sign not in ("<<", "<<-") and name != "/dev/null"
    )


def into_file(node: Node) -> bool:
    return any(
        token.text in (">", ">>", "&>", "&>>", ">|") and token.word and not token.word.text.startswith("/dev/")
        for token in node.redirects
    )


def exports(nodes: Sequence[Node], name: str) -> bool:
    return any(
        program_of(each) == "export" and any(re.match(rf"{name}(?:=|$)", word.raw) for word in each.words[1:])
        for each in nodes
    )


def bodies_of(node: Node) -> List[List[Node]]:
    return node.bodies if node.kind != "list" else [[part for each in node.bodies for part in each]]
