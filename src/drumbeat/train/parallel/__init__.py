"""One model on many ranks: degrees of parallelism, groups of ranks, and what each kind of parallelism does to the model."""
