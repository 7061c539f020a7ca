from tools.meaning import HERE, TESTED, WEIGHTS, learn, read, subject

lines = read([*sorted(HERE.glob("*.tsv")), TESTED / "failed_runs.tsv", TESTED / "reworded.tsv"])
healthy = [("benign", text) for text in (TESTED / "healthy_words.txt").read_text().splitlines()]
WEIGHTS.write_text(learn([*lines, *healthy]))
subject.SUBJECT.write_text(subject.learn(lines))

from drumbeat.logs.meaning.likely import likely  # noqa: E402 - it reads what was just written

held_out = read([TESTED / "held_out.tsv"])
right = sum(next(iter(likely(text)), "") == code for code, text in held_out)
print(f"{len(lines) + len(healthy)} lines; of {len(held_out)} others {right} right ({right / len(held_out):.1%})")
