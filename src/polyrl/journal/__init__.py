"""The journal: checksummed frames, records of events, their replay, and the story of a sample."""
