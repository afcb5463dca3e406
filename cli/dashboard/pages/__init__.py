"""The pages: each says what it consists of at the moment."""
