"""Looks at what ranks are doing: read by the agents when the lead asks, judged by the lead."""
