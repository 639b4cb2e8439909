"""The manager: the live driver of the scheduler. One port, one owner of the scheduler, one journal."""
