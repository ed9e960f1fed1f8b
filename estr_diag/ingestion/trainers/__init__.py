"""One file (or a few with its name) for each trainer."""
