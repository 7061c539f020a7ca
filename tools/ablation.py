"""Find the patterns of log rules that no example needs.

    python tools/ablation.py [--rules] [--largest BYTES] [LOG or JSONL ...]

Examples are the rules' own, tests/logs/data, the corpus (see tools/corpus.py) and the given files; a line of a .jsonl file has
its log under `text`. Patterns are left out one by one, for good where every answer stays as it was: code, fix, rank and
decisive line, or for a rule's own example code, fix and notes. An example is read again only if the pattern decided one of
its lines. --rules: leave out whole rules instead. Each line shows how many examples were read again, and how many of their
answers are no longer certain.
"""

import argparse
import glob
import json
import os
import sys
from collections import defaultdict
from dataclasses import replace

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import corpus  # noqa: E402 - it finds drumbeat
from drumbeat.desk.log_sources import Source, lines  # noqa: E402
from drumbeat.logs.meaning import rules as matching  # noqa: E402
from drumbeat.logs.reader import Reader  # noqa: E402

sys.path.insert(0, corpus.ROOT)
from tests.logs.reading import rule_examples  # noqa: E402

UNLESS = "unless"


class Examples:
    """Logs, the answer to each, and the patterns that decided its lines."""

    def __init__(self, largest):
        self.largest = largest
        self.texts = {}  # name -> [(first number, lines)]
        self.of_rule = {}  # name -> id of the rule that has it as an example
        self.answers = {}
        self.users = defaultdict(set)  # (rule, pattern) -> names
        self._matched = set()
        apply = matching._apply

        def recorded(rule, text, literal):
            match = apply(rule, text, literal)
            if match is not None:
                self._matched.add((rule.id, first_of(rule, text)))
            elif rule.unless and matching._compiled(rule.unless).search(text):
                self._matched.add((rule.id, UNLESS))
            return match

        matching._apply = recorded

    def add_text(self, name, text, rule=""):
        self.texts[name] = [(1, text.encode("utf-8", "replace").split(b"\n"))]
        self.of_rule[name] = rule

    def add_file(self, path):
        if path.endswith(".jsonl"):
            with open(path, encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    self.add_text(f"{path}:{number}", json.loads(line)["text"])
        elif os.path.getsize(path) < self.largest:
            self.texts[path] = list(lines(Source(path, "log")))

    def read(self, name, book):
        """The answer, and what decided lines."""
        self._matched.clear()
        reader = Reader(book)
        for number, some in self.texts[name]:
            reader.feed_lines("log", number, some)
        failure = reader.report().failure
        finding = failure.finding
        rest = (*failure.others, *failure.consequences, *failure.notes)
        answer = (failure.answer, finding and finding.fix)
        title = finding.title if finding else ""
        if self.of_rule.get(name):
            answer += (frozenset(each.code for each in rest),)
        else:
            answer += (finding and finding.rank, finding and [each.line for each in finding.evidence[:1]])
        return answer, failure.confidence, title, set(self._matched)

    def keep(self, name, answer, confidence, title, used):
        self.answers[name] = answer, confidence, title
        for names in self.users.values():
            names.discard(name)
        for key in used:
            self.users[key].add(name)

    def try_without(self, book, users, pattern):
        """The new readings of these examples, or None where one of them changes; of a pattern with names also the title."""
        fresh = {}
        for name in sorted(users, key=lambda each: sum(len(some) for _, some in self.texts[each])):
            fresh[name] = self.read(name, book)
            old, new = self.answers[name], fresh[name]
            weaker = old[1] == "certain" != new[1] and not self.of_rule.get(name)
            if new[0] != old[0] or new[2] != old[2] or weaker:
                return None
        return fresh


def first_of(rule, text):
    patterns = rule.pattern + rule.mentions
    return next((each for each in patterns if matching._compiled(each).search(text)), "")


def gather(paths, largest):
    found = Examples(largest)
    data = os.path.join(corpus.ROOT, "tests", "logs", "data")
    for rule, own in rule_examples().items():
        for number, text in enumerate((*own.examples, *own.near)):
            found.add_text(f"{number} of {rule}", text, rule)
    for path in sorted(glob.glob(os.path.join(data, "*.t*"))):
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                found.add_text(f"{path}:{number}", line.rstrip("\n").split("\t")[-1], "words")
    for log, _, _ in corpus.labels(corpus.corpus_folders(), "all"):
        found.add_file(log)
    for path in paths:
        found.add_file(path)
    return found


def without_pattern(rule, pattern):
    """The rule without this pattern; None where nothing would be left of it."""
    left = replace(
        rule,
        pattern=tuple(each for each in rule.pattern if each != pattern),
        mentions=tuple(each for each in rule.mentions if each != pattern),
        unless="" if rule.unless == pattern else rule.unless,
    )
    return left if left.pattern or not rule.pattern else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=2_000_000, help="leave out logs of more bytes")
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("logs", nargs="*")
    args = parser.parse_args()
    examples = gather(args.logs, args.largest)
    rules = {rule.id: rule for rule in matching.rulebook().rules}
    book = matching.Rulebook(rules.values())
    for name in examples.texts:
        examples.keep(name, *examples.read(name, book))
    print(f"{len(examples.texts)} examples, {len(rules)} rules", flush=True)
    for rule in list(rules.values()):
        unless = [rule.unless] if rule.unless else []
        for pattern in [""] if args.rules else [*rule.pattern, *rule.mentions, *unless]:
            left = None if args.rules else without_pattern(rules[rule.id], pattern)
            trial = {**rules, rule.id: left} if left else {key: each for key, each in rules.items() if key != rule.id}
            users = set(examples.users[rule.id, UNLESS if pattern in unless else pattern])
            if left is None:
                users |= {name for key, names in examples.users.items() if key[0] == rule.id for name in names}
            fresh = examples.try_without(matching.Rulebook(trial.values()), users, pattern)
            if fresh is None:
                continue
            rules = trial
            unsure = sum(examples.answers[name][1] == "certain" != reading[1] for name, reading in fresh.items())
            for name, reading in fresh.items():
                examples.keep(name, *reading)
            print(f"{rule.id:<6} {rule.code:<24} {len(users):>4} {unsure:>4}  {pattern or 'the rule'}", flush=True)
            if left is None:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
