"""Job files and site profiles, checked: Job and Site, and the Order made from the two."""
