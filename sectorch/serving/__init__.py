"""A model as the parties that serve it see it: its description, the file that holds it, and the values of a call."""
