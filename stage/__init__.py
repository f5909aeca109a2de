"""MOVE: puts verified weights on a node's disk."""
