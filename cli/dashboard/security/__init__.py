"""Who may ask the dashboard what: names, sizes and time of requests, tokens, sessions."""
