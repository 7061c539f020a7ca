#!/bin/sh
# The node rooms' own tests, run by a real Python 3.9: the oldest that the agent promises to run on.
set -eu
cd "$(dirname "$0")/.."
find_python() {
  for candidate in "$(command -v python3.9 || true)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.9*/bin/python; do
    if [ -n "$candidate" ] && [ -x "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 9))'; then
      echo "$candidate"
      return
    fi
  done
}
python=$(find_python)
if [ -z "$python" ]; then
  echo "SKIPPED: no Python 3.9 on PATH or in pyenv, so the node rooms were not tested with the oldest Python"
  exit 0
fi
venv=.venv/oldest
if ! "$venv/bin/python" -c 'import pytest, pytest_timeout, hypothesis, yaml' 2>/dev/null; then
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check PyYAML pytest pytest-timeout hypothesis
fi
# Rooms that only compute. What starts processes is covered by tests/bundle, which runs the whole file with this Python; what moves
# many bytes, reads all the logs of the corpus or our source says nothing about a Python, and of many cases of one test the first
# does (tests/conftest.py).
set -- "$@" tests/agent tests/runfolder --ignore tests/agent/test_gathering.py --ignore tests/agent/test_large.py \
  --ignore tests/agent/test_slow.py \
  tests/contracts/test_golden.py tests/contracts/test_light_dataclass.py tests/contracts/test_regex.py tests/contracts/test_seen.py \
  --deselect tests/runfolder/test_views.py::test_a_failure_of_ten_thousand_ranks \
  --deselect tests/agent/test_monitor.py::test_it_says_why_the_text_file_cannot_be_written
# The bundle's other commands; agents do not need these rooms.
if [ -n "${DRUMBEAT_PROOFS:-}" ]; then
  set -- "$@" tests/logs tests/doctor tests/lint tests/plan tests/jobfile \
    --ignore tests/logs/test_corpus.py --ignore tests/logs/test_fuzz.py --ignore tests/lint/test_fuzz.py --ignore tests/jobfile/test_fuzz.py \
    --deselect tests/doctor/test_dumps.py::test_hostile_text_is_read_in_bounded_time \
    --deselect tests/doctor/test_dumps.py::test_standard_input_is_judged_as_a_file_is_by_diagnose_and_doctor \
    --deselect tests/logs/test_repeats.py::test_lines_that_never_repeat_are_read_as_well_as_others \
    tests/tune/test_search.py tests/tune/test_observe.py tests/tune/test_parts.py tests/tune/test_submit.py
fi
DRUMBEAT_OLDEST_PYTHON=1 PYTHONPATH=src exec "$venv/bin/python" -m pytest -q -p no:cacheprovider "$@"
