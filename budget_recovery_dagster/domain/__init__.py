"""Rules of counters, windows, snapshots and recovery: standard library only, no I/O, no clock."""
