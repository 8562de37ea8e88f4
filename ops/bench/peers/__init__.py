"""The peers, each a side that runs in a process, and if need be in a Python, of its own."""
