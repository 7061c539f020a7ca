"""Programs that run as ranks in pods."""


def goes_on(pause: float) -> str:
    """40 steps of `pause` seconds; started again, it goes on from the step that it kept."""
    return _GOES_ON.replace("PAUSE", str(pause))


_GOES_ON = """
import os, pathlib, time
kept = pathlib.Path(os.environ["KEPT"]) / f"step-{os.environ['RANK']}"
first = int(kept.read_text()) if kept.exists() else 0
print("attempt", os.environ["DRUMBEAT_ATTEMPT"], "begins at step", first, flush=True)
for step in range(first, 40):
    new = kept.with_suffix(".new")
    new.write_text(str(step))
    new.replace(kept)  # a kill must not leave half of it
    time.sleep(PAUSE)
print("done", flush=True)
"""
