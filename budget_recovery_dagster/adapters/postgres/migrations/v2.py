"""SQL of version 2, which changes tables and views of version 1.

Names compare byte by byte (COLLATE "C"), as in ``v1_snapshots``.
"""

BLOCKS: tuple[str, ...] = ()
"""In the order of their execution."""
