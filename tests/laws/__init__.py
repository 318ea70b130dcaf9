"""The laws that collectives keep, as property tests on real ranks; bugs planted in them; state machines."""
