"""Rows and counts with given scores that enter a table from outside, as a load brings them."""
