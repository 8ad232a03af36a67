"""The sharding plan: sizes, memory, and what the planner writes into options."""
