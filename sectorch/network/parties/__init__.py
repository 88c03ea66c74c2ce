"""The parties as processes: server, answering party, querying party."""
