"""The manager beside other relays: fake engines, a reader, and what is between them."""
