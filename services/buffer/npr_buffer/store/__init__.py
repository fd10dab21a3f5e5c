"""What is kept in Redis: keys, atomic scripts, typed results. Knows Redis and no gRPC."""
