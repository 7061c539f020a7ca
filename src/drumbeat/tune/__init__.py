"""Tune: short supervised runs of a job, compared. Batch size, communication hook, layout."""
