"""Fixed scenes on real servers, recorded so that two versions of the project can be compared.

``python -m tests.scenes OUT.json`` records them, and ``python -m tests.scenes --compare A.json
B.json`` shows what differs. Only public interfaces are used: the installed command, Dagster's
definitions, SQL and NATS. The same recorder therefore works before and after a change of structure.
"""
