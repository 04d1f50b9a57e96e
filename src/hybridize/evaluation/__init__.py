"""What was kept: needle retrieval, perplexity by position."""
