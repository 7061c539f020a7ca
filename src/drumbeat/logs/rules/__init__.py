"""The diagnosis rules, as YAML. Adding one touches no Python: contributing/log-rules.md."""
