"""The desk: where a person starts a run. It makes the run folder, starts agents, and then only reads."""
