"""Timeline to observations: what each span counts as, and what can be measured of it."""
