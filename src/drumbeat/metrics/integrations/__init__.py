"""drumbeat inside other libraries: each module needs the library of its name, and writes what drumbeat.metrics.report does."""
