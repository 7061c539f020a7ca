"""The search against made-up memory: it finds the limit, within the trials it said, and never takes a hang for one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from drumbeat.tune.search import HANG, NAN, OK, OOM, Done, Next, Tried, divisors, most_trials, next_batch, smaller


def search(candidates, start, outcome):
    history = []
    while True:
        answer = next_batch(candidates, start, history)
        if isinstance(answer, Done):
            return answer, history
        assert answer.batch in candidates
        assert len(history) < 100, "it must end"
        history.append(Tried(answer.batch, outcome(answer), answer.long))


def spaces():
    """A step's samples by rank, or a free range; a start in it."""
    shares = st.integers(1, 5000).map(divisors)
    ranges = st.integers(1, 3000).map(lambda top: range(1, top + 1))
    return st.one_of(shares, ranges).flatmap(lambda some: st.tuples(st.just(some), st.sampled_from(some)))


@settings(deadline=None)
@given(spaces(), st.integers(0, 6000))
def test_the_largest_that_fits_is_found_and_tried_again(space, limit):
    candidates, start = space
    done, history = search(candidates, start, lambda asked: OK if asked.batch <= limit else OOM)
    assert done.largest == max((batch for batch in candidates if batch <= limit), default=None)
    once = [tried for tried in history if not tried.long]
    assert len(once) == len({tried.batch for tried in once}), "nothing is tried twice"
    if done.largest is not None:
        assert history[-1] == Tried(done.largest, OK, True)


@settings(deadline=None)
@given(spaces(), st.integers(0, 6000))
def test_it_takes_no_more_trials_than_it_said(space, limit):
    candidates, start = space
    _, history = search(candidates, start, lambda asked: OK if asked.batch <= limit else OOM)
    assert len(history) <= most_trials(candidates, start)


@settings(deadline=None)
@given(spaces(), st.integers(0, 3000), st.sampled_from([HANG, NAN, "failed"]))
def test_another_bad_end_is_never_a_memory_limit(space, limit, outcome):
    candidates, start = space
    done, history = search(candidates, start, lambda asked: OK if asked.batch <= limit else outcome)
    assert sum(tried.outcome == outcome for tried in history) <= 1, "nothing is searched below it"
    assert outcome in done.why or done.largest == candidates[-1]
    assert done.largest is None or done.largest <= limit


@settings(deadline=None)
@given(spaces(), st.integers(1, 6000), st.integers(1, 6000))
def test_a_longer_trial_may_overrule_the_short_one(space, limit, lasting):
    """Memory that creeps: above `lasting` the short trial goes well and the long one does not."""
    candidates, start = space
    top = {False: limit, True: min(limit, lasting)}
    done, history = search(candidates, start, lambda asked: OK if asked.batch <= top[asked.long] else OOM)
    assert done.largest is None or (done.largest <= lasting and Tried(done.largest, OK, True) in history)
    kept = max((batch for batch in candidates if batch <= min(limit, lasting)), default=None)
    assert done.largest == kept


def test_doubling_then_halving():
    _, history = search(range(1, 1025), 4, lambda asked: OK if asked.batch <= 21 else OOM)
    assert [tried.batch for tried in history] == [4, 8, 16, 32, 24, 20, 22, 21, 21]
    assert next_batch((1, 2, 3, 6), 6, [Tried(6, OOM)]) == Next(3)


def test_a_search_that_starts_at_the_top_still_compares_smaller_ones():
    candidates = divisors(64)
    assert smaller(candidates, 64, [64]) == 32
    assert smaller(candidates, 64, [64, 32]) == 16
    assert smaller(candidates, 64, [16, 32, 64]) is None
    assert smaller((3, 5), 5, [5]) is None, "neither half nor a quarter of it is there"
    assert most_trials(candidates, 64) >= 4, "64, 64 for longer, 32, 16"
