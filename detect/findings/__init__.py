"""What the searches found, as findings in words: place, time, cost, advice."""
