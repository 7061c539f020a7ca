"""What the user wrote, checked: Job and Site, and the Order that the two give."""
