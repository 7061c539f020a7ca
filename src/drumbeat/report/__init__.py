"""What a run did, and several runs side by side: read from run folders, or from what a program printed."""
