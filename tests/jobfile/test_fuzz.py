"""Whatever the file holds: a Job, or one Problem with a line per mistake. Nothing else escapes."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from drumbeat.base.problem import Problem
from drumbeat.jobfile.check import keys_of
from drumbeat.jobfile.job import Job, job_from_text
from drumbeat.jobfile.resolve import resolve
from drumbeat.jobfile.resources import Here
from drumbeat.jobfile.site import load_site
from drumbeat.jobfile.yamlfile import decode

SITE = load_site("localhost", {})
HERE = Here("h", "/w", {"HOME": "/h", "A": "$B"}, 4, None, "u", 0.0, "e")

# Pieces of YAML with the keys of a job, so that random text gets past the parser now and then.
PIECES = st.sampled_from(
    [*keys_of(Job), "ranks", ": ", ":\n  ", "\n", ", ", "- ", "[", "]", "{", "}", "'", '"', "&a ", "*a", "!!x ",
     "|\n ", ">-\n",
     "# ", "? ", "<<", "---", "...", "%YAML ", "\\U", "\t", "~", "$", "${", "$HOME", "1", "2h", "1:30:00", "pass",
     "torchrun", "é", "\u2028", "\x85", "\ufeff", "\0", "\x7f"]
)  # fmt: skip


def job_or_problem(text):
    try:
        job = job_from_text(text)
    except Problem as problem:
        lines = problem.what.split("\n")
        assert len(lines) < 20 and all(line.isprintable() and len(line) < 1000 for line in lines)
        assert all(line.strip().startswith(("job.yaml:", "and ")) for line in lines)
        return
    try:
        resolve(job, SITE, HERE)
    except Problem as problem:
        assert problem.what.isprintable()


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES | st.text(max_size=5), max_size=25).map("".join))
@example('a: "\\UFFFFFFFF"')
@example("%YAML 1." + "9" * 5000 + "\n---\na: 1")
@example("name: x\r\ncommand: x\r\n")
def test_text(text):
    job_or_problem(text)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_bytes(data):
    try:
        text = decode(data, "job.yaml", "a job file")
    except Problem as problem:
        assert str(problem).isprintable()
        return
    job_or_problem(text)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(list(keys_of(Job))), st.text("$1a-:.{} '~/hpass,[]", max_size=12), max_size=4))
def test_values(values):
    """Each value in double quotes, which YAML reads as JSON does: many get as far as the checker."""
    import json

    job_or_problem("".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()))
