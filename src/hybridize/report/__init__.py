"""One self-contained HTML page a run, and the tables that the terminal shows."""
