"""Generate traces to judge the detector on, by people who have not read the detector."""
