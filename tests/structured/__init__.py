"""Planning: who holds what, memory, recommendation."""
