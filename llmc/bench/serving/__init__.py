"""`llmc bench serve`: load on a server that speaks OpenAI's API, and how it bears it."""
