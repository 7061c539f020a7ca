"""Exit codes and stop signals: one list for the agents, the desk, the backends and the training runtime."""

from __future__ import annotations

import signal

# Exit codes of drumbeat itself. A job's own code passes through unchanged; a rank killed by signal N gives 128+N.
EXIT_USAGE = 2  # bad input: nothing was started
EXIT_MUSTER = 69  # EX_UNAVAILABLE: the nodes did not come together
EXIT_STORAGE = 74  # EX_IOERR: the run folder cannot be written
EXIT_REQUEUE = 75  # EX_TEMPFAIL: saved after a stop signal, start me again
EXIT_PREFLIGHT = 78  # EX_CONFIG: a node would have failed
EXIT_TIME_LIMIT = 124  # as timeout(1)
EXIT_NOT_FOUND = 127

# Sent to a rank's main process when it should save and end, unless the job chooses another. USR1 belongs to NCCL.
STOP_SIGNAL = signal.SIGTERM

# Each of these asks drumbeat to end a run: Ctrl-C, a kill, a closed terminal, a scheduler's notice before the end.
STOP_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
STOPS = (*STOP_REQUESTS, signal.SIGQUIT)  # QUIT, by the desk to its agents: without grace
