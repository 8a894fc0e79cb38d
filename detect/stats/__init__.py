"""Statistics of a search: how far a rank is from its peers, and whether that is more than noise.

Fed by the causes with values (row, iteration); knows nothing of spans, of how causes are told
apart, or of words.

    residuals.py    log time minus that of the peers, data and position taken out
    noise.py        how far healthy ranks stray, the smallest effect that can be found
    robust.py       medians and scales that a few bad samples cannot move
    search.py       all slow rows of one class, at a false-discovery rate
    stretches.py    when each was slow: whole window, stretch, on and off, more and more
    host_tests.py   the ranks of one host as a sample against those of other hosts

Start reading at search.py. All numbers stand in `detect.thresholds`.
"""
