"""A simulated gateway: it answers requests, reports their cost, adds it up, and derives blocks.

Three parts that know each other only through NATS, as in a real one:

- The **gate** answers each request from what it knows to be blocked, and never waits; it writes
  what it let through into its **ledger**, from which a **reporter** publishes the costs.
- The **aggregator** takes the costs from their stream and adds them to the counters.
- The **derivation** watches the counters and keeps leaderboards and blocked keys in line with them.

The ledger is the exact record of true spend: what the counters must sum up to.
"""
