"""The story that ``budget-recovery demo`` tells: a store is lost, and brought back, with figures.

The servers, the gateway and its traffic are those of the sandbox; what protects the store comes in
through a small protocol. Every figure is read from the servers, and a pure function judges them.
"""
