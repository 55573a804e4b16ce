"""The files of `debug.dump`: `dump.py` writes each step of a compilation to disk, `text.py` makes their contents."""
