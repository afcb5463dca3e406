"""Looking at a model of the user's before it trains: what planning must know, what is wrong."""
