"""Measurements that a run reports: time, utilisation, communication, profiles."""
