"""What a run reports about itself: time, utilisation, communication, profiles."""
