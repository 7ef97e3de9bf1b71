"""The shared paged-cache engine: schedule, execute, update."""
