"""The diagnosis rules, as YAML. Adding one touches no Python: docs/diagnose.md."""
