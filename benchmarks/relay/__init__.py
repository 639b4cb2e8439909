"""`polyrl bench relay`: what it costs to carry tokens from engines to a trainer, here and with other relays."""
