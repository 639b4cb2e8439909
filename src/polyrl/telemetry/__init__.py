"""What a run leaves behind for people: the journal."""
