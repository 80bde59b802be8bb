"""What runs inside a kernel: the agent, its hooks, and ``%gpuckpt``. Cheap to import, and free of keeper and store."""
