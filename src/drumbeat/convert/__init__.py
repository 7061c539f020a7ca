"""From a batch script that exists to a job file, with everything that was left out and why."""
