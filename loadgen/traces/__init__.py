"""Arrival traces: one reader per file format, where to find the files, and what they are like.

`find.locate` turns a name or a path into a file, `registry.read` into a `Trace`.  A reader never guesses: it reads
columns by name, states its unit, and `rows_read == rows_kept + rows_dropped` with a reason for every drop.
"""
