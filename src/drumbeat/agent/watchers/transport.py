"""The gate: which network carries the traffic, and is it the one that was meant? A watcher; it reads nothing itself.

Two witnesses. NCCL's log says what it connected; the kernel's counters (traffic.py) say what moved. A log can be wrong,
and gloo has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

from drumbeat.agent.watchers.contract import Action, Emit, Saw, Stop, Warn
from drumbeat.agent.watchers.traffic import Traffic
from drumbeat.agent.watchers.transport_meant import Place, mismatch
from drumbeat.base.order import Expect
from drumbeat.findings.model import CERTAIN, ERROR, LIKELY, UNKNOWN, Finding, Verdict
from drumbeat.logs.nccl.paths import LOCAL, MIXED, OFI, RDMA, TCP, Path

if TYPE_CHECKING:
    from drumbeat.logs.reader import Reader

_QUIET = 1.0  # seconds without a new line, after which what the log says is complete for now
_PATIENCE = 120.0  # seconds after which what is only likely is said as such
_FORMED = ("Init COMPLETE", " via ", "Connected all")


class Gate:
    def __init__(self, expect: Expect, level: str, place: Place) -> None:
        self.expect, self.level, self.place = expect, level, place
        self._reader: Optional[Reader] = None
        self.path: Optional[Path] = None  # once it was said
        self.traffic_said = False
        self.mismatch = False
        self._started: Optional[float] = None
        self._first_line: Optional[float] = None
        self._last_line = 0.0
        self._changed = False
        self._formed = False  # a communicator came to be
        self._traffic = Traffic()

    @property
    def done(self) -> bool:
        return self.path is not None and self.traffic_said

    @property
    def reader(self) -> Reader:
        """Made at the first line: its rules take half a second to read, which a job without NCCL never needs."""
        if self._reader is None:
            from drumbeat.logs.reader import Reader

            self._reader = Reader()
        return self._reader

    def on(self, saw: Saw, now: float) -> List[Action]:
        if self.done:
            return []
        if saw.kind == "started":
            self._started = now
        elif saw.kind == "line" and saw.data.get("stream") == "nccl":
            self.reader.feed(str(saw.data["file"]), int(saw.data["number"]), str(saw.data["text"]).encode())
            self._first_line = now if self._first_line is None else self._first_line
            self._last_line, self._changed = now, True
            self._formed = self._formed or any(word in str(saw.data["text"]) for word in _FORMED)
        elif saw.kind == "counters":
            self._traffic.count(saw.data, now)
        elif saw.kind in ("tick", "ended") and self._started is not None:
            return self._judge(now, saw.kind == "ended")
        return []

    def _judge(self, now: float, final: bool) -> List[Action]:
        actions = self._judge_log(now, final)
        # Where a log is growing, or must come, only it can tell what the counters mean.
        awaited = self._first_line is not None or self.place.gpus
        if not self.traffic_said and (self.path is not None or final or not awaited):
            actions += self._judge_traffic(now, final)
        return actions

    # -- the log -----------------------------------------------------------------------------------------------------

    def _judge_log(self, now: float, final: bool) -> List[Action]:
        if self.path is not None or self._first_line is None or self._started is None:
            return []
        if not self._formed:  # what was only chosen carries nothing yet
            words = "unknown: no communicator formed"
            return self._say_transport(Path(UNKNOWN, confidence=UNKNOWN), now, words) if final else []
        late = final or now - self._started > _PATIENCE
        if not late and not (self._changed and now - self._last_line >= _QUIET):
            return []
        self._changed = False
        transport = self.reader.transport()
        path = transport.path
        over_network = path.answer in (RDMA, OFI, TCP, MIXED)
        settled = path.confidence == CERTAIN and (over_network or (path.answer == LOCAL and self.place.nodes == 1))
        if not settled and not late:
            return []  # NCCL connects lazily: there may be more to come
        if not final:
            self._traffic.forget()  # what moved before was not NCCL's
        return self._say_transport(path, now)

    def _say_transport(self, path: Path, now: float, words: str = "") -> List[Action]:
        self.path = path
        wrong = mismatch(self.expect, path, self.place.nodes)
        findings = []
        if wrong:
            findings.append(self._explained(wrong, path))
        elif self._unproved(path):
            findings.append(self.place.finding(
                "transport-unproved", f"nothing shows that {self._meant()} carries the traffic",
                path.words, "drumbeat run --trace writes NCCL's whole log; drumbeat diagnose reads it", path.evidence,
            ))  # fmt: skip
        elif self._asked() and self.place.emulated and self.place.nodes > 1:
            findings.append(self.place.finding(
                "expectation-not-checked",
                f"{self._meant()} is expected, and nothing was checked: the nodes are emulated on one machine",
                "nothing crosses a network between nodes here", "run it on real nodes, or drop expect here", (),
            ))  # fmt: skip
        elif path.answer == TCP and self.place.fast and self.expect.transport == "any" and self.place.nodes > 1:
            findings.append(self.place.finding(
                "fast-network-unused", f"the traffic goes over TCP, though this node has {', '.join(self.place.fast)}",
                *self._cause(path), path.evidence,
            ))  # fmt: skip
        seen = tuple(item.place or item.text for item in path.evidence)
        verdict = Verdict("transport", path.answer, path.confidence, words or path.words, tuple(findings), seen)
        stopping = bool(wrong)
        used = self._reader.transport().nics if self._reader is not None else ()
        more = {"nics": {str(rank): names for rank, names in used}} if used else {}
        return [self._verdict(verdict, now, **more), *(self._act(finding, stopping) for finding in findings)]

    def _unproved(self, path: Path) -> bool:
        silent = path.answer == UNKNOWN or (path.answer == LOCAL and self.place.nodes > 1)
        gdr = self.expect.gdr is not None and path.gdr is None and path.answer in (RDMA, OFI)
        return self._asked() and (silent or gdr) and not self.place.emulated

    def _asked(self) -> bool:
        return self.expect.transport != "any" or self.expect.gdr is not None

    def _explained(self, wrong: str, path: Path) -> Finding:
        cause, fix = self._cause(path)
        return self.place.finding("transport-mismatch", f"{wrong}, not {self._meant()}", cause, fix, path.evidence)

    def _cause(self, path: Path) -> Tuple[str, str]:
        """What the log's own lines explain, by the same rules as `drumbeat diagnose`."""
        if self._reader is not None:
            question = "gpudirect" if path.answer in (RDMA, OFI) else "network"
            codes = [rule.code for rule in self._reader.rules.rules if rule.explains == question]
            for note in self._reader.report().failure.notes:
                if note.code in codes and note.fix:
                    return f"{note.title}: {note.cause}", note.fix
        return (
            f"the log shows {path.words}",
            "drumbeat diagnose RUN/nodes/*/attempt-*/nccl-*.log says more; drumbeat doctor",
        )

    def _meant(self) -> str:
        words = [] if self.expect.transport == "any" else [self.expect.transport]
        if self.expect.gdr is not None:
            words.append("with GPUDirect" if self.expect.gdr else "without GPUDirect")
        return " ".join(words)

    # -- the counters ------------------------------------------------------------------------------------------------

    def _judge_traffic(self, now: float, final: bool) -> List[Action]:
        judged = self._traffic.judge(self.place, self.path, final)
        return [] if judged is None else self._say_traffic(*judged, now)

    def _say_traffic(self, verdict: Verdict, finding: Optional[Finding], now: float) -> List[Action]:
        self.traffic_said = True
        actions: List[Action] = []
        if finding:
            verdict = replace(verdict, findings=(finding,))
        carried = self._traffic.by_port
        actions.append(self._verdict(verdict, now, **({"carried": carried} if carried else {})))
        if finding:
            actions.append(self._act(finding, True))
        if self.path is None:  # no NCCL here: the counters are the only witness
            answer = UNKNOWN if self.place.gpus else {RDMA: RDMA, UNKNOWN: UNKNOWN}.get(verdict.answer, TCP)
            confidence = UNKNOWN if answer == UNKNOWN else LIKELY
            words = f"{answer}, by the counters" if answer != UNKNOWN else "unknown: NCCL wrote no log here"
            actions += self._say_transport(Path(answer, confidence=confidence), now, words)
        return actions

    # -- saying ------------------------------------------------------------------------------------------------------

    def _verdict(self, verdict: Verdict, now: float, **more: Any) -> Action:
        seconds = round(now - (self._started or now), 3)
        return Emit("verdict", {"verdict": verdict, "seconds": seconds, **more})

    def _act(self, finding: Finding, stopping: bool) -> Action:
        self.mismatch = True
        if stopping and self.level == "stop":
            return Stop(replace(finding, severity=ERROR))
        return Warn(finding)
