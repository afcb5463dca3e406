"""Access to the dashboard: names, sizes and time of requests, tokens, sessions."""
