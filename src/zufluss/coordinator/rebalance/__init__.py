"""Even shares of the buckets: tags of servers, plans of moves, and their execution."""
