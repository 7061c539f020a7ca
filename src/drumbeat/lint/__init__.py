"""Lint: script text in, Findings out. `engine.lint` is the way in; the rules are the YAML files beside it."""
