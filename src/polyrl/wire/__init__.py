"""The protocol between processes: frames, columns of tokens, HTTP requests, and credentials."""
