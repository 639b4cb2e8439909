"""The worker: joins a fleet, hosts one engine, streams its tokens, and leaves without losing any."""
