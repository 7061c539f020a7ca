"""Evidence that a program got past an error, and the judgement of it: the only one, for alarms and for `certain`.

From strong to weak: what failed was tried again and went well; the program reports it as a warning and ends well; a test run
counts successes alone; its writer says later that the work was done; more steps follow than other ranks may still make; the
log ends well with steps in between; hundreds of lines follow. Steps behind a traceback may be older than it (Python prints
that at once, and what was buffered later), and steps behind a rank's own error may be other ranks', so that they need the
program's word that it goes on.
"""

from __future__ import annotations

from typing import Collection

from drumbeat.logs.events import Event
from drumbeat.logs.failure import Log
from drumbeat.logs.meaning.grammar import is_listed
from drumbeat.logs.read.attempts import speaker
from drumbeat.logs.read.progress import HANDLED_LINES

FEW_LINES = 2  # that follow an exception which was caught and printed, or came several times before
MESSAGE_LINES = 25  # below an exception's first line that may still belong to it
SOME_LINES = 100  # behind an error of a rank or a script, beside which something else failed
MANY_LINES = 300  # that a file goes on after an exception if nothing says that anything failed


class Recovery:
    def __init__(self, log: Log) -> None:
        self.log = log

    def settled(self, event: Event) -> bool:
        """Return True if what failed was tried again and went well."""
        return self.log.steps.settled(event.evidence.file or "", event.number)

    def announced(self, event: Event) -> bool:
        """Return True if the program says that it goes on, tries again or is tried again."""
        return self.log.steps.handled(event.evidence.file or "", event.number)

    def finished(self, event: Event) -> bool:
        """Return True if its writer says later that the work was done, or if the log ends well with steps in between."""
        return self.log.good_end_after(event) or self._ended_well(event)

    def _ended_well(self, event: Event) -> bool:
        file, steps = event.evidence.file or "", self.log.steps
        end = self.log.good_ends.closing(file)
        if end <= event.number:
            return False
        if steps.reported_lightly(file, event.number):
            return True
        if self.log.is_raised(event, MESSAGE_LINES):
            return False
        return steps.trained(file, event.number, end) if event.rank is not None else steps.any(file, event.number, end)

    def trains(self, event: Event) -> bool:
        """Return True if steps follow."""
        return self.log.trains_on(event)

    def went_on(self, event: Event) -> bool:
        """Return True where the file goes on long, shows steps or ends well, whatever else may have failed."""
        return self.log.after(event) > SOME_LINES or self.finished(event) or self.trains(event)

    def outlived(self, event: Event) -> bool:
        """Return True if hundreds of lines or steps follow."""
        return self.log.after(event) > MANY_LINES or self.trains(event)

    def trained_past(self, event: Event) -> bool:
        """Return True if many steps follow that are surely the program's own progress behind the error."""
        file = event.evidence.file or ""
        if not self.log.steps.trained(file, event.number):
            return False
        own = event.rank is None and not self.log.is_raised(event, MESSAGE_LINES)
        # a program meets a missing module before its first step, or lives through it
        return own or event.code == "import-error" or self.announced(event)

    def is_history(self, event: Event, reports: Collection[Event]) -> bool:
        """Return True if step after step follows and nothing fails any more: the job lived through it."""
        file, steps = event.evidence.file or "", self.log.steps
        ended = reports or file in self.log.failed or self.log.is_raised(event, MESSAGE_LINES)
        lines = range(event.number - HANDLED_LINES, event.number + 1)
        own = event.rank is None or any(steps.handled(file, line) for line in lines)
        return not ended and own and steps.trained(file, event.number)

    def is_over(self, event: Event, reports: Collection[Event]) -> bool:
        """Return True for the last word of a failure if the run went on and ended well, or makes step after step since.
        `reports`: what launchers report, which outweighs steps unless it is tried again."""
        lost = [each for each in reports if not self.announced(each)]
        goes_on = self.log.after(event) > MANY_LINES or self.trains(event) and not lost
        passed = self.log.of_passed_tests(event) or self.is_history(event, reports)
        return passed or goes_on and self.finished(event)

    def passed(self, event: Event, reports: Collection[Event], alone: bool) -> bool:
        """Return True if the program got past this error, where nothing else failed; `alone`: no other line names a cause."""
        if self.finished(event) or self.trained_past(event) or self.is_history(event, reports):
            return True
        spoken = (
            event.said or event.code.endswith("-access") and self.announced(event)
        )  # of a service, no part of the job
        if spoken and event.rank is None and self.log.steps.any(event.evidence.file or "", event.number):
            return True  # words that only seem to mean a failure, or say that it is tried again, and work behind them
        lines = FEW_LINES if event.caught or event.again else MANY_LINES
        if event.caught and not event.again and not event.bare and not self.trains(event):
            lines = MESSAGE_LINES  # the program may have caught it to tidy up and leave
        unknown = event.bare and event.match is None and event.lines == 1 and not is_listed(event.exception)
        if unknown and not event.again:
            lines = MESSAGE_LINES  # a name that nobody knows: it ended the program, or it was a message
        return (alone or event.said) and self.log.after(event) > lines

    def may_have_passed(self, event: Event) -> bool:
        """Return True if it is not certain that this error ended the program, where nobody else says that anything failed."""
        file = event.evidence.file or ""
        of_nobody = not speaker(event.evidence.text, event.rank, event.host)
        ends_well = of_nobody and self.log.good_ends.closing(file) > event.number
        return ends_well or self.outlived(event) or self.log.steps.tries(file, event.number)
