"""drumbeat's dataclass does what the standard library's does: each case is run with both."""

import copy
import dataclasses
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Dict, Tuple

import pytest

from drumbeat.base import light_dataclass

SOURCE = Path(light_dataclass.__file__).parent.parent
STANDARD = re.compile(r"^\s*from dataclasses import .*\bdataclass\b|@dataclasses\.dataclass", re.M)
BOTH = [pytest.param(dataclasses.dataclass, id="standard"), pytest.param(light_dataclass.dataclass, id="light")]


@light_dataclass.dataclass(frozen=True)
class Pickled:
    number: int
    words: Tuple[str, ...] = ()


@pytest.fixture(params=BOTH)
def dataclass(request):
    return request.param


@pytest.fixture
def base(dataclass):
    @dataclass(frozen=True)
    class Base:
        number: int
        name: str = "a"
        table: Dict[str, int] = dataclasses.field(default_factory=dict)
        unseen: int = dataclasses.field(default=0, compare=False, repr=False)
        kinds: ClassVar[int] = 3

    return Base


def test_values_by_place_by_name_and_by_default(base):
    made = base(1, name="b")
    assert (made.number, made.name, made.table, made.unseen) == (1, "b", {}, 0)
    assert base(2).table is not base(2).table
    assert [field.name for field in dataclasses.fields(base)] == ["number", "name", "table", "unseen"]
    assert dataclasses.is_dataclass(base) and dataclasses.asdict(made)["name"] == "b"
    assert dataclasses.replace(made, number=5) == base(5, "b")


@pytest.mark.parametrize("values, named", [((), {}), ((1, "a", {}, 0, 5), {}), ((1,), {"number": 2}), ((1,), {"x": 2})])
def test_what_does_not_fit_is_refused(base, values, named):
    with pytest.raises(TypeError):
        base(*values, **named)


def test_equal_by_what_is_compared_and_only_within_one_class(dataclass, base):
    @dataclass(frozen=True)
    class Other(base):
        pass

    assert base(1, unseen=1) == base(1, unseen=2) != base(2)
    assert base(1) != Other(1) and base(1) != 1
    assert "Base(number=1, name='a', table={})" in repr(base(1))


def test_frozen(dataclass, base):
    @dataclass(frozen=True)
    class Name:
        text: str

    assert {Name("a"), Name("a"), Name("b")} == {Name("b"), Name("a")} and hash(Name("a")) == hash(Name("a"))
    for change in (lambda: setattr(base(1), "number", 2), lambda: delattr(base(1), "number")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()


def test_one_that_changes_has_no_hash(dataclass):
    @dataclass
    class Counter:
        count: int = 0

    counter = Counter()
    counter.count += 1
    assert counter == Counter(1)
    with pytest.raises(TypeError):
        hash(counter)


def test_fields_of_a_base_come_first_and_post_init_is_called(dataclass, base):
    @dataclass(frozen=True)
    class Derived(base):
        name: str = "derived"
        more: int = 7
        made: list = dataclasses.field(init=False, default_factory=list)

        def __post_init__(self):
            self.made.append(self.number)

    assert (Derived(1, "x", {}, 0, 8).more, Derived(1).name, Derived(4).made) == (8, "derived", [4])
    with pytest.raises(TypeError):
        Derived(1, made=[])


def test_own_methods_are_kept(dataclass):
    @dataclass(frozen=True)
    class Own:
        text: str

        def __repr__(self):
            return "mine"

        def __eq__(self, other):
            return True

    assert repr(Own("a")) == "mine" and Own("a") == Own("b")
    assert hash(Own("a")) == hash(Own("a"))


def test_copied_and_pickled():
    record = Pickled(1, ("a",))
    assert pickle.loads(pickle.dumps(record)) == copy.copy(record) == copy.deepcopy(record) == record


def test_threads_that_make_the_first_instances_at_once(dataclass):
    for _ in range(50):

        @dataclass(frozen=True)
        class Shared:
            number: int
            words: list = dataclasses.field(default_factory=list)

        with ThreadPoolExecutor(8) as pool:
            assert {made.number for made in pool.map(Shared, range(8)) if made.words == []} == {*range(8)}


def test_every_room_uses_it():
    """But train and the collective test, which run inside the ranks: torch takes longer to import than they do."""
    own = [
        SOURCE / "base/light_dataclass.py",
        *SOURCE.glob("train/**/*.py"),
        *SOURCE.glob("inrank/collective_test/*.py"),
    ]
    others = set(SOURCE.rglob("*.py")) - set(own)
    assert len(others) > 300
    assert [str(path) for path in sorted(others) if STANDARD.search(path.read_text(encoding="utf-8"))] == []
