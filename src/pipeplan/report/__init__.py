"""Plans for people to look at."""
