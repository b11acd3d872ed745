"""Timed runs of knowable and its peers; see README.md beside this file."""
