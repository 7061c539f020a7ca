"""The former import path of `drumbeat.metrics.integrations`, kept for users' programs."""

import os

__path__ = [os.path.join(os.path.dirname(__file__), "metrics", "integrations")]
