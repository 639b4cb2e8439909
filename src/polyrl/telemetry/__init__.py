"""What a run leaves behind for people: the journal, its account, metrics, pictures, and what a terminal shows."""
