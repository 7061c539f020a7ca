"""`drumbeat completion bash|zsh|fish`: completion scripts, generated from the commands' own parsers."""

from __future__ import annotations

import os
import shlex
from argparse import SUPPRESS
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from drumbeat.base.problem import Problem

SHELLS = ("bash", "zsh", "fish")
# Names that are looked up when the Tab key is pressed, by the option or metavar that stands for one of them.
_LOOKED_UP = {"--site": "sites", "--preset": "presets", "RUN": "runs", "SITE": "sites"}
_ALONE = {"--help": "list the commands", "--version": "print the version"}  # options that take the place of a command
_ASK = "drumbeat completion --words"


def add_arguments(parser: Any) -> None:
    parser.add_argument("shell", nargs="?", choices=SHELLS, help="print the completion script of this shell")
    parser.add_argument("--words", choices=("runs", "sites", "presets"), help=SUPPRESS)
    parser.epilog = (
        'bash: eval "$(drumbeat completion bash)" in ~/.bashrc. zsh: eval "$(drumbeat completion zsh)" in ~/.zshrc, '
        "after compinit. fish: drumbeat completion fish > ~/.config/fish/completions/drumbeat.fish"
    )


def run(args: Any) -> int:
    if args.words:
        print("\n".join(_names(args.words)))
        return 0
    if not args.shell:
        raise Problem("which shell?", f"drumbeat completion {'|'.join(SHELLS)}")
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](offers()), end="")
    return 0


def _names(kind: str) -> List[str]:
    if kind == "runs":
        from drumbeat.desk.runs import all_runs

        return [run.run_id for run in all_runs(os.environ).runs]
    if kind == "sites":
        from drumbeat.jobfile.site import site_names

        return site_names(os.environ)
    from drumbeat.base.data import names
    from drumbeat.jobfile.flags import PRESETS

    return list(names(PRESETS))


class Offer(NamedTuple):
    """Words that can follow one command."""

    summary: str
    options: Dict[str, str]  # --nodes -> its help
    values: Dict[str, List[str]]  # an option that takes a value -> the words it allows; empty: anything
    words: List[str]  # words that can stand by themselves
    looked_up: Dict[str, str]  # option, or "" for words by themselves -> kind of names that are looked up


def offers() -> Dict[str, Offer]:
    from drumbeat.cli import COMMANDS, parser_for

    made = {}
    for name, summary in COMMANDS.items():
        made[name] = Offer(summary, {}, {}, [], {})
        _gather(parser_for(name)[0], made[name])
    return made


def _gather(parser: Any, offer: Offer) -> None:
    for action in parser._actions:
        if action.help == SUPPRESS:  # an alias
            continue
        words = [str(word) for word in action.choices or getattr(action, "offers", ())]
        if not action.option_strings:
            offer.words.extend(words)
            if action.metavar in _LOOKED_UP:
                offer.looked_up[""] = _LOOKED_UP[action.metavar]
        for option in action.option_strings:
            if option.startswith("--"):
                offer.options[option] = " ".join((action.help or "").split()).replace("%%", "%")
            if action.nargs != 0:
                offer.values[option] = words
                kind = _LOOKED_UP.get(option) or _LOOKED_UP.get(action.metavar)
                if kind:
                    offer.looked_up[option] = kind
        if isinstance(action.choices, dict):  # commands of its own, as in `drumbeat site show`
            for inner in action.choices.values():
                _gather(inner, offer)


Offered = Callable[[List[str], Optional[str]], str]


def _cases(commands: Dict[str, Offer], before: str, word: str, offered: Offered, files: str) -> List[str]:
    """Return the cases of the commands, for bash and zsh. `before` and `word` are the shell's for the last two words; `offered`
    makes the command that offers words, `files` the one that offers files."""
    cases = []
    for name, offer in commands.items():
        values = [
            f"        {option}) {offered(words, offer.looked_up.get(option)) or files}return ;;"
            for option, words in offer.values.items()
        ]
        cases += [
            f"    {name})",
            *([f'      case "{before}" in', *values, "      esac"] if values else []),
            f'      if [[ "{word}" == -* ]]; then {offered([*offer.options], None)}',
            f"      else {offered(offer.words, offer.looked_up.get(''))}{files}fi ;;",
        ]
    return cases


def bash(commands: Dict[str, Offer]) -> str:
    return "\n".join(
        [
            "_drumbeat() {",
            '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" each',
            "  COMPREPLY=()",
            f'  if (( COMP_CWORD == 1 )) && [[ "$word" == -* ]]; then {_compgen([*_ALONE])}return; fi',
            f"  if (( COMP_CWORD == 1 )); then {_compgen([*commands])}return; fi",
            "  # After -- comes a command of your own: offer its files.",
            '  for each in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do [[ "$each" == -- ]] && return; done',
            '  case "${COMP_WORDS[1]}" in',
            *_cases(commands, "$before", "$word", _compgen, ":; "),  # it offers files where nothing else fits
            "  esac",
            "}",
            "complete -o default -F _drumbeat drumbeat",
            "",
        ]
    )


def _compgen(words: List[str], kind: Optional[str] = None) -> str:
    """Return the command that offers these words, or names that are looked up; empty if anything may stand there."""
    asked = f'" $({_ASK} {kind} 2>/dev/null)"' if kind else ""
    return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))}{asked} -- "$word")); ' if words or kind else ""


def _compadd(words: List[str], kind: Optional[str]) -> str:
    asked = f'${{(f)"$({_ASK} {kind} 2>/dev/null)"}}' if kind else ""
    return f"compadd -- {shlex.join(words)} {asked}; " if words or kind else ""


def zsh(commands: Dict[str, Offer]) -> str:
    described = " ".join(shlex.quote(f"{name}:{offer.summary}") for name, offer in commands.items())
    return "\n".join(
        [
            "_drumbeat() {",
            "  local -a commands",
            f"  commands=({described})",
            f'  if (( CURRENT == 2 )) && [[ "${{words[CURRENT]}}" == -* ]]; then {_compadd([*_ALONE], None)}return; fi',
            "  if (( CURRENT == 2 )); then _describe command commands; return; fi",
            "  # After -- comes a command of your own: offer its files.",
            "  if (( ${words[(Ie)--]} > 0 && ${words[(Ie)--]} < CURRENT )); then _files; return; fi",
            '  case "${words[2]}" in',
            *_cases(commands, "${words[CURRENT-1]}", "${words[CURRENT]}", _compadd, "_files; "),
            "  esac",
            "}",
            "compdef _drumbeat drumbeat",
            "",
        ]
    )


def fish(commands: Dict[str, Offer]) -> str:
    lines = [
        f"complete -c drumbeat -n __fish_use_subcommand -l {option[2:]} -d {_fish(say)}"
        for option, say in _ALONE.items()
    ]
    for name, offer in commands.items():
        lines.append(f"complete -c drumbeat -f -n __fish_use_subcommand -a {name} -d {_fish(offer.summary)}")
        here = f"complete -c drumbeat -n '__fish_seen_subcommand_from {name}'"
        for option, help in offer.options.items():
            value = ""
            if option in offer.values:
                words = offer.values[option]
                kind = offer.looked_up.get(option)
                asked = f"({_ASK} {kind})" if kind else " ".join(words)
                value = f" -x -a {_fish(asked)}" if asked else " -r"
            lines.append(f"{here} -l {option[2:]}{value} -d {_fish(help.split('. ')[0])}")
        if offer.words:
            lines.append(f"{here} -a {_fish(' '.join(offer.words))}")
        if "" in offer.looked_up:
            lines.append(f"{here} -a {_fish(f'({_ASK} {offer.looked_up[str()]})')}")
    return "\n".join([*lines, ""])


def _fish(text: str) -> str:
    """Quote for fish, which reads backslashes inside single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
