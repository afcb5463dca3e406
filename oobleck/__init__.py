"""What users import: their own models (`oobleck.model`, which needs torch)."""
