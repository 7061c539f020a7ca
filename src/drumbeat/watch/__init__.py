"""Live views of a run: one model of how it stands, shown in the terminal, on a page, and to Prometheus."""
