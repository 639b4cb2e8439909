"""What processes say to each other: frames, columns of tokens, and how a token proves who speaks."""
