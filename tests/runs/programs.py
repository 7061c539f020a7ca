"""Programs that several tests run as ranks."""

# Says that it is up; at SIGTERM says that it saved, and ends well.
SAVES = """
import os, signal, sys, time
def save(number, frame):
    open(f"saved-{os.environ['RANK']}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(f"up-{os.environ['RANK']}", "w").close()
while True:
    time.sleep(0.1)
"""
