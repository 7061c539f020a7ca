"""Reports of one run, and of several side by side: read from run folders, or from what a program printed."""
