"""Rules about nodes and their processes: who is in, who is lost, who is sick, who leaves."""
