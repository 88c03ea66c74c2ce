"""Programs: recorded choreographies, their projection to the parties of a process, and how they run."""
