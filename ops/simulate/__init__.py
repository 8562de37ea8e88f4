"""Drives the real scheduler through a recorded trace, with a cost model in the model runner's place.

In the order in which to read: `traces` (what came when), `cost` (what a step takes), `driver` (the loop), `metrics`
and `report` (what came of it), `engine_flags` (how the engine is set), `compare` (the preemption modes side by side),
`burst` (how soon one is forgotten), `chrome_trace` (the same to look at), `prefix_only` (the prefix cache alone).
"""
