"""The desk: where a person starts a run and looks at it. It makes the run folder, starts agents, and then only reads."""
