"""Property tests of collectives on real ranks, bugs planted in collectives, and state machines."""
