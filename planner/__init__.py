"""The pure host planner: what is physically true, what a change costs, whether it is possible."""
