"""What this user's past runs say about nodes, and which nodes new jobs avoid: one small file in the user's state folder.

Only the desk reads and writes it. It is replaced as a whole under a lock, belongs to this user alone, and never grows beyond a
few hundred kilobytes. A store that cannot be used costs a line of text, never a run.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import field, replace
from typing import Callable, Dict, Mapping, Optional, Tuple

from drumbeat.base.home import users_folder
from drumbeat.base.light_dataclass import dataclass
from drumbeat.base.private_folder import make_private, unsafe
from drumbeat.base.problem import Problem
from drumbeat.base.record import RecordError, check_schema, from_plain, to_json
from drumbeat.runfolder.write import replace as replace_file

SCHEMA = "1.0"
MOST_RECORDS = 2_000  # the newest are kept
MOST_EXCLUSIONS = 500
_LARGEST = 4 << 20  # bytes that are read
_WAIT = 3.0  # seconds for the lock
_LONGEST = 300  # characters of a reason


class NotKept(Problem):
    """The store cannot be written. What it holds may still be read."""


@dataclass(frozen=True)
class Sighting:
    """One thing that a run says about a node."""

    t: float  # seconds since 1970
    site: str
    host: str
    run: str
    what: str  # one of node_history.KINDS
    detail: str = ""


@dataclass(frozen=True)
class Exclusion:
    """A node that new jobs avoid."""

    site: str
    host: str
    why: str
    t: float  # since when
    until: Optional[float] = None  # none: until it is forgotten
    by_hand: bool = False


@dataclass(frozen=True)
class Store:
    sightings: Tuple[Sighting, ...] = ()  # the oldest first
    exclusions: Tuple[Exclusion, ...] = ()
    read: Dict[str, int] = field(default_factory=dict)  # run -> bytes of its events that have been read
    forgotten: Dict[str, float] = field(default_factory=dict)  # SITE/HOST -> what came before that time does not count
    schema: str = SCHEMA

    def excluded(self, site: str, now: float) -> Tuple[Exclusion, ...]:
        """Those that count now, by host."""
        valid = [each for each in self.exclusions if each.site == site and (each.until is None or each.until > now)]
        return tuple(sorted(valid, key=lambda each: each.host))

    def bounded(self, now: float) -> Store:
        """Without what has expired, and without more than it may hold."""
        valid = [each for each in self.exclusions if each.until is None or each.until > now]
        sightings = sorted(self.sightings, key=lambda each: each.t)[-MOST_RECORDS:]
        shortened = tuple(replace(each, detail=each.detail[:_LONGEST]) for each in sightings)
        newest = dict(list(self.read.items())[-MOST_RECORDS:])
        kept = sorted(valid, key=lambda each: each.t)[-MOST_EXCLUSIONS:]
        forgotten = dict(list(self.forgotten.items())[-MOST_EXCLUSIONS:])
        return replace(self, sightings=shortened, exclusions=tuple(kept), read=newest, forgotten=forgotten)


def store_folder(environ: Mapping[str, str]) -> str:
    return os.path.join(users_folder(environ, "XDG_STATE_HOME", ".local", "state"), "drumbeat", "nodes")


def read_store(environ: Mapping[str, str]) -> Store:
    """The store; empty where there is none. Problem: there is one, and it cannot be used."""
    folder = store_folder(environ)
    path = os.path.join(folder, "nodes.json")
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            why = unsafe(os.fstat(file.fileno())) or unsafe(os.lstat(folder))
            if why:
                raise Problem(f"{path} is not used: it {why}", "remove it, or give it back to its owner with mode 0600")
            text = file.read(_LARGEST + 1)
    except FileNotFoundError:
        return Store()
    except OSError as error:
        raise Problem(f"{path} cannot be read: {error.strerror}") from None
    try:
        if len(text) > _LARGEST:
            raise ValueError("too large")
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("it holds no mapping")
        check_schema(str(data.get("schema", "?")), SCHEMA, path)
        return from_plain(Store, data)
    except (ValueError, RecordError) as error:
        raise _damaged(path, str(error)[:120]) from None
    except (AttributeError, RecursionError, OverflowError):
        raise _damaged(path, "its contents have the wrong form") from None


def _damaged(path: str, why: str) -> Problem:
    lost = "nodes that were excluded or forgotten by hand must be named again"
    return Problem(f"{path} is damaged ({why})", f"remove it: past runs are read again, but {lost}")


def change_store(environ: Mapping[str, str], change: Callable[[Store], Store], now: Optional[float] = None) -> Store:
    """Read, change, write, under a lock; the new store. NotKept: it cannot be written; Problem: it cannot be read."""
    folder = store_folder(environ)
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        why = make_private(folder)
        if why:
            raise NotKept(f"what is known about nodes cannot be kept: {why}")
        with open(os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb") as lock:
            _lock(lock.fileno(), folder)
            before = read_store(environ)
            after = change(before).bounded(time.time() if now is None else now)
            if after != before:
                replace_file(os.path.join(folder, "nodes.json"), to_json(after) + "\n")
            return after
    except OSError as error:
        raise NotKept(f"what is known about nodes cannot be kept in {folder}: {error.strerror}") from None


def _lock(number: int, folder: str) -> None:
    deadline = time.monotonic() + _WAIT
    while True:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NotKept(f"{folder} is locked by another drumbeat", "try again") from None
            time.sleep(0.05)
        except OSError:
            return  # a file system without locks: the file is still replaced as a whole
