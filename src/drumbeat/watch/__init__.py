"""Live views of a run: one model of its state, shown in the terminal, on a page, and to Prometheus."""
