"""The searches: which rank, link or part of the job is slow, and of what."""
